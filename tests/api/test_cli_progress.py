import logging

from api.cli import progress as progress_module
from api.cli.progress import LoadProgress


def test_phases_and_quarters_are_logged(caplog, monkeypatch):
    monkeypatch.setattr(progress_module, "QUICK", -1.0)
    caplog.set_level(logging.INFO)
    progress = LoadProgress(on_terminal=False)
    for percent in range(0, 101, 10):
        progress("converting", float(percent))
    progress("loading", 0.0)
    progress("loading", 3.0)
    assert [record.getMessage() for record in caplog.records] == [
        "Loading: converting",
        "Loading: converting, 30 %",
        "Loading: converting, 50 %",
        "Loading: converting, 80 %",
        "Loading: converting, 100 %",
        "Loading: loading",
    ]


def test_a_quick_phase_is_told_once(caplog):
    caplog.set_level(logging.INFO)
    progress = LoadProgress(on_terminal=False)
    for percent in range(0, 101, 10):
        progress("converting", float(percent))
    assert [record.getMessage() for record in caplog.records] == ["Loading: converting"]


def test_a_terminal_gets_a_bar_that_goes_away(capsys, caplog):
    caplog.set_level(logging.INFO)
    progress = LoadProgress(on_terminal=True)
    progress("converting", 0.0)
    progress("converting", 100.0)
    progress("loading", 50.0)
    progress.close()
    shown = capsys.readouterr().err
    assert "converting" in shown
    assert "loading" in shown
    assert shown.endswith("\r")
    assert caplog.records == []


def test_nothing_is_shown_after_the_end(caplog):
    caplog.set_level(logging.INFO)
    progress = LoadProgress(on_terminal=False)
    progress.close()
    progress("late", 1.0)
    assert caplog.records == []
