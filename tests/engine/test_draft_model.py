"""What a draft model guesses is what it would guess cold, whatever its pages went through before.

The measure is the same model run over all tokens at once through its own eager attention, in
float32; the drafter runs it in pages, in chunks, over rejected guesses, after prefix hits.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import attention
from engine.block_hash import chain_hashes, root_hash
from engine.draft_loading import DraftModel, build_model_drafter, load_draft_model
from engine.draft_model import ModelDrafter, Shadow
from engine.drafter import DraftContext
from engine.kernels import load_kernels
from engine.model_loader import LoadedModel, load_model
from engine.sampler import Sampled, SampleRow, Unsampled, sample
from engine.sampling_params import SamplingParams
from engine.self_test import _eager_logits
from engine.step import StepInput, StepOutput
from offload.tier import BlockKey
from tests.running_engine import engine_config, greedy, seeded
from tests.tiny_models import EOS, SPECIALS, make_tiny_model

BLOCK_SIZE = 4
EOS_ID = SPECIALS.index(EOS)
PROMPT = [3 + (17 * i) % 370 for i in range(42)]  # ten blocks and two tokens
FAMILIES = ["llama", "gemma2"]  # full attention; windows of 24 tokens in two layers of three


@functools.cache
def cold_model(directory: str) -> LoadedModel:
    """The same model as transformers has it: no layer of it was replaced."""
    return load_model(engine_config(Path(directory), Path(directory)), lambda *_: None)


class Bench:
    """A drafter without an engine: its model, its rows counted, its guesses checked."""

    def __init__(self, draft: DraftModel, cache_dir: Path, **settings: Any) -> None:
        self.draft = draft
        settings = {"max_num_batched_tokens": 512, **settings}  # prompts come in one chunk
        config = engine_config(Path(draft.loaded.info.path), cache_dir, **settings)
        kernels = load_kernels(cache_dir)
        info = draft.loaded.info
        self.drafter: ModelDrafter = build_model_drafter(
            config, draft, info, kernels, None, lambda *_: None
        )
        self.passes: list[list[tuple[int, int]]] = []  # of each pass: start and rows
        self.execute = self.drafter._runner.execute
        self.drafter._runner.execute = self._counted  # type: ignore[method-assign]

    def _counted(self, step: StepInput) -> StepOutput:
        self.passes.append([(s.start, len(s.token_ids)) for s in step.sequences])
        return self.execute(step)

    def propose(self, *contexts: DraftContext) -> list[list[int]]:
        self.passes.clear()
        drafts = self.drafter.propose(contexts)
        self.drafter.check()
        return drafts

    def guess(self, context: DraftContext) -> list[int]:
        """The drafts for one context, asked until its backlog is done; checked."""
        computed: list[list[tuple[int, int]]] = []
        for _ in range(50):
            drafts = self.propose(context)[0]
            computed += self.passes
            if drafts:
                break
        self.passes = computed
        assert drafts
        self.assert_cold(context, drafts)
        return drafts

    def assert_cold(self, context: DraftContext, drafts: Sequence[int]) -> None:
        """The model draws these after the context's tokens, by its own attention over all."""
        ids, start = [*context.token_ids, *drafts], context.num_prompt_tokens
        eos = () if context.params.ignore_eos else (EOS_ID,)
        positions = range(len(context.token_ids), len(ids))
        rows = [
            SampleRow(
                params=replace(context.params, logprobs=None, prompt_logprobs=None),
                seed=context.seed,
                position=position,
                prompt_token_ids=ids[:start],
                output_token_ids=ids[start:position],
                stop_ids=frozenset((*eos, *context.params.stop_token_ids)),
            )
            for position in positions
        ]
        logits = _eager_logits(cold_model(self.draft.loaded.info.path), ids)[
            [position - 1 for position in positions]
        ]
        drawn = [draw.token_id for draw in sample(logits, rows) if isinstance(draw, Sampled)]
        assert list(drafts) == drawn

    def assert_all_cold(
        self, contexts: Sequence[DraftContext], drafts: Sequence[Sequence[int]], *lengths: int
    ) -> None:
        """Each context has as many drafts as `lengths` says, and they are cold ones."""
        assert [len(each) for each in drafts] == list(lengths)
        for context, each in zip(contexts, drafts, strict=True):
            self.assert_cold(context, each)

    def num_rows(self) -> int:
        """Tokens computed since the last call of `propose` (or by all calls of `guess`)."""
        return sum(rows for sequences in self.passes for _, rows in sequences)

    def planes(
        self, token_ids: Sequence[int], salt: str | None = None
    ) -> list[torch.Tensor | None]:
        """The keys and values that the prefix cache has for each whole block of `token_ids`."""
        kv, cache = self.drafter.kv, self.drafter._runner._kv
        root = root_hash(self.drafter._fingerprint, salt)
        planes: list[torch.Tensor | None] = []
        for block_hash in chain_hashes(root, token_ids, BLOCK_SIZE):
            block_id = kv.pool.lookup(BlockKey(block_hash, 0))
            held = None if block_id is None else cache.planes(block_id, cache.layout.num_layers)
            planes.append(held)
        return planes

    def assert_all_free(self) -> None:
        pool = self.drafter.kv.pool
        assert pool.num_available == pool.num_blocks
        self.drafter.check()


