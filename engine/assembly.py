"""The composition root: from a configuration to the parts of a running engine."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.audit_report import AuditReporter
from engine.block_hash import kv_fingerprint
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.draft_depth import DraftDepth
from engine.drafter_loader import (
    NGRAM,
    build_drafter,
    draft_model_of,
    find_drafter_class,
)
from engine.errors import StartupError
from engine.guarded_drafter import DrafterThread, GuardedDrafter
from engine.kv_cache_manager import KVCacheManager
from engine.kv_groups import KVGroup, describe_groups, group_layers
from engine.kv_layout import KVLayout
from engine.load_audit import LoadAuditor
from engine.load_policy import LoadChooser
from engine.load_samples import LoadSamples
from engine.model_info import ModelInfo
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sessions import Sessions
from engine.speculation import Speculation
from engine.tokenizer import Tokenizer
from engine.transcripts import TABLE as TRANSCRIPTS
from engine.transcripts import Transcripts
from offload.cpu_tier import CpuTier
from offload.disk_tier import DiskTier
from offload.manager import OffloadManager
from offload.side_file import physical_bytes
from offload.side_store import SideStore
from offload.store_scan import side_path
from offload.tier import Tier, TierOpenError

if TYPE_CHECKING:  # these reach torch, which is imported on its own thread
    from engine.draft_model import ModelDrafter
    from engine.model_loader import LoadedModel
    from engine.model_runner import ModelRunner
    from engine.self_test import Reference

logger = logging.getLogger(__name__)

# For reports of bad blocks at the end; a disk that hangs longer loses them.
REPORT_SECONDS = 2.0

ProgressFn = Callable[[str, float], None]
KV_FORMAT_VERSION = 1
KV_LAYOUT_NAME = "block,layer,kv,head,token,dim"
# Records beside the KV are token ids and hashes, a thousandth of its bytes. A disk tier gives up to
# a sixteenth of its own for them, if that is enough to be worth a file.
SIDE_STORE_BYTES = 32 << 20
SIDE_STORE_SHARE = 16
MIN_SIDE_STORE_BYTES = 64 << 10


class Wake:
    """A late-bound callback: I/O threads exist before the loop that they wake."""

    def __init__(self) -> None:
        self._callback: Callable[[], None] | None = None

    def bind(self, callback: Callable[[], None]) -> None:
        """From now on each call goes to `callback`, which must be safe from any thread."""
        self._callback = callback

    def __call__(self) -> None:
        if self._callback is not None:
            self._callback()


@dataclass(slots=True)
class EngineParts:
    """What `AsyncEngine` runs: built once, owned by it, closed by it."""

    info: ModelInfo
    tokenizer: Tokenizer
    fingerprint: bytes
    block_bytes: int
    kv: KVCacheManager
    core: EngineCore
    offload: OffloadManager
    side: SideStore
    transcripts: Transcripts
    torch_thread: ThreadPoolExecutor
    drafter: GuardedDrafter | None
    wake: Wake
    sessions: Sessions
    reporter: AuditReporter

    async def close(self) -> None:
        """Stop threads and close tiers. The engine loop has ended before."""
        await asyncio.to_thread(self.side.close)
        await asyncio.to_thread(self.reporter.wait, REPORT_SECONDS)
        await self.offload.close()
        if self.drafter is not None:
            self.drafter.close()
        self.torch_thread.shutdown(wait=False, cancel_futures=True)


async def assemble(config: EngineConfig, progress: ProgressFn) -> EngineParts:
    """Load the model and build the engine. Raises `StartupError`; leaves no thread behind then."""
    _check(config)
    torch_thread = ThreadPoolExecutor(1, thread_name_prefix="torch")
    try:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            torch_thread, _assemble_on_torch_thread, config, progress, torch_thread
        )
    except BaseException:
        torch_thread.shutdown(wait=False, cancel_futures=True)
        raise


def _check(config: EngineConfig) -> None:
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise StartupError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} is less than --max-num-seqs"
            f" {config.max_num_seqs}: raise the first or lower the second"
        )
    if (config.kv_memory is None) == (config.kv_blocks is None):
        raise StartupError("give either --kv-memory or --kv-blocks, not both and not neither")


@dataclass(frozen=True, slots=True)
class _Model:
    """A loaded model with its KV pool."""

    loaded: LoadedModel
    reference: Reference
    runner: ModelRunner
    groups: list[KVGroup]
    num_blocks: int
    block_bytes: int
    fingerprint: bytes
    drafter: ModelDrafter | None  # None: --speculative names no draft model


def _assemble_on_torch_thread(
    config: EngineConfig, progress: ProgressFn, torch_thread: ThreadPoolExecutor
) -> EngineParts:
    progress("starting", 0.0)
    drafter_class = find_drafter_class(config.speculative)  # before the model: it may be refused
    model = _load(config, progress)
    threshold, tiers = _test_and_open_tiers(model, config, progress)
    info = model.loaded.info
    drafter = _guarded_drafter(config, drafter_class, model, torch_thread)
    wake = Wake()
    side = _open_side_store(config, model.fingerprint, tiers)
    offload = OffloadManager(tiers, block_bytes=model.block_bytes, wake=wake)
    samples = LoadSamples(config.verify_loads, config.seed, config.block_size)
    kv = KVCacheManager(
        model.num_blocks,
        config.block_size,
        offload,
        groups=model.groups,
        offload_prompt_only=config.offload_prompt_only,
        samples=samples if config.verify_loads else None,
    )
    sessions = Sessions(side)
    chooser = LoadChooser(config.load_policy, config.block_size, offload)
    limits = SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens)
    reporter = AuditReporter(config.cache_dir, model.fingerprint)
    core = EngineCore(
        scheduler=Scheduler(limits, kv, chooser.plan),
        kv=kv,
        offload=offload,
        runner=model.runner,
        torch_thread=torch_thread,
        chooser=chooser,
        speculation=_speculation(config, drafter),
        load_deadline=config.load_deadline,
        auditor=LoadAuditor(kv, samples, threshold) if threshold else None,
        reporter=reporter,
        sessions=sessions,
    )
    progress("ready", 100.0)
    return EngineParts(
        info=info,
        tokenizer=model.loaded.tokenizer,
        fingerprint=model.fingerprint,
        block_bytes=model.block_bytes,
        kv=kv,
        core=core,
        offload=offload,
        side=side,
        transcripts=Transcripts(
            model.loaded.tokenizer,
            side,
            vocab_size=info.vocab_size,
            enabled=config.transcript_cache == "on",
        ),
        torch_thread=torch_thread,
        drafter=drafter,
        wake=wake,
        sessions=sessions,
        reporter=reporter,
    )


def _guarded_drafter(
    config: EngineConfig, drafter_class: type | None, model: _Model, torch_thread: Executor
) -> GuardedDrafter | None:
    vocab_size = model.loaded.info.vocab_size
    if model.drafter is not None:
        return GuardedDrafter(model.drafter, vocab_size=vocab_size, post=torch_thread.submit)
    if drafter_class is None:
        return None
    drafter = build_drafter(
        config.speculative,
        drafter_class,
        vocab_size=vocab_size,
        max_tokens=config.speculative_tokens,
    )
    # Somebody else's may take its time; ours costs less than handing the call to a thread.
    thread = None if config.speculative == NGRAM else DrafterThread()
    return GuardedDrafter(drafter, vocab_size=vocab_size, thread=thread)


def _speculation(config: EngineConfig, drafter: GuardedDrafter | None) -> Speculation | None:
    if drafter is None:
        return None
    depth = DraftDepth(config.speculative_tokens, adaptive=config.speculative_depth == "auto")
    return Speculation(drafter, depth, config.speculative_tokens)


def _load(config: EngineConfig, progress: ProgressFn) -> _Model:
    import torch  # the heaviest import; it belongs to this thread like everything torch does

    from engine import attention
    from engine.compute_path import use_kernels
    from engine.draft_loading import build_model_drafter, divide_kv_memory, load_draft_model
    from engine.kernels import load_kernels
    from engine.kv_cache import KVCache
    from engine.model_loader import load_model
    from engine.model_runner import ModelRunner
    from engine.self_test import reference_of

    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    attention.register()
    kernels = load_kernels(config.cache_dir)
    loaded = load_model(config, progress)
    reference = reference_of(loaded)
    info = loaded.info
    groups = group_layers(info.sliding_windows, info.max_model_len)
    layout = KVLayout.of_model(info, groups, config.block_size)
    kv_memory, draft_memory, draft = config.kv_memory, None, None
    if draft_model_of(config.speculative) is not None:
        draft = load_draft_model(config, config.speculative, loaded, progress)
        if kv_memory is not None:
            token_bytes = len(groups) * layout.token_bytes
            kv_memory, draft_memory = divide_kv_memory(kv_memory, token_bytes, draft.token_bytes)
    num_blocks = _num_blocks(config, kv_memory, layout.block_bytes, groups)
    use_kernels(loaded.model, kernels, loaded.quantised)
    device = next(loaded.model.parameters()).device
    cache = KVCache(num_blocks, layout, device)
    runner = ModelRunner(loaded.model, cache, kernels, info.vocab_size, groups)
    drafter = None
    if draft is not None:
        drafter = build_model_drafter(config, draft, info, kernels, draft_memory, progress)
    fingerprint = kv_fingerprint(
        info.fingerprint,
        kv_dtype=info.dtype,
        layout=f"{KV_LAYOUT_NAME};{describe_groups(groups)}",
        block_size=config.block_size,
        format_version=KV_FORMAT_VERSION,
    )
    return _Model(
        loaded, reference, runner, groups, num_blocks, layout.block_bytes, fingerprint, drafter
    )


def _test_and_open_tiers(
    model: _Model, config: EngineConfig, progress: ProgressFn
) -> tuple[float | None, list[Tier]]:
    """The threshold of audits (None: loads are not audited), and the tiers.

    A disk tier of many blocks takes seconds to look through, so it is while the model is tested.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="tiers") as thread:
        opening = thread.submit(_open_tiers, config, model.fingerprint, model.block_bytes)
        try:
            threshold = _test(model, config, progress)
        except BaseException:
            with suppress(StartupError):
                for tier in opening.result():
                    tier.close()
            raise
        progress("opening KV tiers", 0.0)
        return threshold, opening.result()


