"""Which blocks should go first: policies compared on chats mixed with one-off long prompts.

    python benchmarks/eviction.py                       the tables in docs/measurements.md
    python benchmarks/eviction.py --conversations 100 --turns 12 --one-offs 0.3 --size 1

A simulation on the production index, nothing is computed or stored: requests come in the order of a
generated trace, one at a time, and do to one tier what the engine does. It counts TOKENS HIT BY
PREFIX: a block counts only while all blocks before it are held as well, for a chain without its
root is worthless. The size of the tier is a share of the working set: the mean number of blocks
that some later request will ask for again.

What production does is the row "ARC, chains" (offload/eviction.py). The other policies live here.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections import OrderedDict, deque
from dataclasses import dataclass

from offload.block_index import BlockIndex
from offload.eviction import EvictionOrder
from offload.tier import BlockHash, BlockKey, BlockState, Entry, FoundBlock

BLOCK_TOKENS = 16
WARM_UP = 0.2  # of the trace, not counted


@dataclass(frozen=True)
class Request:
    """One chain: the prompt's blocks, then the answer's."""

    when: float
    blocks: list[int]
    num_prompt: int


@dataclass(frozen=True)
class Mix:
    """Parameters of a trace; sizes in blocks, times in seconds."""

    conversations: int = 40  # at once; one that ends makes way for a new one
    turns: float = 6.0  # mean, exponentially distributed, at least one
    think: float = 60.0  # mean time between turns, log-normal; only its spread shapes a trace
    spread: float = 1.0  # sigma of its logarithm
    one_offs: float = 0.2  # share of the requests
    requests: int = 900  # turns of chats
    system_prompts: int = 4
    with_system_prompt: float = 0.7


def make_trace(mix: Mix, seed: int) -> list[Request]:
    rng = random.Random(seed)
    num_blocks = 0

    def fresh(least: int, most: int) -> list[int]:
        nonlocal num_blocks
        first, num_blocks = num_blocks, num_blocks + rng.randint(least, most)
        return list(range(first, num_blocks))

    system_prompts = [fresh(8, 48) for _ in range(mix.system_prompts)]
    due = [(rng.random() * 2 * mix.think, user, [], 0) for user in range(mix.conversations)]
    heapq.heapify(due)
    trace = []
    while len(trace) < mix.requests:
        when, user, history, left = heapq.heappop(due)
        if not history:
            left = 1 + round(rng.expovariate(1 / (mix.turns - 1))) if mix.turns > 1 else 1
            system = rng.choice(system_prompts)
            history = [*(system if rng.random() < mix.with_system_prompt else []), *fresh(4, 30)]
        else:
            history = history + fresh(2, 12)
        num_prompt = len(history)
        history = history + fresh(4, 20)
        trace.append(Request(when, history, num_prompt))
        pause = mix.think * rng.lognormvariate(-(mix.spread**2) / 2, mix.spread)
        left -= 1
        heapq.heappush(due, (when + pause, user, history if left else [], left))
    end = trace[-1].when
    for _ in range(round(len(trace) * mix.one_offs / (1 - mix.one_offs))):
        prompt = fresh(100, 400)
        trace.append(Request(rng.random() * end, prompt + fresh(4, 20), len(prompt)))
    return sorted(trace, key=lambda request: request.when)


def working_set(trace: list[Request]) -> int:
    """Mean number of blocks stored that will be asked for again."""
    last = {block: i for i, request in enumerate(trace) for block in request.blocks}
    live: set[int] = set()
    total = 0
    for i, request in enumerate(trace):
        for block in request.blocks:
            if last[block] > i:
                live.add(block)
            else:
                live.discard(block)
        total += len(live)
    return total // len(trace)


# -- the policies: what BlockIndex asks of an order, see offload/eviction.py


class Order:
    """Remembers nothing of what went; subclasses say what goes."""

    def __init__(self) -> None:
        self.held: OrderedDict[BlockKey, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self.held)

    def __iter__(self):
        yield from self.held.values()

    def recall(self, key: BlockKey) -> bool:
        return False

    def add(self, entry: Entry) -> None:
        self.held[entry.key] = entry

    def adopt(self, entries) -> None:
        for entry in entries:
            self.add(entry)

    def use(self, entry: Entry, again: bool) -> None:
        pass

    def remove(self, entry: Entry) -> None:
        del self.held[entry.key]

    def evict(self, entry: Entry) -> None:
        self.remove(entry)


class Lru(Order):
    def use(self, entry: Entry, again: bool) -> None:
        self.held.move_to_end(entry.key)


class S3Fifo(Order):
    """A small queue of a tenth, a main queue, and a ghost queue (Yang et al., SOSP 2023)."""

    every_touch = True

    def __init__(self) -> None:
        super().__init__()
        self.small: OrderedDict[BlockKey, None] = OrderedDict()
        self.main: OrderedDict[BlockKey, None] = OrderedDict()
        self.ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self.uses: dict[BlockKey, int] = {}

    def recall(self, key: BlockKey) -> bool:
        return key in self.ghosts

    def add(self, entry: Entry) -> None:
        super().add(entry)
        self.uses[entry.key] = 0
        queue = self.main if entry.reused else self.small
        queue[entry.key] = None
        self.ghosts.pop(entry.key, None)

    def use(self, entry: Entry, again: bool) -> None:
        if again or self.every_touch:
            self.uses[entry.key] = min(3, self.uses[entry.key] + 1)

    def __iter__(self):
        while self.held:
            if self.small and (len(self.small) >= len(self.held) / 10 or not self.main):
                key = next(iter(self.small))
                if not self.uses[key]:
                    yield self.held[key]
                    return
                del self.small[key]
                self.uses[key] = 0
            else:
                key = next(iter(self.main))
                if not self.uses[key]:
                    yield self.held[key]
                    return
                self.main.move_to_end(key)
                self.uses[key] -= 1
                continue
            self.main[key] = None
            self.held[key].reused = True  # what continues it goes to the main queue, with chains

    def evict(self, entry: Entry) -> None:
        if entry.key in self.small:
            self.ghosts[entry.key] = None
            while len(self.ghosts) > len(self.held) * 0.9:
                self.ghosts.popitem(last=False)
        self.remove(entry)

    def remove(self, entry: Entry) -> None:
        super().remove(entry)
        self.small.pop(entry.key, None)
        self.main.pop(entry.key, None)
        del self.uses[entry.key]


class S3FifoAgain(S3Fifo):
    every_touch = False


class Arc(EvictionOrder):
    """As published: every touch counts, a request's own as well."""

    def use(self, entry: Entry, again: bool) -> None:
        super().use(entry, True)


