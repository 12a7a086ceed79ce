"""`overwinter serve` as users start it: a process of its own, its stderr read as it comes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

PATIENCE = 180.0  # seconds
READY = re.compile(r"Ready at (http://\S+)")


class Command:
    """`overwinter serve` in a process of its own; its stderr is read as it comes."""

    def __init__(self, *arguments: object) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("OVERWINTER_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "api", "serve", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def ready(self) -> str:
        """The URL, once the server says that it is ready."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in list(self.lines):
                if found := READY.search(line):
                    return found[1]
            time.sleep(0.02)
        raise AssertionError("\n".join(self.lines))

    def wait(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join()
        return code

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def close(self) -> None:
        self.process.kill()
        self.wait()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()
