"""Counters and gauges of the engine as plain numbers; the HTTP layer renders them."""

from __future__ import annotations

from dataclasses import dataclass, field

from offload.tier import TierStats


@dataclass(slots=True)
class EngineStats:
    """Gauges are of now, counters are monotonic. Tokens unless the name says otherwise."""

    num_running: int = 0
    num_waiting: int = 0  # loading ones included
    kv_cache_usage: float = 0.0  # referenced share of the device blocks, 0..1
    num_blocks: int = 0
    block_size: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # requests by finish reason
    preemptions: int = 0
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # found on the device
    external_queries: int = 0  # not on the device, looked up in the tiers
    external_hits: int = 0
    recomputed_by_choice: int = 0
    prefill_seconds_saved: float = 0.0  # cached tokens at the prefill speed measured then
    hit_tokens: dict[str, int] = field(default_factory=dict)  # by tier, device included
    spec_num_drafts: int = 0  # runs of drafts verified
    spec_num_draft_tokens: int = 0
    spec_num_accepted_tokens: int = 0
    spec_accepted_per_pos: list[int] = field(default_factory=list)
    drafter_failures: dict[str, int] = field(default_factory=dict)
    idle_prefills: int = 0  # prompts computed ahead while nothing was asked for
    idle_prefill_tokens: int = 0
    transcript_hits: int = 0  # conversations read with ids that were generated
    transcript_misses: int = 0
    transcript_tokens: int = 0  # ids taken from transcripts
    transcript_dropped: int = 0  # transcripts found to be of no use
    transcript_entries: int = 0
    transcript_bytes: int = 0  # of all records kept beside the KV
    transcript_pending: int = 0  # records on their way to the disk tier's directory
    failed_steps: int = 0
    load_audits: dict[str, int] = field(default_factory=dict)  # loaded blocks checked, by result
    failed_checks: int = 0  # idle-time conservation checks that did not add up
    tiers: dict[str, TierStats] = field(default_factory=dict)
