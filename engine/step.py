"""What the planner and the torch thread say to each other: plain data, one pass at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.outputs import TokenLogprobs
from engine.sampler import DrawRun, Sampled, Unsampled
from offload.transfers import CopyIn, CopyOut


@dataclass(frozen=True, slots=True)
class PromptLogprobRows:
    """The sequence's leading rows predict `next_ids`, one each."""

    next_ids: Sequence[int]
    num_top: int


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """Rows of one sequence: `token_ids` stand at positions [start, start + len(token_ids)).

    |---- known tokens ----|-- drafts --|
                          |-- of run ---|   the rows that draw: the last known one and the drafts
    """

    token_ids: Sequence[int]
    start: int
    block_tables: Sequence[Sequence[int]]  # per KV group, up to the last row; -1 slid out
    run: DrawRun | None = None  # None: it draws nothing
    prompt_logprobs: PromptLogprobRows | None = None


@dataclass(frozen=True, slots=True)
class StepInput:
    """Executed in this order: copies out, copies in, one packed pass over the sequences."""

    copies_out: Sequence[CopyOut] = ()
    copies_in: Sequence[CopyIn] = ()
    sequences: Sequence[SequenceInput] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`draws[i]` are the target's own tokens of sequence i's run, those that stand."""

    draws: Sequence[Sequence[Sampled | Unsampled]] = ()
    prompt_logprobs: Sequence[Sequence[TokenLogprobs]] = ()
    seconds: float = field(default=0.0)  # of the pass alone, without copies
    copy_out_seconds: float = 0.0  # of all copies out
    copy_in_seconds: float = 0.0  # of all copies in
    error: Exception | None = None  # the pass failed; the copies had been made


@dataclass(frozen=True, slots=True)
class BlockPair:
    """A device block, and another into which the same was computed."""

    group: int
    block_id: int
    computed_id: int


@dataclass(frozen=True, slots=True)
class AuditInput:
    """A pass that draws nothing, then comparisons."""

    sequences: Sequence[SequenceInput]
    pairs: Sequence[BlockPair] = ()


@dataclass(frozen=True, slots=True)
class SlotError:
    """Where two blocks differ most: |a - b| over one head's vector, as a share of its length."""

    error: float  # inf where one of them is not finite
    layer: int  # of the model
    part: str  # key | value
    head: int
    slot: int  # token of the block


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of one `BlockPair`; digests are SHA-256 in hex, of each block's bytes."""

    worst: SlotError
    digest: str
    computed_digest: str


@dataclass(frozen=True, slots=True)
class AuditOutput:
    """One comparison per pair, or the error that the pass ended with."""

    comparisons: Sequence[Comparison] = ()
    error: Exception | None = None