def _test(model: _Model, config: EngineConfig, progress: ProgressFn) -> float | None:
    from engine.audit_threshold import calibrate
    from engine.self_test import check_model

    progress("self-test", 0.0)
    check_model(model.loaded, model.runner, model.reference, config.block_size, model.num_blocks)
    if not config.verify_loads:
        return None
    return calibrate(model.runner, model.loaded.info, config.block_size, model.num_blocks)


def _num_blocks(
    config: EngineConfig, kv_memory: int | None, block_bytes: int, groups: Sequence[KVGroup]
) -> int:
    """Blocks of the device pool, which has `kv_memory` of `config.kv_memory` bytes; every group of
    a request's layers needs one at least."""
    least = len(groups)
    if config.kv_blocks is not None:
        if config.kv_blocks < least:
            raise StartupError(
                f"--kv-blocks {config.kv_blocks} is too few: this model needs {least} at least"
            )
        return config.kv_blocks
    assert kv_memory is not None
    num_blocks = kv_memory // block_bytes
    if num_blocks < least:
        beside = "" if kv_memory == config.kv_memory else " beside the draft model's"
        raise StartupError(
            f"--kv-memory {config.kv_memory} holds {num_blocks} KV blocks of {block_bytes} bytes"
            f"{beside}, and this model needs {least} at least; raise it or lower --block-size"
        )
    return num_blocks


