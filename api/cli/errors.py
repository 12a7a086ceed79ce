"""What the command line says when it cannot go on."""

from __future__ import annotations

import sys

EXIT_FAILURE = 1
EXIT_USAGE = 2


class UsageError(Exception):
    """The command cannot start as asked; the message names the cause and the mend."""


class CommandError(Exception):
    """The command started and then failed; the message names the cause."""


def complain(message: object) -> None:
    """Prints the one last line of a failed command."""
    line = " ".join(str(message).split())
    print(f"overwinter: error: {line}", file=sys.stderr, flush=True)
