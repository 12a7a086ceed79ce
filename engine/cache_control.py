"""What users do to the cache: look at it, flush, forget, pin, prefetch.

A conversation is named by its `prompt_cache_key` or by its tokens, always within a salt. Every
method belongs to the engine's event loop; what it changes it changes between two awaits.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.block_hash import chain_hashes, root_hash
from engine.core import EngineCore
from engine.errors import InvalidRequestError
from engine.prefetch import Prefetcher
from engine.prefix_match import DEVICE
from engine.sessions import Session, Sessions
from engine.transcripts import Transcripts
from offload.side_store import SideStore
from offload.tier import BlockHash, BlockKey, BlockMeta, Forget, OffloadError

DEFAULT_PIN_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class CacheSelector:
    """Exactly one of `prompt_cache_key` and `token_ids` names it, within the salt's space."""

    cache_salt: str | None
    prompt_cache_key: str | None = None
    token_ids: Sequence[int] | None = None


class CacheControl:
    """`pump` lets the engine loop run one round."""

    def __init__(
        self,
        core: EngineCore,
        *,
        fingerprint: bytes,
        block_bytes: int,
        sessions: Sessions,
        side: SideStore,
        transcripts: Transcripts,
        prefetcher: Prefetcher,
        pump: Callable[[], Awaitable[None]],
    ) -> None:
        self._core = core
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._sessions = sessions
        self._side = side
        self._transcripts = transcripts
        self._prefetcher = prefetcher
        self._pump = pump

    # --- the whole --------------------------------------------------------------------------

    async def flush(self) -> dict[str, Any]:
        """Bring every committed block into every tier, synced: `{saved: {...}, failed: {...}}`."""
        done = await self._core.offload.flush(self._pump)
        await self._side.flush()  # sessions and transcripts are hints: no failure of these
        return done

    def stats(self) -> dict[str, Any]:
        """The body of GET /cache/stats."""
        kv, stats = self._core.kv, self._core.stats()
        device = {
            "blocks": kv.pool.num_cached,
            "bytes": kv.pool.num_cached * self._block_bytes,
            "capacity_bytes": kv.pool.num_blocks * self._block_bytes,
            "pinned_blocks": kv.pool.num_blocks - kv.pool.num_available,
            "pending_saves": 0,
            "hit_tokens": stats.hit_tokens.get(DEVICE, 0),
            "saved_blocks": kv.pool.num_registered,
            "evicted_blocks": kv.pool.num_evicted,
            "failed_blocks": 0,
        }
        tiers = {DEVICE: device}
        for name, tier in stats.tiers.items():
            numbers = asdict(tier)
            shown = {key: numbers[key] for key in device if key in numbers}
            tiers[name] = shown | {"hit_tokens": stats.hit_tokens.get(name, 0)}
        return {
            "block_size": kv.block_size,
            "fingerprint": self._fingerprint.hex(),
            "tiers": tiers,
        }

    # --- forgetting -------------------------------------------------------------------------

    async def reset(
        self, tiers: Sequence[str] | None, cache_salt: str | None, prompt_cache_key: str | None
    ) -> dict[str, int]:
        """See `AsyncEngine.cache_reset`."""
        known = [DEVICE, *self._core.offload.stats()]
        wanted = known if tiers is None else list(tiers)
        unknown = [tier for tier in wanted if tier not in known]
        if unknown:
            raise InvalidRequestError(
                f"tiers names {unknown[0]!r}; this server has {', '.join(known)}", "tiers"
            )
        where = self._what_to_forget(cache_salt, prompt_cache_key)
        space = root_hash(self._fingerprint, cache_salt)
        forgets_all = set(wanted) == set(known)
        session = Session()
        if forgets_all:
            if prompt_cache_key is not None:
                session = self._sessions.get(space, prompt_cache_key)
            self._forget_records(space, cache_salt, prompt_cache_key)
            is_partial = cache_salt is not None or prompt_cache_key is not None
            self._core.forget_drafts([cache_salt] if is_partial else None)
        dropped: dict[str, int] = {}
        if DEVICE in wanted:
            dropped[DEVICE] = self._core.kv.reset(self._core.scheduler.live(), where)
            if self._core.auditor is not None:
                self._core.auditor.forget()
        below = [tier for tier in wanted if tier != DEVICE]
        try:
            dropped.update(await self._core.offload.reset(below, where))
        except OffloadError:
            if prompt_cache_key is not None and session.blocks:
                self._sessions.put(space, prompt_cache_key, session)  # to be tried again
            raise
        if forgets_all and not await self._side.flush():
            raise OffloadError("the KV is gone, but a restart may find records of conversations")
        return dropped

    def _what_to_forget(self, cache_salt: str | None, key: str | None) -> Forget | None:
        space = root_hash(self._fingerprint, cache_salt)
        if key is not None:
            hashes = self._sessions.get(space, key).blocks
            for request in self._core.live_under(space, key):
                self._core.kv.begun(request)  # hashes what it has begun
                hashes += request.block_hashes  # and what it stored before it was preempted
            return Forget(keys=frozenset(self._core.kv.keys(hashes)))
        return None if cache_salt is None else Forget(roots=frozenset((space,)))

    def _forget_records(self, space: BlockHash, cache_salt: str | None, key: str | None) -> None:
        """The records beside the blocks. Token ids of chats are not kept by key, so those of the
        whole space go with one of its conversations; what is known of the others stays."""
        if key is not None:
            self._sessions.forget(space, key)
            others = self._sessions.export(space)
            self._transcripts.forget(space)
            self._sessions.restore(space, others)
        elif cache_salt is not None:
            self._transcripts.forget(space)
        else:
            self._transcripts.clear()

    # --- steering ---------------------------------------------------------------------------

    def pin(self, selector: CacheSelector, ttl_seconds: float | None) -> dict[str, int]:
        """See `AsyncEngine.cache_pin`."""
        self._need_a_tier("pinning")
        return self._pin(selector, DEFAULT_PIN_SECONDS if ttl_seconds is None else ttl_seconds)

    def _pin(self, selector: CacheSelector, ttl_seconds: float) -> dict[str, int]:
        keys = self._core.kv.keys(self._hashes(selector))
        until = time.time() + ttl_seconds
        blocks, num_bytes = self._core.offload.pin(self._name(selector), keys, until)
        return {"blocks": blocks, "bytes": num_bytes}

    def unpin(self, selector: CacheSelector) -> dict[str, int]:
        """See `AsyncEngine.cache_unpin`."""
        self._need_a_tier("unpinning")
        blocks, num_bytes = self._core.offload.unpin(self._name(selector))
        return {"blocks": blocks, "bytes": num_bytes}

    async def prefetch(self, selector: CacheSelector, ttl_seconds: float | None) -> dict[str, int]:
        """See `AsyncEngine.cache_prefetch`."""
        self._need_a_tier("prefetching")
        if ttl_seconds is not None:
            self._pin(selector, ttl_seconds)  # nothing of it goes while it is being loaded
        blocks = await self._stored_blocks(self._hashes(selector))
        num_nearer = await self._prefetcher.run(blocks)
        if ttl_seconds is not None:
            self._pin(selector, ttl_seconds)  # where it lies now
        return {"blocks": num_nearer, "bytes": num_nearer * self._block_bytes}

    async def _stored_blocks(self, hashes: Sequence[BlockHash]) -> list[tuple[BlockKey, BlockMeta]]:
        """The leading blocks that are held anywhere, and what each claims to hold."""
        held: list[BlockKey] = []
        for block_hash in hashes:
            keys = [key for key in self._core.kv.keys([block_hash]) if self._core.kv.nearest(key)]
            if not keys:
                break
            held += keys
        metas = await self._core.offload.inquiry.metas(held)
        return [(key, metas[key]) for key in held if key in metas]

    def _hashes(self, selector: CacheSelector) -> list[BlockHash]:
        space = root_hash(self._fingerprint, selector.cache_salt)
        if selector.prompt_cache_key is not None:
            return list(self._sessions.get(space, selector.prompt_cache_key).chain)
        assert selector.token_ids is not None
        return chain_hashes(space, selector.token_ids, self._core.kv.block_size)

    def _name(self, selector: CacheSelector) -> str:
        """Of a pin. Equal for equal selectors, and for nothing else."""
        space = root_hash(self._fingerprint, selector.cache_salt)
        if selector.prompt_cache_key is not None:
            return f"key {space.hex()} {selector.prompt_cache_key}"
        hashes = self._hashes(selector)
        return f"prompt {(hashes[-1] if hashes else space).hex()}"

    def _need_a_tier(self, what: str) -> None:
        if not self._core.offload.stats():
            raise InvalidRequestError(
                f"{what} needs a tier below the device, and this server has none: start it with"
                " --cpu-tier SIZE or --disk-tier DIR"
            )