class Clairvoyant(Order):
    """Knows the trace: what is asked for last goes first, of one chain the tail. No policy can
    be much better, and none can be it."""

    def __init__(self, trace: list[Request]) -> None:
        super().__init__()
        self.now = 0
        self.uses: dict[int, deque[tuple[int, int]]] = {}
        for i, request in enumerate(trace):
            for depth, block in enumerate(request.blocks[: request.num_prompt]):
                self.uses.setdefault(block, deque()).append((i, depth))
        self.next: dict[BlockKey, tuple[int, int]] = {}
        self.heap: list[tuple[int, int, BlockKey]] = []

    def add(self, entry: Entry) -> None:
        super().add(entry)
        self.use(entry, False)

    def use(self, entry: Entry, again: bool) -> None:
        uses = self.uses.get(int.from_bytes(entry.key.block_hash), deque())
        while uses and uses[0][0] <= self.now:
            uses.popleft()
        when, depth = uses[0] if uses else (1 << 60, 0)
        self.next[entry.key] = when, depth
        heapq.heappush(self.heap, (-when, -depth, entry.key))

    def __iter__(self):
        while self.heap:
            when, depth, key = self.heap[0]
            if key in self.held and self.next[key] == (-when, -depth):
                yield self.held[key]
                return
            heapq.heappop(self.heap)


POLICIES = {  # name: how to make it, and whether chains hand on that they were used again
    "LRU": (lambda trace: Lru(), False),
    "S3-FIFO": (lambda trace: S3Fifo(), False),
    "S3-FIFO, again": (lambda trace: S3FifoAgain(), False),
    "S3-FIFO, chains": (lambda trace: S3FifoAgain(), True),
    "ARC": (lambda trace: Arc(), False),
    "ARC, again": (lambda trace: EvictionOrder(), False),
    "ARC, chains": (lambda trace: EvictionOrder(), True),
    "clairvoyant": (Clairvoyant, True),
}


