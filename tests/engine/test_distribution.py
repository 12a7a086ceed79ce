"""Every step from logits to a draw, against a plain float64 implementation of its definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from engine.distribution import (
    PoisonedLogits,
    argmax,
    draw,
    log_normalizer,
    needs_processing,
    processed_logits,
    top_ids,
)
from engine.sampling_params import SamplingParams

# Coarse values make ties common; -inf occurs in models that mask part of their vocabulary.
coarse_logits = st.lists(
    st.one_of(st.integers(-24, 24).map(lambda n: n / 4), st.just(-math.inf)),
    min_size=1,
    max_size=14,
).filter(lambda values: max(values) > -math.inf)


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def ranked(values) -> list[int]:
    """The total order: larger first, then lower id."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def reference_processed(logits, params, prompt, output, stop_ids):
    values = [float(value) for value in logits]
    for i in range(len(values)):
        if len(output) < params.min_tokens and i in stop_ids:
            values[i] = -math.inf
        values[i] += params.logit_bias.get(i, 0.0)
        if i in prompt or i in output:
            penalty = params.repetition_penalty
            values[i] = values[i] / penalty if values[i] > 0 else values[i] * penalty
        values[i] -= params.frequency_penalty * output.count(i)
        values[i] -= params.presence_penalty * (i in output)
    return values


def reference_probabilities(logits, params) -> list[float]:
    """The filtered distribution; discards examples where rounding decides what is kept."""
    peak = max(logits)
    scaled = [(float(value) - peak) / params.temperature for value in logits]
    weights = [math.exp(value) for value in scaled]
    order = ranked(logits)
    for weight in weights:
        assume(not params.min_p or weight == 1.0 or abs(weight - params.min_p) > 1e-5)
    order = [i for i in order if weights[i] >= params.min_p]
    if params.top_k > 0:
        order = order[: params.top_k]
    total = math.fsum(weights[i] for i in order)
    kept = []
    for i in order:
        mass = math.fsum(weights[j] for j in kept) / total
        if params.top_p < 1.0:
            assume(abs(mass - params.top_p) > 1e-5)
            if mass > params.top_p:
                break
        kept.append(i)
    total = math.fsum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


def assert_draws_from(probabilities, logits, params) -> None:
    """Each token is drawn just inside both ends of its interval of the CDF, in order of ids."""
    margin = 1e-5
    low = 0.0
    for token_id, probability in enumerate(probabilities):
        high = low + probability
        if probability > 4 * margin:
            assert draw(logits, params, low + margin) == token_id
            assert draw(logits, params, high - margin) == token_id
        low = high
    assert probabilities[draw(logits, params, 1.0 - 2.0**-53)] > 0


