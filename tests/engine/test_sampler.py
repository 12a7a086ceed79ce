"""A row's token and logprobs, and that they are nobody else's business."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from engine.distribution import PoisonedLogits
from engine.noise import uniform
from engine.outputs import Logprob
from engine.sampler import (
    DrawRun,
    Sampled,
    SampleRow,
    Unsampled,
    on_host,
    prompt_logprobs,
    sample,
    sample_run,
)
from engine.sampling_params import SamplingParams


def sample_row(params: SamplingParams, **changes) -> SampleRow:
    row = SampleRow(
        params=params,
        seed=11,
        position=7,
        prompt_token_ids=[0, 1],
        output_token_ids=[2, 2],
        stop_ids=frozenset({3}),
    )
    return replace(row, **changes)


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 2


GREEDY = SamplingParams(temperature=0.0)


def test_greedy_takes_the_largest_and_of_a_tie_the_lowest():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert sample(logits, [sample_row(GREEDY)]) == [Sampled(1, None)]


@pytest.mark.parametrize(
    ("params", "token_id"),
    [
        ({}, 3),
        ({"min_tokens": 2}, 3),  # two outputs exist: the stop id may come
        ({"min_tokens": 3}, 2),
        ({"logit_bias": {0: 5.0}}, 0),
        ({"repetition_penalty": 0.5}, 2),  # 3.0 becomes 6.0
        ({"presence_penalty": -1.5}, 2),
        ({"frequency_penalty": -0.75}, 2),  # twice in the output
    ],
)
def test_greedy_also_applies_mask_bias_and_penalties(params, token_id):
    logits = torch.tensor([[0.0, 1.0, 3.0, 4.0]])
    params = SamplingParams(temperature=0.0, **params)
    assert sample(logits, [sample_row(params)]) == [Sampled(token_id, None)]


def test_the_draw_uses_the_noise_of_seed_and_position():
    """A uniform distribution over 1000 ids shows the noise itself."""
    logits = torch.zeros(1, 1000)
    for seed, position in ((0, 0), (0, 1), (1, 0), (2**63, 12345)):
        row = sample_row(SamplingParams(), seed=seed, position=position)
        assert sample(logits, [row]) == [Sampled(math.floor(uniform(seed, position) * 1000), None)]


def test_the_draw_follows_the_distribution():
    """Chi-square, 19 degrees of freedom: 43.8 is exceeded by chance once in a thousand."""
    logits = random_logits(1, 20)
    expected = torch.softmax(logits[0].double() / 0.8, dim=-1).tolist()
    params = SamplingParams(temperature=0.8)
    rows = [sample_row(params, seed=3, position=position) for position in range(4_000)]
    drawn = sample(logits.expand(len(rows), 20), rows)
    counts = Counter(result.token_id for result in drawn)
    statistic = sum((counts[i] - 4_000 * p) ** 2 / (4_000 * p) for i, p in enumerate(expected))
    assert statistic < 43.8


def test_a_row_is_the_same_alone_and_in_any_batch():
    vocab_size = 1000
    logits = random_logits(24, vocab_size)
    kinds = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.7, logprobs=0),
        SamplingParams(top_k=40, top_p=0.8),
        SamplingParams(top_p=0.95, min_p=0.01, presence_penalty=1.0, repetition_penalty=1.2),
        SamplingParams(min_tokens=9, logit_bias={5: 4.0}, frequency_penalty=0.5),
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
    ]
    rows = [
        sample_row(kinds[i % len(kinds)], seed=i // 3, position=100 + i, output_token_ids=[i, 5])
        for i in range(len(logits))
    ]
    together = sample(logits, rows)
    assert together[::-1] == sample(logits.flip(0), rows[::-1])
    assert together == [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]


def test_a_poisoned_row_ends_alone():
    logits = random_logits(4, 10)
    rows = [sample_row(GREEDY), sample_row(SamplingParams()), sample_row(GREEDY)]
    rows.append(sample_row(SamplingParams(min_tokens=9), stop_ids=frozenset(range(10))))
    healthy = sample(logits, rows)[2]
    logits[0, 4] = math.nan
    logits[1, 5] = math.inf
    assert sample(logits, rows) == [
        Unsampled("the model's logits are not numbers (NaN)"),
        Unsampled("the model's logits overflowed to infinity"),
        healthy,
        Unsampled("no token is left that could be drawn"),
    ]


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 0.0]])
    params = SamplingParams(
        temperature=0.0, logit_bias={2: 50.0}, repetition_penalty=2.0, top_k=1, logprobs=4
    )
    (result,) = sample(logits, [sample_row(params)])
    expected = torch.log_softmax(logits[0], dim=-1).tolist()
    assert result.token_id == 2
    assert result.logprobs.token_id == 2
    assert result.logprobs.logprob == pytest.approx(expected[2], abs=1e-6)
    assert result.logprobs.rank == 3  # two are strictly larger
    assert result.logprobs.top == (
        Logprob(1, pytest.approx(expected[1], abs=1e-6), 1),
        Logprob(3, pytest.approx(expected[3], abs=1e-6), 1),
        Logprob(2, pytest.approx(expected[2], abs=1e-6), 3),
        Logprob(0, pytest.approx(expected[0], abs=1e-6), 4),
    )


def test_zero_logprobs_is_the_token_alone_and_none_is_none():
    logits = torch.tensor([[0.0, 1.0]])
    zero, none = (
        sample(logits, [sample_row(SamplingParams(temperature=0.0, logprobs=n))])[0]
        for n in (0, None)
    )
    assert (zero.logprobs.rank, zero.logprobs.top) == (1, ())
    assert none.logprobs is None


def test_top_logprobs_of_a_long_row():
    logits = random_logits(1, 5000)
    logits = (logits * 4).round() / 4  # ties, also across the last place
    expected = torch.log_softmax(logits[0].double(), dim=-1)
    (result,) = sample(logits, [sample_row(SamplingParams(logprobs=20), seed=1)])
    order = sorted(range(5000), key=lambda i: (-logits[0, i].item(), i))[:20]
    assert [entry.token_id for entry in result.logprobs.top] == order
    for entry in (*result.logprobs.top, result.logprobs):
        assert entry.logprob == pytest.approx(expected[entry.token_id].item(), abs=1e-6)
        larger = int((logits[0] > logits[0, entry.token_id]).sum())
        assert entry.rank == larger + 1


def test_more_alternatives_than_tokens():
    (result,) = sample(torch.tensor([[0.0, 1.0]]), [sample_row(SamplingParams(logprobs=5))])
    assert [entry.token_id for entry in result.logprobs.top] == [1, 0]


def test_prompt_logprobs():
    logits = random_logits(3, 50)
    next_ids = [4, 49, 0]
    expected = torch.log_softmax(logits, dim=-1)
    results = prompt_logprobs(logits, next_ids, 2)
    assert [result.token_id for result in results] == next_ids
    for i, result in enumerate(results):
        best = expected[i].topk(2)
        assert result.logprob == pytest.approx(expected[i, next_ids[i]].item(), abs=1e-5)
        assert result.rank == 1 + int((logits[i] > logits[i, next_ids[i]]).sum())
        assert [entry.token_id for entry in result.top] == best.indices.tolist()
        assert [entry.logprob for entry in result.top] == pytest.approx(best.values.tolist())
    assert all(result.top == () for result in prompt_logprobs(logits, next_ids, 0))


def test_prompt_logprobs_of_a_poisoned_row_raise():
    logits = random_logits(2, 5)
    logits[1, 0] = math.nan
    with pytest.raises(PoisonedLogits, match="NaN"):
        prompt_logprobs(logits, [0, 0], 0)


def test_bfloat16_logits_and_logits_that_require_grad_are_taken():
    logits = torch.tensor([[0.0, 2.0]], requires_grad=True)
    assert sample(logits, [sample_row(GREEDY)]) == [Sampled(1, None)]
    assert sample(logits.bfloat16(), [sample_row(GREEDY)]) == [Sampled(1, None)]


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="2 rows do not describe"):
        sample(torch.zeros(1, 4), [sample_row(GREEDY)] * 2)
    with pytest.raises(ValueError, match="1 ids do not fit"):
        prompt_logprobs(torch.zeros(2, 4), [0], 0)
    assert sample(torch.zeros(0, 4), []) == []


# --- runs of drafts

KINDS_OF_RUN = [
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=0.8, logprobs=0),
    SamplingParams(top_k=40, top_p=0.8, min_p=0.01),
    SamplingParams(temperature=0.9, repetition_penalty=1.5),
    SamplingParams(temperature=0.0, frequency_penalty=1.9),
    SamplingParams(temperature=0.9, presence_penalty=2.0),
    SamplingParams(temperature=0.0, min_tokens=4, logit_bias={3: 100.0}),  # 3 is a stop id
]


def one_by_one(logits: torch.Tensor, first: SampleRow) -> list[Sampled]:
    """The answer without drafts: each row is drawn once the tokens before it are known."""
    drawn: list[Sampled] = []
    for number in range(len(logits)):
        outputs = [*first.output_token_ids, *(one.token_id for one in drawn)]
        row = replace(first, position=first.position + number, output_token_ids=outputs)
        drawn += sample(logits[number : number + 1], [row])
    return drawn


@pytest.mark.parametrize("params", KINDS_OF_RUN)
@pytest.mark.parametrize("wrong_at", [None, 0, 1, 4])
def test_a_run_draws_what_single_steps_would(params: SamplingParams, wrong_at: int | None) -> None:
    """Noise is that of each position, and penalties count what the run has accepted."""
    logits = random_logits(6, 30)
    logits[:, 9] += 6.0  # likely again and again, so that penalties decide
    first = sample_row(params, output_token_ids=[2, 9])
    alone = one_by_one(logits, first)
    drafts = [drawn.token_id for drawn in alone[:5]]
    if wrong_at is not None:
        drafts[wrong_at] = (drafts[wrong_at] + 1) % 30
    stand = alone if wrong_at is None else alone[: wrong_at + 1]
    assert sample_run(on_host(logits), DrawRun(first, drafts)) == stand


def test_a_run_without_drafts_is_a_row() -> None:
    logits, row = random_logits(1, 30), sample_row(GREEDY)
    assert sample_run(on_host(logits), DrawRun(row)) == sample(logits, [row])


def test_a_poisoned_row_ends_its_run_and_one_behind_a_miss_does_not_count() -> None:
    logits = torch.zeros(4, 10)
    logits[:, 5] = 1.0
    logits[2, 0] = math.nan
    row = sample_row(GREEDY)
    *accepted, last = sample_run(on_host(logits), DrawRun(row, [5, 5, 5]))
    assert (accepted, type(last)) == ([Sampled(5, None)] * 2, Unsampled)
    missed = sample_run(on_host(logits), DrawRun(row, [5, 4, 5]))
    assert missed == [Sampled(5, None)] * 2
    with pytest.raises(ValueError, match="4 rows of logits for a run of 3"):
        sample_run(on_host(logits), DrawRun(row, [5, 5]))
