import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from api.cli.errors import UsageError
from api.cli.server import listen, public_url


def test_a_listening_socket():
    with listen("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        assert public_url(listener) == f"http://127.0.0.1:{port}"
        socket.create_connection((host, port)).close()


def test_the_url_of_all_addresses_is_one_that_works():
    with listen("0.0.0.0", 0) as listener:
        assert public_url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_port_in_use():
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError) as caught:
            listen("127.0.0.1", port)
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1 port {port}: Address already in use; choose another with "
        "--port, or stop the process that has it"
    )


def test_a_port_is_free_again_after_its_server():
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        listener.accept()[0].close()
        client.close()
    listen("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.7"])
def test_an_address_of_somebody_else(host):
    with pytest.raises(UsageError, match=host):
        listen(host, 0)


# A server around a stand-in for the application: what is tested here is who stops when.
SCRIPT = """
import asyncio, sys
from api.cli.server import StopSignals, listen, run_server
from api.holder import EngineHolder
from engine.errors import StartupError

signals = StopSignals()

class Engine:
    healthy = True
    def stop_intake(self):
        print("intake stopped", flush=True)
    async def close(self, drain_timeout):
        print("draining", drain_timeout, flush=True)
        await asyncio.sleep({drain})
        print("closed", flush=True)

async def load(report):
    await asyncio.sleep({load})
    if {fail}:
        raise StartupError("no such model")
    return Engine()

async def app(scope, receive, send):
    await send({{"type": "http.response.start", "status": 200, "headers": []}})
    await send({{"type": "http.response.body", "body": b"up"}})

holder = EngineHolder(load)
listener = listen("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
try:
    run_server(app, holder, listener, signals, drain_timeout=7.0,
               on_ready=lambda: print("ready", flush=True))
except StartupError as error:
    sys.exit(f"failed: {{error}}")
"""


@pytest.fixture
def start():
    processes = []

    def begin(load=0, fail=False, drain=0):
        script = textwrap.dedent(SCRIPT.format(load=load, fail=fail, drain=drain))
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        processes.append(process)
        return process, int(process.stdout.readline())

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_drains_and_ends_well(start, number):
    process, _ = start()
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert out == "intake stopped\ndraining 7.0\nclosed\n"
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(start, number):
    process, _ = start(drain=60)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "intake stopped\n"
    assert process.stdout.readline() == "draining 7.0\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert out == ""
    assert process.returncode == 128 + number


def test_the_port_answers_during_load_and_drain(start):
    import httpx

    process, port = start(load=60)
    assert httpx.get(f"http://127.0.0.1:{port}/health").text == "up"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0

    process, port = start(drain=1)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "intake stopped\n"
    assert process.stdout.readline() == "draining 7.0\n"
    assert httpx.get(f"http://127.0.0.1:{port}/ready").text == "up"
    assert process.wait(20) == 0


def test_a_failed_load_is_the_servers_failure(start):
    process, _ = start(fail=True)
    out, err = process.communicate(timeout=20)
    assert out == ""
    assert err.splitlines()[-1] == "failed: no such model"
    assert process.returncode == 1
