"""Independent requests: `python benchmarks/serving.py [--serve ARGS] [overwinter bench's flags]`.

`--serve "--dtype float32"` passes flags to the server that this script starts and stops.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from api.cli.app import run
from own_server import own_server


def main(defaults: Sequence[str] = ()) -> int:
    """Runs `overwinter bench` with `defaults` and the command line against a server of its own."""
    arguments = sys.argv[1:]
    serve: list[str] = []
    if "--serve" in arguments:
        place = arguments.index("--serve")
        serve = shlex.split("".join(arguments[place + 1 : place + 2]))
        del arguments[place : place + 2]
    given = {argument.split("=")[0] for argument in arguments}
    for flag, value in zip(defaults[::2], defaults[1::2], strict=True):
        if flag not in given:
            arguments += [flag, value]
    with own_server(serve) as url:
        return run(["bench", "--url", url, *arguments])


if __name__ == "__main__":
    sys.exit(main())
