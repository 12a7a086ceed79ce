"""From one row of raw logits to the distribution a request asked for, and a draw from it.

The order is vLLM's, so that the same request means the same in both:

    min_tokens mask -> logit bias -> repetition penalty -> frequency and presence penalty
    -> (greedy: argmax) -> temperature -> min_p -> top_k -> top_p -> draw

One total order ranks the tokens everywhere: larger logit first, then lower id. `top_k` keeps
exactly k tokens in that order, `top_p` the shortest prefix of it whose mass reaches p, greedy the
first token. So `top_k=1` is greedy, and a tie is never cut by the whim of a sort. (vLLM keeps all
ties at the k-th place.)

Everything works on a single row, nearly all of it in numpy: what a row draws can then depend on
neither its neighbours nor the number of threads, and torch's argmax costs fifteen times more.
Probabilities are exponentiated in float32 and added up in float64. Where a difference of finite
logits overflows to -inf, that is a probability of 0 and no cause for a warning.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling_params import SamplingParams

FloatRow = npt.NDArray[np.float32]  # [vocab], or one value per kept token
Ids = npt.NDArray[np.intp]

_BLOCK = 256  # tokens added up at a time when a long row is searched
_COLUMNS = 1024  # into which a long row is folded to find its largest values
_TAIL = np.float32(-12.0)  # tokens below exp(-12) of the likeliest seldom reach into a nucleus
_BINS_PER_NAT = 8  # resolution of the radix select in `_nucleus`
_NUM_BINS = 1024
_SMALLEST_TEMPERATURE = 1e-30  # float32 would soon divide 0 by 0; it is an argmax long before


class PoisonedLogits(ValueError):
    """The logits of one row hold NaN or infinity, or leave no token that could be drawn."""


def needs_processing(params: SamplingParams, num_output_tokens: int) -> bool:
    """Whether anything acts on the logits before temperature, hence also on a greedy choice."""
    return bool(
        num_output_tokens < params.min_tokens
        or params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


@np.errstate(over="ignore", invalid="ignore")
def processed_logits(
    logits: FloatRow,
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    stop_ids: Collection[int],
) -> FloatRow:
    """Mask, bias and penalties applied to a copy of `logits` [vocab].

    Biases and stop ids beyond the vocabulary are ignored: no such token can be drawn anyway.
    """
    row = logits.copy()
    vocab_size = len(row)
    if len(output_token_ids) < params.min_tokens and stop_ids:
        masked = _as_ids(stop_ids)
        row[masked[masked < vocab_size]] = -np.inf
    if params.logit_bias:
        biased = _as_ids(params.logit_bias)
        bias = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        inside = biased < vocab_size
        row[biased[inside]] += bias[inside]
    output_ids = _as_ids(output_token_ids)
    if params.repetition_penalty != 1.0:
        seen = np.zeros(vocab_size, dtype=np.bool_)
        seen[_as_ids(prompt_token_ids)] = True
        seen[output_ids] = True
        seen_ids = np.flatnonzero(seen)
        penalty = np.float32(params.repetition_penalty)
        values = row[seen_ids]
        row[seen_ids] = np.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = np.unique(output_ids, return_counts=True)
        row[ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        row[ids] -= np.float32(params.presence_penalty)
    return row


def argmax(logits: FloatRow) -> int:
    """The first token of the total order. Raises `PoisonedLogits`."""
    token_id = int(logits.argmax())  # NaN counts as the largest, so one look finds it
    _check_peak(logits[token_id])
    return token_id


@np.errstate(over="ignore", invalid="ignore")
def draw(logits: FloatRow, params: SamplingParams, uniform: float) -> int:
    """The token at `uniform` in [0, 1) on the inverse CDF of the filtered distribution.

    `logits` [vocab] are the processed ones; the CDF runs over the kept tokens in the order of
    their ids, so that two tokens that nearly tie and swap ranks do not move it. The token has
    nonzero probability. Raises `PoisonedLogits`.
    """
    peak = logits.max()
    _check_peak(peak)
    scaled = logits - peak
    scaled /= np.float32(max(params.temperature, _SMALLEST_TEMPERATURE))
    kept: Ids | None = None  # None: all of them
    if params.min_p > 0.0:
        kept = np.flatnonzero(scaled >= np.float32(math.log(params.min_p)))
    if 0 < params.top_k < len(logits):
        # By the logits: division by the temperature can make ties of neighbours.
        top = top_ids(logits, params.top_k)
        kept = np.sort(top) if kept is None else np.sort(top[: len(kept)])
    if kept is not None:
        scaled = scaled[kept]
    if params.top_p < 1.0:
        nucleus = _nucleus(scaled, params.top_p)
        scaled = scaled[nucleus]
        kept = nucleus if kept is None else kept[nucleus]
    index = _invert_cdf(_exp_(scaled), uniform)
    return index if kept is None else int(kept[index])


def top_ids(values: FloatRow, k: int) -> Ids:
    """The first `k` (at least 1, at most vocab) ids of the total order, in that order."""
    if k == 1:
        return np.array([values.argmax()], dtype=np.intp)
    candidates = np.flatnonzero(values >= _floor_of_top(values, k))
    values = values[candidates]
    threshold = np.partition(values, len(values) - k)[len(values) - k]
    above = np.flatnonzero(values > threshold)
    above = above[np.argsort(-values[above], kind="stable")]
    ties = np.flatnonzero(values == threshold)[: k - len(above)]
    chosen: Ids = candidates[np.concatenate((above, ties))]
    return chosen


def _floor_of_top(values: FloatRow, k: int) -> np.float32:
    """A value that at least `k` of `values` reach, found without a partition of a long row.

    The maxima of disjoint columns are `k` or more tokens, and their k-th largest is such a value.
    """
    num_rows = len(values) // _COLUMNS
    if k > _COLUMNS or num_rows < 2:
        return np.float32(-np.inf)
    maxima = values[: num_rows * _COLUMNS].reshape(num_rows, _COLUMNS).max(axis=0)
    floor: np.float32 = np.partition(maxima, _COLUMNS - k)[_COLUMNS - k]
    return floor


@np.errstate(over="ignore", invalid="ignore")
def log_normalizer(logits: FloatRow) -> float:
    """log(sum(exp(logits))), to be subtracted from a logit. Raises `PoisonedLogits`."""
    peak = logits.max()
    _check_peak(peak)
    shifted = logits - peak
    return float(peak) + math.log(_exp_(shifted).sum(dtype=np.float64))


def _check_peak(peak: Any) -> None:
    if math.isnan(peak):
        raise PoisonedLogits("the model's logits are not numbers (NaN)")
    if peak == np.inf:
        raise PoisonedLogits("the model's logits overflowed to infinity")
    if peak == -np.inf:
        raise PoisonedLogits("no token is left that could be drawn")


def _exp_(row: FloatRow) -> FloatRow:
    """exp() of each value, in place; torch's takes half the time of numpy's on a long row."""
    torch.from_numpy(row).exp_()
    return row


def _as_ids(token_ids: Collection[int]) -> Ids:
    if isinstance(token_ids, np.ndarray):
        return token_ids.astype(np.intp, copy=False)
    return np.fromiter(token_ids, np.intp, len(token_ids))


def _nucleus(scaled: FloatRow, top_p: float) -> Ids:
    """Indices, ascending, of the shortest prefix of the total order with mass >= `top_p`.

    A radix select instead of a sort of the whole row: the mass per interval of `scaled` (peak 0)
    tells in which interval the prefix ends, and only that one is sorted. Nearly always the tokens
    above `_TAIL` already have the mass, and then the rest is only added up.
    """
    weights = _exp_(scaled.copy())
    needed = top_p * weights.sum(dtype=np.float64)
    head = np.flatnonzero(scaled > _TAIL)
    if weights[head].sum(dtype=np.float64) < needed:
        head = np.arange(len(scaled))
    scaled, weights = scaled[head], weights[head]
    bins = np.minimum(scaled * np.float32(-_BINS_PER_NAT), np.float32(_NUM_BINS - 1))
    bins = bins.astype(np.int32)
    mass = np.cumsum(np.bincount(bins, weights=weights))
    last_bin = min(int(np.searchsorted(mass, needed)), len(mass) - 1)
    before = mass[last_bin - 1] if last_bin else 0.0
    border = np.flatnonzero(bins == last_bin)
    border = border[np.argsort(-scaled[border], kind="stable")]
    border_mass = before + np.cumsum(weights[border], dtype=np.float64)
    num_kept = int(np.searchsorted(border_mass, needed)) + 1
    keep = bins < last_bin
    keep[border[:num_kept]] = True
    kept: Ids = head[keep]
    return kept


def _invert_cdf(weights: FloatRow, uniform: float) -> int:
    """The first index whose cumulative weight exceeds `uniform` times the total.

    Such an index has a positive weight, for the sum grew there. It exists: `uniform` is at most
    1 - 2**-53, and the product with that is below the total in float64 too. Only inside a block,
    whose sum was rounded otherwise, it may be missing; there the last positive weight is taken.
    """
    num_whole = len(weights) // _BLOCK * _BLOCK
    sums = np.cumsum(
        np.append(
            weights[:num_whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.float64),
            weights[num_whole:].sum(dtype=np.float64),
        )
    )
    target = uniform * sums[-1]
    block = int(np.searchsorted(sums, target, side="right"))
    start = block * _BLOCK
    inside = weights[start : start + _BLOCK]
    before = sums[block - 1] if block else 0.0
    index = int(np.searchsorted(np.cumsum(inside, dtype=np.float64), target - before, "right"))
    if index == len(inside):
        index = int(np.flatnonzero(inside)[-1])
    return start + index
