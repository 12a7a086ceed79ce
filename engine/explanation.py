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
from engine.prefix_match import PrefixHit, count_by_tier
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
    block_hash: BlockHash
    tiers: list[str] = field(default_factory=list)
    reason: str | None = None

    def body(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "hash": self.block_hash.hex(),
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
        hit, start = self._scheduler.foresee(request)
        used = (*hit.sources[: hit.num_device], *hit.sources[start : hit.num_held])
        cached = count_by_tier(used, self._kv.block_size)
        reports = self._reports(request, hit, start)
        missing = [
            report for report in reports if not report.tiers and report.index >= hit.num_held
        ]
        if missing:
            await self._explain_missing(request, missing, cache_salt, is_admin)
        return {
            "prompt_tokens": request.num_prompt_tokens,
            "would_hit_tokens": cached.total,
            "blocks": [report.body() for report in reports],
        }

    def _reports(self, request: Request, hit: PrefixHit, start: int) -> list[BlockReport]:
        hashes = chain_hashes(request.root_hash, request.prompt_token_ids, self._kv.block_size)
        reports = [BlockReport(i, value, self._holders(value)) for i, value in enumerate(hashes)]
        for report in reports:
            is_used = report.index < hit.num_device or start <= report.index < hit.num_held
            if report.tiers and not is_used:
                report.reason = self._why_unused(request, report.index, hit)
        return reports

    def _holders(self, block_hash: BlockHash) -> list[str]:
        """The tiers that hold the block or load it, nearest first."""
        held: dict[str, None] | None = None
        for key in self._kv.prefix_keys(block_hash):
            nearest = self._kv.nearest(key)
            below = self._kv.offload.inquiry.holders(key)
            tiers = dict.fromkeys([nearest, *below] if nearest else below)
            held = tiers if held is None else {t: None for t in held if t in tiers}
        return list(held or ())

    def _is_held(self, block_hash: BlockHash) -> bool:
        return all(self._kv.nearest(key) for key in self._kv.prefix_keys(block_hash))

    def _why_unused(self, request: Request, index: int, hit: PrefixHit) -> str:
        if request.wants_prompt_logprobs:
            return "held, but log-probabilities of the prompt want every position computed"
        if index < hit.num_held:
            return "held, but computing it is faster than loading it (--load-policy)"
        if (index + 1) * self._kv.block_size >= request.num_tokens:
            return "held, but at least one token is always computed"
        if index < hit.num_shared:
            return "held, but a sliding window before it is not"
        return "held, but a block before it is missing"

    async def _explain_missing(
        self, request: Request, missing: list[BlockReport], salt: str | None, is_admin: bool
    ) -> None:
        unknown: list[BlockReport] = []
        for report in missing:
            fates = self._fates(report.block_hash)
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

    def _fates(self, block_hash: BlockHash) -> list[Fate]:
        keys = self._kv.prefix_keys(block_hash)
        missing = [key for key in keys if self._kv.nearest(key) is None]
        return self._kv.offload.fate(missing[0]) if missing else []

    async def _under_other_fingerprints(self, request: Request, salt: str | None) -> dict[int, str]:
        block_size, tokens = self._kv.block_size, tuple(request.prompt_token_ids)
        group = self._kv.prefix_keys(request.root_hash)[0].group

        def metas_under(fingerprint: bytes) -> Sequence[tuple[BlockKey, BlockMeta]]:
            return _chain(root_hash(fingerprint, salt), tokens, block_size, group)

        return await self._kv.offload.inquiry.elsewhere(metas_under)

    def _under_other_salts(self, request: Request, salt: str | None) -> set[int]:
        """Indexes of blocks that lie under a salt this process has seen, or under none."""
        block_size, tokens = self._kv.block_size, request.prompt_token_ids
        found: set[int] = set()
        for other in self._salts.others(salt):
            root = root_hash(self._fingerprint, other)
            if all(map(self._is_held, chain_hashes(root, tokens[:block_size], block_size))):
                hashes = chain_hashes(root, tokens, block_size)
                found |= {index for index, value in enumerate(hashes) if self._is_held(value)}
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
    root: BlockHash, token_ids: Sequence[int], block_size: int, group: int
) -> list[tuple[BlockKey, BlockMeta]]:
    hashes = chain_hashes(root, token_ids, block_size)
    parents = [root, *hashes]
    return [
        (
            BlockKey(value, group),
            BlockMeta(parent, tuple(token_ids[i * block_size : (i + 1) * block_size]), root),
        )
        for i, (value, parent) in enumerate(zip(hashes, parents, strict=False))
    ]
