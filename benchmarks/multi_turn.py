"""Conversations: eight at once, six turns each. Flags as for `serving.py`."""

from __future__ import annotations

import sys

from serving import main

if __name__ == "__main__":
    sys.exit(
        main(
            [
                *("--concurrency", "8"),
                *("--num-requests", "48"),
                *("--turns", "6"),
                *("--input-tokens", "128"),
                *("--output-tokens", "64"),
            ]
        )
    )
