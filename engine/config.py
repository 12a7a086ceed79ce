"""The engine's configuration: frozen, complete, free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
LoadPolicy = Literal["auto", "always", "never"]
OnOff = Literal["on", "off"]
SpeculativeDepth = Literal["auto", "fixed"]

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything `AsyncEngine.from_config` needs. Sizes are bytes, times seconds.

    Exactly one of `kv_memory` and `kv_blocks` is set; a `cpu_tier` of 0 and a `disk_tier` of None
    mean that tier does not exist.
    """

    model: str  # HF directory, .gguf file or hub id
    cache_dir: Path  # conversions and built kernels
    device: Device = "auto"
    dtype: DType = "auto"  # bfloat16 where the processor has it, else float32
    threads: int | None = None  # torch threads; None: one per core
    max_model_len: int | None = None  # None: the model's
    block_size: int = 16  # tokens per KV block
    kv_memory: int | None = GIB
    kv_blocks: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queue: int = 256  # waiting sequences
    cpu_tier: int = GIB
    disk_tier: Path | None = None
    disk_tier_size: int = 10 * GIB
    disk_tier_ttl: float = 0.0  # seconds a block may lie unused on disk; 0: for ever
    disk_tier_optional: bool = False  # serve without it if it cannot be opened
    offload_prompt_only: bool = False
    load_policy: LoadPolicy = "auto"
    verify_loads: float = 0.0  # share of loaded blocks computed anew in idle time, 0..1
    load_deadline: float = 30.0  # a load unfinished after this is a miss
    speculative: str = "ngram"  # off | ngram | draft:MODEL | package.module:DrafterClass
    speculative_tokens: int = 31  # drafts per request and step at most
    speculative_depth: SpeculativeDepth = "auto"  # auto: as many as pay; fixed: always the most
    transcript_cache: OnOff = "on"  # chats are read with the ids that were really generated
    seed: int | None = None