@pytest.fixture(scope="module")
def drafts(
    tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> Iterator[dict[str, DraftModel]]:
    """A model of each family as the draft of itself."""
    attention.register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {}
    for family in FAMILIES:
        directory = make_tiny_model(tmp_path_factory.mktemp("models") / family, family)
        config = engine_config(directory, kernel_cache)
        target: LoadedModel = load_model(config, lambda *_: None)
        found[family] = load_draft_model(config, f"draft:{directory}", target, lambda *_: None)
    yield found
    torch.set_num_threads(threads)


@pytest.fixture
def bench(drafts: dict[str, DraftModel], kernel_cache: Path) -> Bench:
    return Bench(drafts["llama"], kernel_cache)


def context(
    token_ids: Sequence[int],
    max_tokens: int = 4,
    name: str = "a",
    params: SamplingParams | None = None,
    **fields: Any,
) -> DraftContext:
    given = {"salt": None, "num_prompt_tokens": min(len(token_ids), len(PROMPT)), "seed": 11}
    params = params or greedy(64)
    return DraftContext(name, tuple(token_ids), max_tokens, params=params, **{**given, **fields})


PARAMS = {
    "greedy": greedy(64),
    "seeded": seeded(64),
    "penalties": seeded(
        64, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3, top_p=0.9, top_k=50
    ),
    "bias": seeded(64, temperature=0.8, min_p=0.02, logit_bias={7: 3.0, 200: -50.0}),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_guesses_are_cold_ones_whatever_was_rejected_before(
    drafts: dict[str, DraftModel], kernel_cache: Path, family: str, params: SamplingParams
) -> None:
    """A target that accepts none, some or all drafts, in turn, over more than two windows."""
    bench, tokens = Bench(drafts[family], kernel_cache, kv_blocks=128), list(PROMPT)
    for turn in range(10):
        num_drafts = 1 + (2 * turn) % 5
        guesses = bench.guess(context(tokens, num_drafts, params=params))
        assert len(guesses) == num_drafts
        num_accepted = (3 * turn) % (num_drafts + 1)
        bonus = [*guesses, 5][num_accepted]
        tokens += [*guesses[:num_accepted], (bonus + 1) % 300 + 3]  # no draft is equal to it
        tokens += PROMPT[: (0, 0, 2, 5)[turn % 4]]  # steps at which it was not asked
    bench.drafter.finish("a")
    bench.assert_all_free()


def test_only_what_agrees_is_kept(bench: Bench) -> None:
    """After `n` accepted guesses and a token of the target's, just what was never an input of the
    right tokens is computed."""
    tokens = list(PROMPT)
    guesses = bench.guess(context(tokens, 6))
    assert bench.num_rows() == len(PROMPT) + 5  # the last guess is no input
    for num_accepted, num_to_compute in ((0, 1), (2, 1), (5, 1), (6, 2)):
        tokens += [*guesses[:num_accepted], [*guesses, 3][num_accepted] ^ 1]
        guesses = bench.guess(context(tokens, 6))
        assert bench.passes[0] == [(len(tokens) - num_to_compute, num_to_compute)]


@pytest.mark.parametrize("num_accepted", range(6))
@pytest.mark.parametrize("told", [False, True])
def test_kept_blocks_are_those_of_a_fresh_prefill(
    drafts: dict[str, DraftModel], kernel_cache: Path, num_accepted: int, told: bool
) -> None:
    """At every residue of the end, with rejected guesses in the slots behind it."""
    bench, fresh = (Bench(drafts["llama"], kernel_cache) for _ in range(2))
    tokens = PROMPT + [9] * 2
    guesses = bench.guess(context(tokens, 6))
    tokens += guesses[:num_accepted]
    if told:  # the request's end, with its last token, which was never an input
        tokens += [(guesses[num_accepted] + 1) % 300]
        bench.drafter.remember(context(tokens, 0))
    bench.drafter.finish("a")
    bench.assert_all_free()
    held = bench.planes([*tokens, *guesses[num_accepted:]])
    num_kept = (len(tokens) - 1 if told else len(PROMPT) + 1) // BLOCK_SIZE
    assert [plane is not None for plane in held] == [i < num_kept for i in range(len(held))]
    fresh.guess(context([*tokens, 3], 1))
    pairs = zip(held[:num_kept], fresh.planes(tokens), strict=False)
    for ours, theirs in pairs:
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_next_turn_finds_its_draft_kv(bench: Bench) -> None:
    tokens = PROMPT + bench.guess(context(PROMPT, 4))
    bench.drafter.remember(context(tokens, 0))
    bench.drafter.finish("a")
    turn = tokens + [30 + i for i in range(9)]
    bench.guess(context(turn, 1, name="b", num_prompt_tokens=len(turn)))
    # Of 46 tokens the last one was never an input, and 11 blocks are whole.
    assert bench.num_rows() == len(turn) - 44


def test_salts_share_nothing(bench: Bench) -> None:
    for salt in ("one", "two", None, ""):
        bench.guess(context(PROMPT, 1, name=f"first {salt}", salt=salt))
        assert bench.num_rows() == len(PROMPT)
        bench.guess(context(PROMPT, 1, name=f"again {salt}", salt=salt))
        assert bench.num_rows() == 2


def test_a_salt_is_forgotten_and_the_others_stay(bench: Bench) -> None:
    for salt in ("gone", "kept"):
        bench.guess(context(PROMPT, 1, name=f"first {salt}", salt=salt))
    bench.drafter.forget(["gone"])
    for salt, num_rows in (("gone", len(PROMPT)), ("kept", 2)):
        bench.guess(context(PROMPT, 1, name=f"again {salt}", salt=salt))
        assert bench.num_rows() == num_rows


def test_asked_rarely_it_computes_what_was_added(bench: Bench) -> None:
    bench.guess(context(PROMPT))
    longer = PROMPT + [(11 * i) % 300 for i in range(21)]
    bench.guess(context(longer))
    assert bench.passes[0] == [(len(PROMPT), 21)]


@pytest.mark.parametrize("num_tokens", [40, 41, 42, 43])
def test_asked_again_for_the_same_tokens_it_says_the_same(bench: Bench, num_tokens: int) -> None:
    """Also where the last token, computed again for its logits, lies in a block that is shared."""
    tokens = PROMPT[:num_tokens] if num_tokens <= 42 else [*PROMPT, 5]
    first = bench.guess(context(tokens))
    planes = [plane.clone() for plane in bench.planes(tokens) if plane is not None]
    written = []
    execute = bench.execute

    def watched(step: StepInput) -> StepOutput:
        for s in step.sequences:
            positions = range(s.start, s.start + len(s.token_ids))
            written.extend(s.block_tables[0][p // BLOCK_SIZE] for p in positions)
        return execute(step)

    bench.execute = watched  # type: ignore[method-assign]
    shared = {block for block in range(64) if bench.drafter.kv.pool._keys[block] is not None}
    assert bench.guess(context(tokens)) == first
    assert not shared & set(written)
    held = [plane for plane in bench.planes(tokens) if plane is not None]
    assert len(held) == len(planes)
    assert all(torch.equal(a, b) for a, b in zip(held, planes, strict=True))


def test_another_request_under_the_same_id_begins_anew(bench: Bench) -> None:
    bench.guess(context(PROMPT))
    bench.guess(context(PROMPT[20:] + PROMPT))


def test_long_backlogs_come_in_chunks_and_delay_nobody(
    drafts: dict[str, DraftModel], kernel_cache: Path
) -> None:
    bench = Bench(drafts["llama"], kernel_cache, max_num_batched_tokens=32, kv_blocks=128)
    streaming = PROMPT[:6]
    bench.guess(context(streaming, 2, name="streaming"))
    prompts = [context([7 + i, *PROMPT][:20], 2, name=f"prompt-{i}") for i in range(2)]
    for calls in range(1, 9):
        streaming = [*streaming, 50 + calls]
        now = context(streaming, 2, name="streaming")
        drafts_now = bench.propose(prompts[0], now, prompts[1])
        assert len(drafts_now[1]) == 2
        bench.assert_cold(now, drafts_now[1])
        assert bench.passes[0][0] == (len(streaming) - 1, 1), "it goes first"
        long_rows = [rows for _, rows in bench.passes[0][1:]]
        assert sum(long_rows) <= 16  # two whole backlogs of 8 or less are no long ones
        if all(drafts_now):
            break
    # 2 x 20 tokens, of which 8 a call while they are long: 20, 12 -> 4 and 20 -> 12 -> 4.
    assert calls == 5
    bench.assert_all_cold(prompts, [drafts_now[0], drafts_now[2]], 2, 2)


def test_many_are_drafted_for_in_one_pass_per_depth(bench: Bench) -> None:
    contexts = [context(PROMPT[: 5 + i], 1 + i, name=str(i)) for i in range(4)]
    bench.assert_all_cold(contexts, bench.propose(*contexts), 1, 2, 3, 4)
    assert [len(sequences) for sequences in bench.passes] == [4, 3, 2, 1]


def test_in_a_small_pool_whoever_was_asked_longest_ago_makes_room(
    drafts: dict[str, DraftModel], kernel_cache: Path
) -> None:
    bench = Bench(drafts["llama"], kernel_cache, kv_blocks=14)
    contexts = [context([100 + i, *PROMPT][:19], 2, name=str(i)) for i in range(3)]  # 6 blocks each
    for asked in contexts[:2]:
        bench.guess(asked)
    bench.guess(contexts[0])
    bench.guess(contexts[2])
    assert list(bench.drafter._shadows) == ["0", "2"]
    bench.guess(contexts[1])  # rebuilt, from what is left of it
    assert list(bench.drafter._shadows) == ["2", "1"]
    for name in "012":
        bench.drafter.finish(name)
    bench.assert_all_free()


def test_those_asked_together_take_nothing_from_each_other(
    drafts: dict[str, DraftModel], kernel_cache: Path
) -> None:
    bench = Bench(drafts["llama"], kernel_cache, kv_blocks=14)
    contexts = [context([100 + i, *PROMPT][:19], 2, name=str(i)) for i in range(3)]
    bench.assert_all_cold(contexts, bench.propose(*contexts), 2, 2, 0)
    bench.drafter.finish("0")
    bench.assert_all_cold(contexts[1:], bench.propose(*contexts[1:]), 2, 2)


def test_guesses_end_where_the_pool_does(drafts: dict[str, DraftModel], kernel_cache: Path) -> None:
    bench = Bench(drafts["llama"], kernel_cache, kv_blocks=11)
    assert len(bench.guess(context(PROMPT, 12))) == 3  # slots 42 and 43 are the last
    assert bench.propose(context(PROMPT * 2, 2, name="b")) == [[]]
    assert list(bench.drafter._shadows) == ["a", "b"], "nobody makes room for what never fits"
    for name in "ab":
        bench.drafter.finish(name)
    bench.assert_all_free()


def test_guesses_end_with_the_models_positions(bench: Bench) -> None:
    bench.drafter._max_model_len = 44
    assert len(bench.guess(context(PROMPT, 8))) == 3
    assert len(bench.guess(context([*PROMPT, 1, 2], 8))) == 1
    assert bench.propose(context([*PROMPT, 1, 2, 3], 8)) == [[]]
    assert bench.passes == []
    bench.assert_all_free()


def test_nothing_is_guessed_behind_the_end_of_an_answer(bench: Bench) -> None:
    certain = greedy(64, ignore_eos=False, logit_bias={EOS_ID: 100.0})
    bench.drafter._eos_token_ids = frozenset({EOS_ID})
    assert bench.guess(context(PROMPT, 5, params=certain)) == [EOS_ID]
    later = replace(certain, min_tokens=3)
    guesses = bench.guess(context(PROMPT, 5, name="b", params=later))
    assert len(guesses) == 4
    assert guesses[3] == EOS_ID
    assert EOS_ID not in guesses[:3]
    own = greedy(64, logit_bias={70: 100.0}, stop_token_ids=(70,))
    assert bench.guess(context(PROMPT, 5, name="c", params=own)) == [70]


def test_logprobs_of_the_request_cost_the_draft_model_nothing(bench: Bench) -> None:
    asked = greedy(64, logprobs=5, prompt_logprobs=5)
    bench.guess(context(PROMPT, params=asked))
    assert bench.drafter._shadows["a"].request.params == replace(
        asked, logprobs=None, prompt_logprobs=None
    )
    bench.drafter.finish("a")
    bench.guess(context(PROMPT, 1, name="b", params=asked))
    assert bench.num_rows() == 2  # and its prefix is found


def test_ids_that_the_draft_model_does_not_know_are_not_drafted_for(bench: Bench) -> None:
    bench.guess(context(PROMPT))
    unknown = context([*PROMPT, bench.draft.loaded.info.vocab_size])
    known = context(PROMPT, name="b")
    assert [len(drafts) for drafts in bench.propose(unknown, known)] == [0, 4]
    bench.drafter.finish("b")
    bench.assert_all_free()


def test_nothing_is_done_where_no_draft_is_wanted(bench: Bench) -> None:
    assert bench.propose(context(PROMPT, 0), context([], name="b")) == [[], []]
    assert bench.passes == []
    for name in ("a", "b", "never seen"):
        bench.drafter.finish(name)
        bench.drafter.finish(name)
    bench.drafter.remember(context(PROMPT, 0))
    bench.assert_all_free()


def test_a_failed_pass_leaves_nothing_behind(bench: Bench) -> None:
    bench.guess(context(PROMPT[:9], name="other"))
    execute, failure = bench.execute, RuntimeError("out of memory")
    bench.execute = lambda step: StepOutput(error=failure)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.propose(context(PROMPT))
    bench.execute = execute  # type: ignore[method-assign]
    assert list(bench.drafter._shadows) == ["other"]
    assert not any(plane is not None for plane in bench.planes([*PROMPT[:4], *PROMPT[4:]])[2:])
    bench.guess(context(PROMPT))
    assert bench.passes[0] == [(8, len(PROMPT) - 8)]


@pytest.mark.parametrize("at_pass", [0, 1])
def test_logits_that_are_no_numbers_end_that_request_alone(bench: Bench, at_pass: int) -> None:
    execute = bench.execute

    def poison(step: StepInput) -> StepOutput:
        output = execute(step)
        if len(bench.passes) != at_pass + 1:
            return output
        return replace(output, draws=[[Unsampled("NaN")], *output.draws[1:]])

    bench.execute = poison  # type: ignore[method-assign]
    asked = [context(PROMPT, name="bad"), context([9, *PROMPT], name="good")]
    proposed = bench.propose(*asked)
    bench.execute = execute  # type: ignore[method-assign]
    bench.assert_all_cold(asked, proposed, at_pass, 4)
    assert list(bench.drafter._shadows) == ["good"]
    held = bench.planes(PROMPT)
    assert [plane is not None for plane in held] == [at_pass == 1] * len(held)


def test_after_a_reset_nothing_of_before_is_found(bench: Bench) -> None:
    bench.guess(context(PROMPT, 1))
    bench.drafter.forget(None)
    bench.drafter.finish("a")
    bench.guess(context(PROMPT, 1, name="b"))
    assert bench.num_rows() == len(PROMPT)


def test_a_shadow_follows_by_the_tokens_alone() -> None:
    """Every cut of known tokens, guesses and the target's tokens, against the plain rule."""
    rng = random.Random(5)
    for _ in range(300):
        known = [rng.randrange(3) for _ in range(rng.randrange(1, 5))]
        guesses = [rng.randrange(2) for _ in range(rng.randrange(5))]
        target = known + [rng.randrange(2) for _ in range(rng.randrange(6))]
        request = ModelDrafter._new_request(
            _Nothing(),
            context(known, num_prompt_tokens=1),  # type: ignore[arg-type]
        )
        request.num_computed_tokens = len(known)
        shadow = Shadow(request, list(guesses))
        assert shadow.follow(tuple(target))
        written = known + guesses
        right = next(
            (i for i, pair in enumerate(zip(written, target, strict=False)) if pair[0] != pair[1]),
            min(len(written), len(target)),
        )
        assert request.num_computed_tokens == min(right, len(target) - 1)
        assert request.token_ids == target
        assert shadow.guesses == []


class _Nothing:
    """What a request of the drafter is made from, besides the context."""

    _fingerprint = b"0" * 32
    _eos_token_ids: frozenset[int] = frozenset()
