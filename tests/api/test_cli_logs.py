import json
import logging
import re
import sys

import pytest

from api.cli import logs


@pytest.fixture(autouse=True)
def _restore_logging():
    root = logging.getLogger()
    saved = (root.handlers, root.level)
    yield
    root.handlers, root.level = saved
    for package in logs.PACKAGES:
        logging.getLogger(package).setLevel(logging.NOTSET)
    logging.captureWarnings(False)


def test_text_lines(capsys):
    logs.configure("info", "text")
    logging.getLogger("engine.core").info("Step %d", 3)
    logging.getLogger("api.gate").warning("Slow", extra={"request_id": "r1"})
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO    engine\.core: Step 3", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING api\.gate \[r1\]: Slow", second)


def test_json_lines(capsys):
    logs.configure("info", "json")
    logging.getLogger("offload.disk_tier").info('Stored "%s"', "é", extra={"request_id": "r1"})
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("engine").exception("Failed")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first.pop("time"))
    assert first == {
        "level": "info",
        "logger": "offload.disk_tier",
        "message": 'Stored "é"',
        "request_id": "r1",
    }
    assert second["level"] == "error"
    assert "request_id" not in second
    assert second["exception"].endswith("ValueError: bad")


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("debug", ["engine debug", "engine info", "engine warning", "other warning"]),
        ("info", ["engine info", "engine warning", "other warning"]),
        ("warning", ["engine warning", "other warning"]),
        ("error", []),
    ],
)
def test_levels_are_ours_and_others_only_warn(capsys, level, shown):
    logs.configure(level, "text")
    for name in ("engine", "other"):
        for said in ("debug", "info", "warning"):
            logger = logging.getLogger(name)
            logger.log(getattr(logging, said.upper()), f"{name} {said}")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == shown


def test_configuring_twice_logs_once(capsys):
    logs.configure("info", "text")
    logs.configure("info", "text")
    logging.getLogger("engine").info("once")
    assert capsys.readouterr().err.count("once") == 1
    assert logging.getLogger().handlers[0].stream is sys.stderr