class Simulation:
    """One tier of `capacity` blocks under one policy."""

    def __init__(self, trace: list[Request], policy: str, capacity: int) -> None:
        make, self.chains = POLICIES[policy]
        self.trace = trace
        self.make = make
        self.order = make(trace)
        self.index = BlockIndex(self.order)
        self.capacity = capacity
        # Made once: half the time would go into making them.
        top = max(block for request in trace for block in request.blocks)
        self.keys = [BlockKey(BlockHash(n.to_bytes(32)), 0) for n in range(top + 1)]

    def run(self, restart_at: float | None = None) -> float:
        """Share of the prompts' tokens that were hit."""
        hit = total = 0
        for number, request in enumerate(self.trace):
            if restart_at is not None and number == int(restart_at * len(self.trace)):
                self.restart()
            if isinstance(self.order, Clairvoyant):
                self.order.now = number
            num_hit = self.serve(request, float(number))
            if number >= WARM_UP * len(self.trace):
                hit += num_hit
                total += request.num_prompt
        return hit / total

    def serve(self, request: Request, now: float) -> int:
        """Admission, commits from the root on, finish: as engine and manager do it."""
        keys = [self.keys[block] for block in request.blocks]
        index, num_hit = self.index, 0
        while num_hit < request.num_prompt - 1:  # at least one token is always computed
            if index.state(keys[num_hit]) is not BlockState.PRESENT:
                break
            num_hit += 1
        for key in reversed(keys[:num_hit]):
            index.touch(key, now, again=True)
        parent: BlockHash | None = keys[num_hit - 1].block_hash if num_hit else None
        for key in keys[num_hit:]:
            if not index.touch(key, now):
                self.store(key, parent if self.chains else None, now)
            parent = key.block_hash
        for key in reversed(keys):
            index.touch(key, now)
        return num_hit

    def store(self, key: BlockKey, parent: BlockHash | None, now: float) -> None:
        if len(self.index) >= self.capacity:
            victim = next(self.index.evictable())
            self.index.begin_evict(victim)
            self.index.forget(victim)
        entry = Entry(key, 1, recency=now)
        self.index.begin_save(entry, parent)
        self.index.publish(entry)

    def restart(self) -> None:
        """What a disk tier knows when it is opened: keys and times of last use."""
        found = [self.index.get(key) for key in self.index.present()]
        found.sort(key=lambda entry: entry.recency)
        self.order = self.make(self.trace)
        self.index = BlockIndex(self.order)
        self.index.adopt(FoundBlock(e.key, b"", b"", 1, e.recency) for e in found)


def table(
    mixes: list[tuple[Mix, float]], names: list[str], seeds: int, restart_at: float | None
) -> None:
    print("| chats | turns | spread | one-offs | tier |", " | ".join(names), "|")
    print("|" + "---|" * (5 + len(names)))
    for mix, size in mixes:
        shares: dict[str, list[float]] = {name: [] for name in names}
        for seed in range(1, seeds + 1):
            trace = make_trace(mix, seed)
            capacity = max(1, int(working_set(trace) * size))
            for name in names:
                shares[name].append(Simulation(trace, name, capacity).run(restart_at))
        cells = [f"{100 * statistics.mean(shares[name]):.1f}" for name in names]
        print(
            f"| {mix.conversations} | {mix.turns:g} | {mix.spread:g} | {mix.one_offs:.0%}",
            f"| {size:g} |",
            " | ".join(cells),
            "|",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, nargs="+", default=[40])
    parser.add_argument("--turns", type=float, nargs="+", default=[6])
    parser.add_argument("--spread", type=float, nargs="+", default=[1], help="of think times")
    parser.add_argument("--one-offs", type=float, nargs="+", default=[0, 0.1, 0.3])
    parser.add_argument("--size", type=float, nargs="+", default=[0.5, 1, 2])
    parser.add_argument("--requests", type=int, default=900, help="turns of chats in a trace")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--restart-at", type=float, help="restart after this share of a trace")
    args = parser.parse_args()
    mixes = [
        (Mix(conversations, turns, 60, spread, one_offs, args.requests), size)
        for conversations in args.conversations
        for turns in args.turns
        for spread in args.spread
        for one_offs in args.one_offs
        for size in args.size
    ]
    table(mixes, args.policies, args.seeds, args.restart_at)


if __name__ == "__main__":
    main()