def _open_tiers(config: EngineConfig, fingerprint: bytes, block_bytes: int) -> list[Tier]:
    tiers: list[Tier] = []
    if config.cpu_tier:
        try:
            tiers.append(CpuTier(config.cpu_tier, block_bytes=block_bytes))
        except TierOpenError as error:
            raise StartupError(f"--cpu-tier {config.cpu_tier}: {error}") from error
    if config.disk_tier is None:
        return tiers
    try:
        tiers.append(
            DiskTier.open(
                config.disk_tier,
                fingerprint=fingerprint,
                block_bytes=block_bytes,
                capacity_bytes=config.disk_tier_size,
                ttl_seconds=config.disk_tier_ttl,
                side_bytes=physical_bytes(limit) if (limit := _side_limit(config)) else 0,
            )
        )
    except TierOpenError as error:
        if not config.disk_tier_optional:
            raise StartupError(f"--disk-tier {config.disk_tier}: {error}") from error
        logger.warning("serving without the disk tier: %s", error)
    return tiers


def _side_limit(config: EngineConfig) -> int:
    """Bytes of records that the disk tier keeps; 0 where it is too small for any."""
    room = config.disk_tier_size // SIDE_STORE_SHARE
    limit = min(SIDE_STORE_BYTES, (room - physical_bytes(0)) // 2)
    return limit if limit >= MIN_SIDE_STORE_BYTES else 0


def _open_side_store(config: EngineConfig, fingerprint: bytes, tiers: Sequence[Tier]) -> SideStore:
    """Beside the disk tier, or in memory alone where there is none or it is small."""
    limit = _side_limit(config)
    if config.disk_tier is None or not limit or not any(isinstance(t, DiskTier) for t in tiers):
        return SideStore.open(None, max_bytes=SIDE_STORE_BYTES)
    return SideStore.open(
        side_path(config.disk_tier, fingerprint),
        max_bytes=limit,
        ttl_seconds=config.disk_tier_ttl,
        volatile=[TRANSCRIPTS] if config.offload_prompt_only else [],
    )
