"""Why a prompt would hit no more than it would: the answer of `/cache/explain`.

    |-- used --|-- held, not used: why --|-- missing: why --|-- not a whole block --|
    0     would_hit_tokens                                          prompt_tokens

What is told of a missing block, the first of these that is true:

    its own fate (evicted, expired, reset, failed ...)     the tiers' memory of this process
    stored under another fingerprint                       by names on the shared medium
    stored under another salt                              told to an administrator alone
    tokens differ from the nearest stored prefix at n      among children of the last block held
    never stored

Everything but the salts asked about by an administrator is looked up under the caller's own root,
so nobody learns what lies under another's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from engine.block_hash import chain_hashes, root_hash
from engine.kv_cache_manager import DEVICE, count_by_tier
from engine.request import Request
from engine.scheduler import Scheduler
from engine.sessions import num_common
from offload.history import Fate
from offload.tier import BlockHash, BlockKey, BlockMeta

NEVER_STORED = "never stored"
MAX_CHILDREN = 64  # read to find the nearest one
MAX_SALTS = 1024  # remembered for administrators, the latest seen
# What a fate reads like; the tier and the time are filled in.
WORDS = {
    "evicted": "evicted from {tier} at {when}",
    "expired": "expired in {tier} at {when}",
    "reset": "reset in {tier} at {when}",
    "failed verification": "failed verification in {tier} at {when}",
    "save failed": "save to {tier} failed at {when}",
    "lost": "lost before {tier} had it, or gone from there, at {when}",
    "superseded": "evicted from {tier} at {when}, after a newer turn had left it behind",
}


@dataclass(slots=True)
class BlockReport:
    """One whole block of the prompt. `reason` says why it would not be used, None if it would."""

    index: int
    key: BlockKey
    tiers: list[str] = field(default_factory=list)
    reason: str | None = None

    def body(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "hash": self.key.block_hash.hex(),
            "tiers": self.tiers,
            "reason": self.reason,
        }


class SaltsSeen:
    """The salts of recent requests. They are never told."""

    def __init__(self) -> None:
        self._salts: OrderedDict[str, None] = OrderedDict()

    def note(self, salt: str | None) -> None:
        if salt is None:
            return
        self._salts[salt] = None
        self._salts.move_to_end(salt)
        if len(self._salts) > MAX_SALTS:
            self._salts.popitem(last=False)

    def others(self, salt: str | None) -> list[str | None]:
        """All but this one, latest first, no salt among them whether seen or not."""
        return [seen for seen in (None, *reversed(self._salts)) if seen != salt]


class Explainer:
    """Looks, changes nothing. Engine loop only."""

    def __init__(self, scheduler: Scheduler, fingerprint: bytes, salts: SaltsSeen) -> None:
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._fingerprint = fingerprint
        self._salts = salts

    async def explain(
        self, request: Request, cache_salt: str | None, *, is_admin: bool
    ) -> dict[str, Any]:
        """The answer for a request that is not queued; of one moment, but for what lies on disk."""
        hits, num_used = self._scheduler.foresee(request)
        cached = count_by_tier([hit.source for hit in hits[:num_used]], self._kv.block_size)
        reports = self._reports(request, len(hits), num_used)
        missing = [report for report in reports if not report.tiers]
        if missing:
            await self._explain_missing(request, missing, cache_salt, is_admin)
        return {
            "prompt_tokens": request.num_prompt_tokens,
            "would_hit_tokens": cached.total,
            "blocks": [report.body() for report in reports],
        }

    def _reports(self, request: Request, num_hits: int, num_used: int) -> list[BlockReport]:
        block_size = self._kv.block_size
        hashes = chain_hashes(request.root_hash, request.prompt_token_ids, block_size)
        reports = [
            BlockReport(index, key, self._holders(key))
            for index, key in enumerate(self._kv.keys(hashes))
        ]
        for report in reports[num_used:]:
            if report.tiers:
                report.reason = self._why_unused(request, report.index, num_hits)
        return reports

    def _holders(self, key: BlockKey) -> list[str]:
        nearest = self._kv.nearest(key)
        below = self._kv.offload.inquiry.holders(key)
        return below if nearest is None else list(dict.fromkeys((nearest, *below)))

    def _why_unused(self, request: Request, index: int, num_hits: int) -> str:
        if request.wants_prompt_logprobs:
            return "held, but log-probabilities of the prompt want every position computed"
        if index < num_hits:
            return "held, but computing it is faster than loading it (--load-policy)"
        if (index + 1) * self._kv.block_size >= request.num_tokens:
            return "held, but at least one token is always computed"
        return "held, but a block before it is missing"

    async def _explain_missing(
        self, request: Request, missing: list[BlockReport], salt: str | None, is_admin: bool
    ) -> None:
        unknown: list[BlockReport] = []
        for report in missing:
            fates = self._kv.offload.fate(report.key)
            report.reason = _told(fates) if fates else NEVER_STORED
            if not fates:
                unknown.append(report)
        if not unknown:
            return
        first = unknown[0]
        elsewhere = await self._under_other_fingerprints(request, salt)
        others = self._under_other_salts(request, salt) if is_admin else set()
        for report in unknown:
            if report.index in elsewhere:
                fingerprint = elsewhere[report.index]
                report.reason = f"stored under another fingerprint, {fingerprint[:16]}"
            elif report.index in others:
                report.reason = "stored under another cache_salt"
        if first.reason == NEVER_STORED and first is missing[0]:
            first.reason = await self._nearest(request, first)

    async def _under_other_fingerprints(
        self, request: Request, salt: str | None
    ) -> dict[int, str]:
        block_size, tokens = self._kv.block_size, tuple(request.prompt_token_ids)

        def metas_under(fingerprint: bytes) -> Sequence[tuple[BlockKey, BlockMeta]]:
            return _chain(root_hash(fingerprint, salt), tokens, block_size)

        return await self._kv.offload.inquiry.elsewhere(metas_under)

    def _under_other_salts(self, request: Request, salt: str | None) -> set[int]:
        """Indexes of blocks that lie under a salt this process has seen, or under none."""
        block_size, tokens = self._kv.block_size, request.prompt_token_ids
        found: set[int] = set()
        for other in self._salts.others(salt):
            root = root_hash(self._fingerprint, other)
            first = chain_hashes(root, tokens[:block_size], block_size)
            if any(self._kv.nearest(key) for key in self._kv.keys(first)):
                keys = self._kv.keys(chain_hashes(root, tokens, block_size))
                found |= {index for index, key in enumerate(keys) if self._kv.nearest(key)}
        return found

    async def _nearest(self, request: Request, report: BlockReport) -> str:
        """Where the first missing block departs from what is stored behind the same prefix."""
        start = report.index * self._kv.block_size
        tokens = request.prompt_token_ids[start : start + self._kv.block_size]
        hashes = chain_hashes(request.root_hash, request.prompt_token_ids[:start], len(tokens))
        parent = hashes[-1] if hashes else request.root_hash
        inquiry = self._kv.offload.inquiry
        metas = await inquiry.metas(inquiry.children(parent)[:MAX_CHILDREN])
        siblings = [m.token_ids for m in metas.values() if m.parent_hash == parent]
        longest = max((num_common(tokens, other) for other in siblings), default=0)
        if not siblings or start + longest == 0:
            return NEVER_STORED
        return f"tokens differ from the nearest stored prefix at position {start + longest}"


def _told(fates: Sequence[Fate]) -> str:
    """Oldest first, as it happened."""
    return "; ".join(
        WORDS.get(fate.what, fate.what + " in {tier} at {when}").format(
            tier=fate.tier, when=_utc(fate.when)
        )
        for fate in sorted(fates, key=lambda fate: fate.when)
    )


def _utc(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _chain(
    root: BlockHash, token_ids: Sequence[int], block_size: int
) -> list[tuple[BlockKey, BlockMeta]]:
    hashes = chain_hashes(root, token_ids, block_size)
    parents = [root, *hashes]
    return [
        (
            BlockKey(value, 0),
            BlockMeta(parent, tuple(token_ids[i * block_size : (i + 1) * block_size]), root),
        )
        for i, (value, parent) in enumerate(zip(hashes, parents, strict=False))
    ]
