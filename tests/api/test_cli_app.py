import subprocess
import sys

import pytest

import api
from api.cli.app import run

COMMANDS = [
    ["--help"],
    ["--version"],
    ["serve", "--help"],
    ["serve", "--print-config"],
    ["chat", "--help"],
    ["bench", "--help"],
    ["store", "--help"],
]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    import os

    for variable in [name for name in os.environ if name.startswith("OVERWINTER_")]:
        monkeypatch.delenv(variable)


def last_line(text):
    return text.strip().splitlines()[-1]


@pytest.mark.parametrize("arguments", [["--version"], ["serve", "--version"]])
def test_the_version(capsys, arguments):
    assert run(arguments) == 0
    assert capsys.readouterr().out == f"{api.__version__}\n"


def test_help_lists_the_commands(capsys):
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    for command in ("serve", "chat", "bench", "store"):
        assert f" {command} " in out


def test_help_of_serve_explains_every_flag(capsys):
    from api.cli.options import OPTIONS

    assert run(["serve", "--help"]) == 0
    out = capsys.readouterr().out
    for named in OPTIONS:
        assert named.flag in out
    for flag in ("--config FILE", "--print-config", "--version"):
        assert flag in out
    assert "HF directory, .gguf file or hub id." in out


def test_print_config(capsys, monkeypatch):
    monkeypatch.setenv("OVERWINTER_MAX_QUEUE", "9")
    arguments = ["serve", "m", "--api-key", "k1", "--api-key=k2", "--no-disk-tier-optional"]
    assert run([*arguments, "--print-config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 'model = "m"' in lines
    assert 'api-key = ["********", "********"]' in lines
    assert "max-queue = 9" in lines
    assert "disk-tier-optional = false" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serv"], 'Unknown command "serv". Did you mean "serve"?'),
        (["serve", "--hots", "x"], "Unknown option: --hots. Did you mean --host?"),
        (["serve", "--model", "x"], "Unknown option: --model."),
        (["serve", "a", "b"], "unexpected argument 'b'."),
        (["serve", "--port"], 'Command "serve" parameter --port requires an argument.'),
        (["serve", "--port", "1", "--port", "2"], "Parameter --port specified multiple times."),
        (["serve", "--port", "x"], "--port takes a whole number from 0 to 65535, not 'x'"),
        (["serve", "--kv-memory", "1", "--kv-blocks", "1"], "--kv-memory and --kv-blocks exclude"),
        (["serve", "--config", "/absent.toml"], "--config /absent.toml cannot be read"),
        (["serve", "--api-key", "********"], "--api-key is the mask"),
        (["bench", "--turns", "0"], "--turns takes a whole number from 1 up"),
        (["chat", "--max-tokens", "x"], "Invalid value for --max-tokens"),
        (["store", "ls"], 'Command "store ls" parameter DIR requires an argument.'),
    ],
)
def test_a_bad_command_line_ends_with_one_line_and_exit_code_2(capsys, arguments, message):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"overwinter: error: {message}")


def test_unknown_variables_are_refused(capsys, monkeypatch):
    monkeypatch.setenv("OVERWINTER_PROT", "1")
    assert run(["serve", "--print-config"]) == 2
    assert "did you mean OVERWINTER_PORT?" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_only_serving_imports_torch(arguments):
    script = (
        "import sys\n"
        "from api.cli.app import run\n"
        f"code = run({arguments!r})\n"
        "heavy = sorted({'torch', 'transformers', 'fastapi', 'numpy'} & set(sys.modules))\n"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", ["api.cli.chat", "api.cli.bench", "api.cli.store"])
def test_the_clients_never_import_torch(module):
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_python_m_api_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "api", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"{api.__version__}\n")
    done = subprocess.run(
        [sys.executable, "-m", "api", "serve", "--nope"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert last_line(done.stderr).startswith("overwinter: error: Unknown option: --nope")


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m api serve --help | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc"])
def test_store_commands_look_into_the_directory_they_are_given(capsys, tmp_path, command):
    assert run(["store", command, str(tmp_path)]) == 0
    assert run(["store", command, str(tmp_path / "absent")]) == 2
    assert "absent: No such file or directory" in capsys.readouterr().err


def test_the_flags_of_store_reach_it(monkeypatch, tmp_path):
    calls = []

    def record(directory, **flags):
        calls.append((directory, flags))
        return 7

    monkeypatch.setattr("api.cli.store.store_ls", record)
    monkeypatch.setattr("api.cli.store.store_gc", record)
    assert run(["store", "ls", str(tmp_path), "--fingerprint", "ab"]) == 7
    keep = ["--keep-fingerprint", "ab", "--keep-fingerprint", "cd"]
    assert run(["store", "gc", str(tmp_path), *keep, "--max-age", "60", "--dry-run"]) == 7
    assert run(["store", "gc", str(tmp_path)]) == 7
    gc = {"keep_fingerprint": ["ab", "cd"], "max_age": 60.0, "dry_run": True}
    bare = {"keep_fingerprint": (), "max_age": None, "dry_run": False}
    assert calls == [(tmp_path, {"fingerprint": "ab"}), (tmp_path, gc), (tmp_path, bare)]
