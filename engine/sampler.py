"""The target's own token at every position that needs one, and the logprobs of what was drawn.

Each row is judged by itself: its logits, its parameters, its seed and its position decide, never
the batch. That makes a seeded answer the same alone, batched, preempted, restored or speculated.
The distribution is described in `engine.distribution`, the noise in `engine.noise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.distribution import (
    FloatRow,
    PoisonedLogits,
    argmax,
    draw,
    log_normalizer,
    needs_processing,
    processed_logits,
    top_ids,
)
from engine.noise import uniform
from engine.outputs import Logprob, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.token_view import TokenView
from engine.verification import verify


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of logits and all that decides its token."""

    params: SamplingParams
    seed: int  # modulo 2**64
    position: int  # absolute index of the token being drawn
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # all before `position`, accepted drafts included
    stop_ids: frozenset[int]  # cannot be drawn while there are fewer than min_tokens outputs


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token, with its logprobs if the row's parameters ask for them."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Unsampled:
    """No token can be drawn from this row; its request has to end with `error`."""

    error: str

    @property
    def token_id(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class DrawRun:
    """Where the target draws: after the last known token, described by `row`, and after each of
    the drafts that follow it, as long as the ones before are accepted."""

    row: SampleRow
    draft_token_ids: Sequence[int] = ()

    @property
    def num_rows(self) -> int:
        return len(self.draft_token_ids) + 1


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled | Unsampled]:
    """One result for each row of `logits` [rows, vocab], which are left as they are.

    A row whose logits are NaN or infinite is `Unsampled` and touches no other. Raises ValueError
    unless there is one SampleRow per row of logits.
    """
    if logits.ndim != 2 or len(rows) != logits.shape[0]:
        raise ValueError(f"{len(rows)} rows do not describe logits of shape {list(logits.shape)}")
    return [_sample_row(values, row) for values, row in zip(on_host(logits), rows, strict=True)]


def sample_run(logits: FloatRow, run: DrawRun) -> list[Sampled | Unsampled]:
    """The draws that stand of `run`, whose rows have `logits` [num_rows, vocab].

    Each row sees what it would have seen without drafts: the accepted ones before it are its
    output so far. Rows behind the first draft that is not accepted are not looked at. Raises
    ValueError if there are not as many rows as the run has.
    """
    if len(logits) != run.num_rows:
        raise ValueError(f"{len(logits)} rows of logits for a run of {run.num_rows}")
    first, drafts = run.row, run.draft_token_ids
    if not drafts:
        return [_sample_row(logits[0], first)]
    num_known = len(first.output_token_ids)
    outputs = [*first.output_token_ids, *drafts]

    def draw(num_accepted: int) -> Sampled | Unsampled:
        row = replace(
            first,
            position=first.position + num_accepted,
            output_token_ids=TokenView(outputs, num_known + num_accepted),
        )
        return _sample_row(logits[num_accepted], row)

    return verify(drafts, draw)


def prompt_logprobs(logits: Tensor, next_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Logprobs of the known tokens `next_ids` [n] after the positions of `logits` [n, vocab].

    `num_top` is the number of alternatives. Raises `PoisonedLogits` if any row is NaN or infinite.
    """
    if logits.ndim != 2 or len(next_ids) != logits.shape[0]:
        raise ValueError(f"{len(next_ids)} ids do not fit logits of shape {list(logits.shape)}")
    pairs = zip(on_host(logits), next_ids, strict=True)
    return [_token_logprobs(values, token_id, num_top) for values, token_id in pairs]


def on_host(logits: Tensor) -> FloatRow:
    """float32 on the CPU, shape as it is."""
    host: FloatRow = logits.detach().to("cpu", torch.float32).numpy()
    return host


def _sample_row(logits: FloatRow, row: SampleRow) -> Sampled | Unsampled:
    params = row.params
    try:
        processed = logits
        if needs_processing(params, len(row.output_token_ids)):
            processed = processed_logits(
                logits, params, row.prompt_token_ids, row.output_token_ids, row.stop_ids
            )
        if params.greedy:
            token_id = argmax(processed)
        else:
            token_id = draw(processed, params, uniform(row.seed, row.position))
        if params.logprobs is None:
            return Sampled(token_id, None)
        return Sampled(token_id, _token_logprobs(logits, token_id, params.logprobs))
    except PoisonedLogits as error:
        return Unsampled(str(error))


def _token_logprobs(logits: FloatRow, token_id: int, num_top: int) -> TokenLogprobs:
    normalizer = log_normalizer(logits)
    top = []
    if num_top:
        ids = top_ids(logits, min(num_top, len(logits)))
        values = logits[ids]
        # Everything strictly larger comes earlier in the list, so a rank is a place in it.
        ranks = np.searchsorted(-values, -values, side="left") + 1
        for alternative, value, rank in zip(
            ids.tolist(), values.tolist(), ranks.tolist(), strict=True
        ):
            top.append(Logprob(alternative, value - normalizer, rank))
    value = logits[token_id]
    rank = int(np.count_nonzero(logits > value)) + 1
    return TokenLogprobs(token_id, float(value) - normalizer, rank, tuple(top))
