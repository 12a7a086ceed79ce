"""One request: its tokens, how far they are computed, and the one rule for what may be kept."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.outputs import CachedTokens, FinishReason, RequestTimes, TokenLogprobs
from engine.sampling_params import SamplingParams
from offload.tier import BlockHash

NO_BLOCK = -1  # in a block table: slid out of the window, or not allocated yet


class RequestState(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of one sequence; changed by the engine loop alone.

    0          num_computed_tokens      + num_inflight_tokens        num_tokens
    |--- confirmed -----|--- in this step ------|--- known, not scheduled ---|
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    max_tokens: int  # resolved: what fits, where the request set no limit
    stop_ids: frozenset[int]  # EOS (unless ignored) and stop_token_ids
    seed: int
    root_hash: BlockHash
    arrival_order: int
    salt: str | None = None  # in `root_hash` already; the drafter keeps by it what it learns
    priority: int = 0
    is_background: bool = False  # nobody asked for it: small steps, and in no user's figures
    times: RequestTimes = field(default_factory=lambda: RequestTimes(arrival=0.0))

    state: RequestState = RequestState.WAITING
    token_ids: list[int] = field(default_factory=list)  # prompt, then output
    num_computed_tokens: int = 0  # confirmed: the forward pass that wrote them has finished
    num_inflight_tokens: int = 0  # rows of a step that has not finished, drafts included
    draft_token_ids: list[int] = field(default_factory=list)

    block_tables: list[list[int]] = field(default_factory=list)  # per KV group; NO_BLOCK for none
    block_hashes: list[BlockHash] = field(default_factory=list)  # of the full blocks known so far
    num_hit_blocks: int = 0  # leading blocks that the device held at admission
    num_committed_blocks: int = 0  # leading blocks already offered to the prefix map
    num_left_blocks: int = 0  # leading blocks committed before a preemption, held by now or not
    first_cacheable_block: int = 0  # blocks before it were dropped by a cache reset
    first_kept: list[int] = field(default_factory=list)  # per group: all before it slid out
    branch_end: int = 0  # blocks of a chain that others share, where no window was held

    ahead: range | None = None  # blocks that are loaded instead of computed
    pending_loads: dict[int, int] = field(default_factory=dict)  # ticket -> index of its block
    load_deadline: float | None = None  # monotonic; set while it waits for nothing but loads
    load_patience: float = math.inf  # seconds of such waiting that computing would take
    block_sources: list[str] = field(default_factory=list)  # nearest tier, per block first hit
    cached_settled: bool = False  # `cached` is final
    admitted_once: bool = False
    cached: CachedTokens = field(default_factory=CachedTokens)
    recomputed_by_choice: int = 0
    num_preemptions: int = 0
    drafts_barred: bool = False  # for one step
    teaches_drafter: bool = True  # until caches are reset under it
    num_accepted_drafts: int = 0  # tokens of its output that a drafter had guessed
    num_rejected_drafts: int = 0  # guesses that are not in its output

    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @classmethod
    def of_nobody(cls, request_id: str, token_ids: Sequence[int], root_hash: BlockHash) -> Request:
        """Tokens and whose space they are in, for what works on requests; it draws nothing."""
        return cls(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=SamplingParams(max_tokens=0),
            max_tokens=0,
            stop_ids=frozenset(),
            seed=0,
            root_hash=root_hash,
            arrival_order=0,
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV slot no confirmed pass has written."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Only the token drawn last is left to compute."""
        return self.num_output_tokens > 0 and self.num_uncomputed_tokens == 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None

    @property
    def sort_key(self) -> tuple[int, int]:
        """Lower runs first: priority, then arrival."""
        return (self.priority, self.arrival_order)


def committed_len(request: Request) -> int:
    """How many leading positions may be hashed, cached or stored.

        0                                        num_tokens - 1   num_tokens
        |------------- computed and final ------------|--- last ---|

    The last output token was never an input: no pass wrote its slot, or, under speculation, the
    slot holds a rejected draft's KV (vllm-project/vllm issue 54193). Where an accepted run did
    write it, giving it up costs one position and keeps the rule one line.
    """
    final = request.num_tokens - 1 if request.num_output_tokens else request.num_prompt_tokens
    return min(request.num_computed_tokens, final)