@given(
    coarse_logits,
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([0, -1, 1, 2, 3, 5, 14, 100]),
    st.sampled_from([1.0, 0.05, 0.31, 0.5, 0.77, 0.93, 0.9999]),
    st.sampled_from([0.0, 0.03, 0.2, 0.6, 1.0]),
)
def test_filters_match_their_definition(values, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = row(*values)
    assert_draws_from(reference_probabilities(values, params), logits, params)
    assert logits.tolist() == values  # the raw logits are still needed for logprobs


@given(
    st.lists(st.integers(-24, 24).map(lambda n: n / 4), min_size=6, max_size=6),
    st.lists(st.integers(0, 5), max_size=6),
    st.lists(st.integers(0, 5), max_size=6),
    st.integers(0, 4),
    st.sets(st.integers(0, 7)),
    st.dictionaries(st.integers(0, 7), st.sampled_from([-100.0, -1.5, 0.5, 100.0])),
    st.sampled_from([0.5, 1.0, 1.25]),
    st.sampled_from([-1.5, 0.0, 0.75]),
    st.sampled_from([-0.5, 0.0, 2.0]),
)
@example([1.0] * 6, [0, 1], [1, 2, 2], 4, {5}, {3: 2.0}, 1.25, 0.75, 2.0)
def test_processing_matches_its_definition(
    values, prompt, output, min_tokens, stop_ids, bias, repetition, presence, frequency
):
    params = SamplingParams(
        min_tokens=min_tokens,
        logit_bias=bias,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    logits = row(*values)
    result = processed_logits(logits, params, prompt, output, stop_ids)
    expected = reference_processed(values, params, prompt, output, stop_ids)
    assert result.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert logits.tolist() == values
    if not needs_processing(params, len(output)):
        assert expected == values


def test_bias_comes_before_the_repetition_penalty():
    params = SamplingParams(logit_bias={0: 3.0}, repetition_penalty=2.0)
    assert processed_logits(row(-1.0, 0.0), params, [0], [], frozenset()).tolist() == [1.0, 0.0]


def test_penalties_take_arrays_of_ids_too():
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    prompt, output = np.array([0], dtype=np.int32), np.array([1, 1])
    result = processed_logits(row(4.0, 4.0, 4.0), params, prompt, output, frozenset())
    assert result.tolist() == [2.0, 1.0, 4.0]


@pytest.mark.parametrize(
    ("params", "num_output_tokens", "needed"),
    [
        (SamplingParams(), 0, False),
        (SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1), 0, False),
        (SamplingParams(min_tokens=3), 2, True),
        (SamplingParams(min_tokens=3), 3, False),
        (SamplingParams(logit_bias={1: 1.0}), 0, True),
        (SamplingParams(repetition_penalty=1.1), 0, True),
        (SamplingParams(presence_penalty=-0.1), 0, True),
        (SamplingParams(frequency_penalty=0.1), 0, True),
    ],
)
def test_what_acts_before_temperature(params, num_output_tokens, needed):
    assert needs_processing(params, num_output_tokens) is needed


def test_min_p_is_applied_after_temperature():
    # p = 0.88 and 0.12 at temperature 1: a ratio of 0.135, and 0.37 at temperature 2.
    logits, last = row(2.0, 0.0), 1.0 - 2.0**-53
    assert draw(logits, SamplingParams(min_p=0.2), last) == 0
    assert draw(logits, SamplingParams(min_p=0.2, temperature=2.0), last) == 1


def test_top_p_acts_on_what_top_k_and_min_p_leave():
    # 0.4, 0.3, 0.2, 0.1; of the first two the first alone has 0.57.
    logits, last = np.log(row(0.4, 0.3, 0.2, 0.1)), 1.0 - 2.0**-53
    assert draw(logits, SamplingParams(top_p=0.55), last) == 1
    assert draw(logits, SamplingParams(top_p=0.55, top_k=2), last) == 0
    assert draw(logits, SamplingParams(top_p=0.55, min_p=0.6), last) == 0


def test_ties_are_kept_from_the_lowest_id():
    logits, last = row(1.0, 1.0, 1.0, 1.0), 1.0 - 2.0**-53
    assert draw(logits, SamplingParams(top_k=3), last) == 2
    assert draw(logits, SamplingParams(top_p=0.5), last) == 1
    assert draw(logits, SamplingParams(top_p=0.51), last) == 2
    assert draw(logits, SamplingParams(min_p=1.0), last) == 3
    assert argmax(row(0.0, 2.0, 2.0)) == 1


def test_top_k_ranks_logits_that_temperature_makes_equal():
    nearly = float(np.nextafter(np.float32(1e-38), np.float32(1)))
    logits = row(0.0, 1e-38, nearly)
    assert draw(logits, SamplingParams(temperature=100.0, top_k=1), 0.0) == 2


@given(coarse_logits, st.sampled_from([1e-300, 1e-6]), st.floats(0, 1, exclude_max=True))
def test_a_vanishing_temperature_draws_a_likeliest_token(values, temperature, uniform):
    token_id = draw(row(*values), SamplingParams(temperature=temperature), uniform)
    assert values[token_id] == max(values)


@given(coarse_logits, st.floats(0, 1, exclude_max=True))
def test_top_k_of_one_is_greedy(values, uniform):
    assert draw(row(*values), SamplingParams(top_k=1), uniform) == argmax(row(*values))


@given(coarse_logits, st.integers(1, 14))
def test_top_ids_follow_the_total_order(values, k):
    k = min(k, len(values))
    assert top_ids(row(*values), k).tolist() == ranked(values)[:k]


@pytest.mark.parametrize("vocab_size", [2047, 2048, 2049, 5000])
@pytest.mark.parametrize("k", [1, 2, 50, 1024, 1025])
def test_top_ids_of_long_rows(vocab_size, k):
    generator = np.random.default_rng(vocab_size + k)
    values = (generator.normal(size=vocab_size) * 8).round().astype(np.float32)  # full of ties
    assert top_ids(values, k).tolist() == ranked(values)[:k]
    assert top_ids(np.full(vocab_size, -np.inf, np.float32), k).tolist() == list(range(k))


@given(coarse_logits)
def test_log_normalizer(values):
    expected = math.log(math.fsum(math.exp(value) for value in values))
    assert log_normalizer(row(*values)) == pytest.approx(expected, abs=1e-6)


def test_log_normalizer_of_large_logits_does_not_overflow():
    assert log_normalizer(row(3e38, 3e38)) == pytest.approx(3e38)
    assert log_normalizer(row(-3e38, 3e38)) == pytest.approx(3e38)


@pytest.mark.parametrize("vocab_size", [255, 256, 257, 512, 3000, 49152])
@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 300}])
def test_long_rows_match_a_full_sort(vocab_size, params):
    """The block-wise search and the radix select against one plain sort and one plain sum."""
    generator = np.random.default_rng(vocab_size)
    logits = generator.normal(scale=3.0, size=vocab_size).astype(np.float32)
    params = SamplingParams(temperature=0.9, **params)
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / np.float32(0.9))
    order = np.argsort(-logits, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    mass = np.cumsum(weights[order])
    order = order[: np.searchsorted(mass, params.top_p * mass[-1]) + 1]
    kept = np.sort(order)
    cdf = np.cumsum(weights[kept]) / weights[kept].sum()
    for uniform in generator.random(40):
        position = int(np.searchsorted(cdf, uniform, side="right"))
        if np.abs(cdf - uniform).min() > 1e-6:
            assert draw(logits, params, uniform) == kept[position]
    assert draw(logits, params, 0.0) == kept[0]
    assert draw(logits, params, 1.0 - 2.0**-53) == kept[-1]


def test_a_block_whose_sum_was_rounded_up_still_yields_a_token():
    """Added one by one, the weights of a block may fall short of what they come to pairwise."""
    generator = np.random.default_rng(0)
    largest = 1.0 - 2.0**-53
    num_short = 0
    for _ in range(200):
        logits = generator.normal(scale=8.0, size=256).astype(np.float32)
        logits[250:] = -np.inf
        weights = torch.exp(torch.from_numpy(logits - logits.max())).numpy()
        pairwise = weights.reshape(1, -1).sum(axis=1, dtype=np.float64)[0]
        if np.cumsum(weights, dtype=np.float64)[-1] <= largest * pairwise:
            num_short += 1
            last = np.flatnonzero(weights)[-1]
            assert draw(logits, SamplingParams(), largest) == last < 250
    assert num_short > 0


def test_a_nucleus_that_reaches_into_the_tail():
    """One likely token and a great many unlikely ones, of which some are needed for the mass."""
    logits = np.full(40_000, -13.0, dtype=np.float32)
    logits[123] = 0.0
    share = math.exp(-13.0) / (1.0 + 39_999 * math.exp(-13.0))
    params = SamplingParams(top_p=1.0 - 39_000.5 * share)  # leaves out 39,000 of the tail
    assert draw(logits, params, 1.0 - 2.0**-53) == 999  # so 999 of it are left


@given(st.integers(0, 599), st.floats(0, 1, exclude_max=True))
def test_a_token_without_probability_is_never_drawn(only, uniform):
    logits = np.full(600, -np.inf, dtype=np.float32)
    logits[only] = -5.0
    assert draw(logits, SamplingParams(), uniform) == only
    logits[:] = -200.0  # finite, but exp() of the difference is 0
    logits[only] = 0.0
    assert draw(logits, SamplingParams(), uniform) == only


@pytest.mark.parametrize(
    ("poison", "message"),
    [(math.nan, "NaN"), (math.inf, "infinity"), (-math.inf, "no token is left")],
)
def test_poisoned_logits_are_named(poison, message):
    logits = row(-math.inf, poison, -math.inf)
    for use in (
        argmax,
        log_normalizer,
        lambda values: draw(values, SamplingParams(), 0.5),
        lambda values: argmax(
            processed_logits(values, SamplingParams(logit_bias={1: 1.0}), [], [], [])
        ),
    ):
        with pytest.raises(PoisonedLogits, match=message):
            use(logits)
