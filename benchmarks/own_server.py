"""A server for the length of one benchmark: started on a free port, ready, and stopped again."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import httpx

READY_TIMEOUT = 600.0  # seconds; the first start converts the model


@contextlib.contextmanager
def own_server(
    arguments: Sequence[str] = (), *, port: int = 0, disk_tier: bool = True
) -> Iterator[str]:
    """The URL of a server started with `arguments`, on a free port unless `port` names one.

    Its disk tier is a temporary directory, unless `arguments` name one or there is to be none. What
    the environment says of OpenBLAS is not passed on: some machines set a processor type there that
    is not theirs. Raises `RuntimeError` if the server ends before it is ready.
    """
    port = port or _free_port()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    with tempfile.TemporaryDirectory(prefix="overwinter-bench-") as directory:
        command = [sys.executable, "-m", "api", "serve", *arguments]
        command += ["--port", str(port), "--log-level", "warning"]
        if disk_tier and not any(argument.startswith("--disk-tier") for argument in arguments):
            command += ["--disk-tier", directory]
        process = subprocess.Popen(command, env=environment)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(process, url)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT
    with httpx.Client(base_url=url, timeout=5) as client:  # a new one per try costs the server time
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with exit code {process.returncode}")
            with contextlib.suppress(httpx.HTTPError):
                if client.get("/ready").status_code == 200:
                    return
            time.sleep(0.1)
    raise RuntimeError(f"the server was not ready within {READY_TIMEOUT:.0f} s")
