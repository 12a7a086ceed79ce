"""What speculation tells and forgets: its counts add up, and a reset leaves nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.async_engine import AsyncEngine
from engine.sampler import Unsampled
from engine.sampling_params import SamplingParams
from engine.step import StepInput, StepOutput
from tests import drafters
from tests.running_engine import Answer, ask, greedy, running_engine

PROMPT = [3 + (17 * i) % 370 for i in range(22)]
NUM_DRAFTS = 5


@pytest.fixture
async def truth(tiny_llama: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(drafters, "CONTINUATIONS", {})
    async with running_engine(tiny_llama, kernel_cache) as engine:
        answer: Answer = await ask(engine, PROMPT, greedy(24))
    drafters.know(PROMPT, answer.token_ids)
    return answer.token_ids


@pytest.mark.parametrize("drafter", ["Oracle", "AlwaysWrong", "RandomAcceptance"])
async def test_accepted_and_rejected_add_up_in_answers_and_counters(
    tiny_llama: Path, kernel_cache: Path, truth: list[int], drafter: str
) -> None:
    """Each pass yields its accepted drafts and one token more; the first, of the prompt, has none.

    What was accepted behind the end of the answer is in neither, and counts as rejected.
    """
    async with running_engine(
        tiny_llama,
        kernel_cache,
        speculative=f"tests.drafters:{drafter}Drafter",
        speculative_tokens=NUM_DRAFTS,
    ) as engine:
        whole = await ask(engine, PROMPT, greedy(24))
        stats = engine.stats()
        assert len(whole.token_ids) == 24
        assert whole.num_accepted_drafts == stats.spec_num_accepted_tokens
        assert whole.num_accepted_drafts == sum(stats.spec_accepted_per_pos)
        drafted = whole.num_accepted_drafts + whole.num_rejected_drafts
        assert drafted == stats.spec_num_draft_tokens
        # Where the answer is one token short of its end there is nothing to draft.
        num_passes = 24 - whole.num_accepted_drafts - 1
        assert num_passes - stats.spec_num_drafts in (0, 1)
        wanted = {"Oracle": (19, 0), "AlwaysWrong": (0, 100)}.get(drafter)
        if wanted is not None:
            assert (whole.num_accepted_drafts, whole.num_rejected_drafts) == wanted
        if drafter != "Oracle":
            return
        # The prompt yields the first token, a run the five behind it; one of these is the end.
        end = next(i for i in range(1, NUM_DRAFTS) if truth[i] not in truth[:i])
        cut = await ask(engine, PROMPT, replace(greedy(24), stop_token_ids=(truth[end],)))
        assert (len(cut.token_ids), cut.num_accepted_drafts) == (end + 1, end)
        assert cut.num_rejected_drafts == NUM_DRAFTS - end


def learnt(engine: AsyncEngine) -> set[str | None]:
    speculation = engine._core._speculation
    assert speculation is not None
    salts: set[str | None] = speculation._drafter._drafter._finished.salts  # type: ignore[attr-defined]
    return salts


async def test_a_reset_leaves_nothing_to_draft_from(tiny_llama: Path, kernel_cache: Path) -> None:
    """Of its salt alone; nor does a request learn after it that had begun before it."""
    async with running_engine(
        tiny_llama, kernel_cache, speculative="ngram", speculative_tokens=NUM_DRAFTS
    ) as engine:
        for salt in (None, "a", "b"):
            await ask(engine, PROMPT, greedy(8), cache_salt=salt)
        assert learnt(engine) == {None, "a", "b"}
        await engine.cache_reset(None, cache_salt="a")
        assert learnt(engine) == {None, "b"}
        running = engine.generate(PROMPT, greedy(12), request_id="running", cache_salt="b")
        await anext(running)
        await engine.cache_reset(None)
        assert learnt(engine) == set()
        outputs = [output async for output in running]
        assert outputs[-1].num_output_tokens == 12
        assert learnt(engine) == set()
        await ask(engine, PROMPT, greedy(8), cache_salt="b")
        assert learnt(engine) == {"b"}


async def test_what_a_request_said_is_guessed_for_the_next_of_its_salt_alone(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True)
    async with running_engine(
        tiny_llama, kernel_cache, speculative="ngram", speculative_tokens=NUM_DRAFTS
    ) as engine:
        first = await ask(engine, PROMPT, params, cache_salt="a")
        again = await ask(engine, PROMPT, params, cache_salt="a")
        other = await ask(engine, PROMPT, params, cache_salt="b")
    assert again.num_accepted_drafts >= 15 > first.num_accepted_drafts
    assert other.num_accepted_drafts == first.num_accepted_drafts


@pytest.mark.parametrize("num_whole", [0, 1, 3])
async def test_a_guess_that_breaks_its_pass_ends_no_request(
    tiny_llama: Path, kernel_cache: Path, truth: list[int], num_whole: int
) -> None:
    """KV that is no number reaches the rows before it, too; those are computed again alone."""
    async with running_engine(
        tiny_llama,
        kernel_cache,
        speculative="tests.drafters:OracleDrafter",
        speculative_tokens=NUM_DRAFTS,
    ) as engine:
        runner = engine._core._runner
        plain_execute, num_broken = runner.execute, 0

        def execute(step: StepInput) -> StepOutput:
            nonlocal num_broken
            output = plain_execute(step)
            draws = [list(drawn) for drawn in output.draws]
            for sequence, drawn in zip(step.sequences, draws, strict=True):
                if sequence.run is not None and sequence.run.draft_token_ids:
                    drawn[min(num_whole, len(drawn) - 1) :] = [Unsampled("planted")]
                    num_broken += 1
            return replace(output, draws=draws)

        runner.execute = execute  # type: ignore[method-assign]
        answer = await ask(engine, PROMPT, greedy(24))
        assert answer.error is None
        assert answer.token_ids == truth
        assert num_broken == {0: 22, 1: 11, 3: 6}[num_whole]
        runner.execute = plain_execute  # type: ignore[method-assign]
        again = await ask(engine, PROMPT, greedy(24))
        assert again.token_ids == truth
