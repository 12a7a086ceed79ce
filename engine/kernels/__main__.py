"""`python -m engine.kernels --cache-dir DIR`: build the kernels ahead of their first use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.kernels.build import VARIANTS, KernelBuildError, build_library, detect_variant


def main(argv: Sequence[str] | None = None) -> int:
    """Build, print the library's path, return the exit status: 0, or 2 with the cause."""
    parser = argparse.ArgumentParser(prog="python -m engine.kernels", description=__doc__)
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument(
        "--variant",
        action="append",
        choices=list(VARIANTS),
        help="instruction set to build for; may be repeated (default: this processor's best)",
    )
    args = parser.parse_args(argv)
    for variant in args.variant or [detect_variant()]:
        try:
            print(build_library(args.cache_dir, variant))
        except KernelBuildError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
