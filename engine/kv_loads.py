"""Loads in flight: one per missing block, however many requests wait for it.

A load holds one reference to its device block, each waiting request another. The bytes arrive by
a copy on the torch thread; only then is the block registered in the prefix map. A load whose last
waiter leaves is cancelled, unless its copy was already handed out: then it is let finish, because
the destination may be freed only after the copy has stopped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.block_pool import BlockPool
from engine.load_samples import LoadSamples
from engine.request import Request
from offload.manager import OffloadManager
from offload.tier import BlockKey, BlockMeta, Forget
from offload.transfers import CopyIn


@dataclass(slots=True, eq=False)
class KVLoad:
    """One block on its way from a tier to the device."""

    ticket: int
    key: BlockKey
    meta: BlockMeta
    block_id: int
    tier: str
    copying: bool = False  # handed out: the destination is being written
    publish: bool = True  # False after a cache reset: the bytes serve their waiters alone
    # Who asked first, for which of its blocks; for a prefetch nobody, with tokens of the chain.
    origin: tuple[Request, int] | None = None
    wanted: bool = False  # a prefetch: it goes on though nobody waits for it
    waiters: list[Request] = field(default_factory=list)


class KVLoads:
    """The table of loads; engine loop only."""

    def __init__(
        self, pool: BlockPool, offload: OffloadManager, samples: LoadSamples | None = None
    ) -> None:
        self._samples = samples
        self._pool = pool
        self._offload = offload
        self._by_key: dict[BlockKey, KVLoad] = {}
        self._by_ticket: dict[int, KVLoad] = {}

    def find(self, key: BlockKey) -> KVLoad | None:
        """The load of `key` that may still be joined."""
        return self._by_key.get(key)

    def active(self) -> Iterable[KVLoad]:
        """Every load that holds a reference to its block, joinable or not."""
        return self._by_ticket.values()

    def start(
        self, request: Request, index: int, key: BlockKey, meta: BlockMeta, block_id: int, tier: str
    ) -> None:
        """Load block `index` of `request` into `block_id`, which it already references."""
        ticket = self._offload.load(key, block_id, tier)
        origin = (request, index)
        load = KVLoad(ticket, key, meta, block_id, tier, origin=origin, waiters=[request])
        self._pool.reference(block_id)
        self._by_key[key] = self._by_ticket[ticket] = load
        request.pending_loads[ticket] = index

    def join(self, request: Request, index: int, key: BlockKey) -> None:
        """Wait for a load somebody else started; `request` already references its block."""
        load = self._by_key[key]
        load.waiters.append(request)
        load.origin = load.origin or (request, index)
        request.pending_loads[load.ticket] = index

    def prefetch(
        self,
        key: BlockKey,
        meta: BlockMeta,
        block_id: int,
        tier: str,
        origin: tuple[Request, int] | None = None,
    ) -> int:
        """Load a block ahead of any request; the ticket. The reference that `block_id` has is the
        load's own from now on. Without an `origin` it cannot be drawn for an audit."""
        ticket = self._offload.load(key, block_id, tier)
        load = KVLoad(ticket, key, meta, block_id, tier, origin=origin, wanted=True)
        self._by_key[key] = self._by_ticket[ticket] = load
        return ticket

    def give_up(self, ticket: int) -> None:
        """A prefetch is not wanted any more; it ends here unless a request waits for it or its
        copy was handed out. Nothing for one that has ended."""
        load = self._by_ticket.get(ticket)
        if load is not None:
            load.wanted = False
            self._cancel_if_useless(load)

    def in_flight(self, ticket: int) -> bool:
        return ticket in self._by_ticket

    def copying(self, copies: Iterable[CopyIn]) -> None:
        """These copies were handed out: their destinations are being written."""
        for copy in copies:
            self._by_ticket[copy.ticket].copying = True

    def loaded(self, ticket: int) -> list[Request]:
        """The bytes are in place and verified: publish the block; returns who waited for it."""
        load = self._remove(ticket)
        if load.publish and self._pool.register(load.key, load.block_id, load.meta.root_hash):
            self._offload.hold(load.key, load.meta, load.block_id)
            if self._samples is not None and load.origin is not None:
                self._samples.draw(*load.origin, load.key, load.block_id, load.tier)
        self._pool.release(load.block_id)
        for request in load.waiters:
            del request.pending_loads[ticket]
        return load.waiters

    def failed(self, ticket: int) -> list[tuple[Request, int]]:
        """The block never came; who waited, and which of its blocks it has to do without."""
        if ticket not in self._by_ticket:
            return []
        load = self._remove(ticket)
        self._pool.release(load.block_id)
        return [(request, request.pending_loads.pop(ticket)) for request in load.waiters]

    def leave(self, request: Request, indices: range | None = None) -> None:
        """`request` does without its blocks at `indices`, None: without any."""
        for ticket, index in list(request.pending_loads.items()):
            if indices is not None and index not in indices:
                continue
            del request.pending_loads[ticket]
            load = self._by_ticket[ticket]
            load.waiters.remove(request)
            self._cancel_if_useless(load)

    def _cancel_if_useless(self, load: KVLoad) -> None:
        if not load.waiters and not load.wanted and not load.copying:
            self._offload.cancel(load.ticket)
            self._remove(load.ticket)
            self._pool.release(load.block_id)

    def reset(self, where: Forget | None = None) -> None:
        """Loads of before a cache reset (None: of everything) can neither be joined nor published
        any more."""
        for load in self._by_ticket.values():
            if where is None or where.matches(load.key, load.meta.root_tag):
                load.publish = False
                self._by_key.pop(load.key, None)
        if self._samples is not None:
            self._samples.clear()

    def _remove(self, ticket: int) -> KVLoad:
        load = self._by_ticket.pop(ticket)
        if self._by_key.get(load.key) is load:
            del self._by_key[load.key]
        return load
