"""What `--speculative` names is found, or one line says why not."""

import sys

import pytest

from engine.drafter_loader import build_drafter, draft_model_of, find_drafter_class
from engine.errors import StartupError
from engine.ngram_drafter import NgramDrafter
from tests import drafters


def load(spec):
    """As the engine does it: the class before the model, the drafter after."""
    drafter_class = find_drafter_class(spec)
    return drafter_class and build_drafter(spec, drafter_class, vocab_size=5, max_tokens=2)


def test_off_is_no_drafter_and_ngram_is_ours():
    assert find_drafter_class("off") is None
    assert find_drafter_class("ngram") is NgramDrafter


def test_a_draft_model_is_named_by_whatever_follows():
    assert find_drafter_class("draft:some/model") is None
    named = [draft_model_of(spec) for spec in ("draft:some/model", "draft: a:b ", "ngram", "a:B")]
    assert named == ["some/model", "a:b", None, None]


def test_a_class_is_built_with_both_sizes():
    drafter = load("tests.drafters:OracleDrafter")
    assert isinstance(drafter, drafters.OracleDrafter)
    assert (drafter.vocab_size, drafter.max_tokens) == (5, 2)


MODULE = """
import asyncio
number = 7
class NoFinish:
    def propose(self, contexts): ...
class Async:
    async def propose(self, contexts): ...
    def finish(self, request_id): ...
class Failing:
    def __init__(self, **sizes): raise ValueError("no\\n  luck")
    def propose(self, contexts): ...
    def finish(self, request_id): ...
class Exiting(Failing):
    def __init__(self, **sizes): raise SystemExit(3)
class WrongArguments:
    def propose(self, contexts): ...
    def finish(self, request_id): ...
"""


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "nonsense",
            "nonsense names no drafter: it takes 'off', 'ngram', 'draft:MODEL' or",
        ),
        ("draft:", "--speculative draft: names no model: it takes 'off', 'ngram', 'draft:MODEL'"),
        ("draft: ", "names no model"),
        ("", "--speculative  names no drafter"),
        ("a:b:c", "a:b:c names no drafter"),
        ("a.:B", "a.:B names no drafter"),
        ("1a:B", "1a:B names no drafter"),
        ("no_such_module:Class", "no module named 'no_such_module' is found; install it, or put"),
        ("engine.no_such_part:Class", "no module named 'engine.no_such_part' is found"),
        ("a_drafter:Missing", "module a_drafter has no class Missing; check the name"),
        ("a_drafter:number", "module a_drafter has no class number"),
        ("a_drafter:NoFinish", r"NoFinish needs a plain \(not async\) method finish"),
        ("a_drafter:Async", r"Async needs a plain \(not async\) method propose"),
        (
            "a_drafter:Failing",
            r"Failing\(vocab_size=5, max_tokens=2\) failed with ValueError: no luck; mend",
        ),
        ("a_drafter:Exiting", "failed with SystemExit: 3"),
        ("a_drafter:WrongArguments", "failed with TypeError: "),
        ("a_broken_drafter:Class", "importing a_broken_drafter failed with ZeroDivisionError: "),
        ("an_exiting_drafter:Class", "importing an_exiting_drafter failed with SystemExit: 1"),
    ],
)
def test_every_failure_is_one_line_with_cause_and_mend(spec, message, tmp_path, monkeypatch):
    (tmp_path / "a_drafter.py").write_text(MODULE)
    (tmp_path / "a_broken_drafter.py").write_text("1 / 0")
    (tmp_path / "an_exiting_drafter.py").write_text("raise SystemExit(1)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StartupError, match=message) as caught:
        load(spec)
    assert "\n" not in str(caught.value)
    sys.modules.pop("a_drafter", None)
