"""Ghost KV: device memory whose slots say which tokens they were computed from.

A forward pass over the ghost device writes, for the row at position p of a sequence, a digest of
everything that the KV there depends on: model, salt, and the tokens up to and including p. Copies
move these bytes through the real tiers, so one comparison tells whether a slot holds what its
owner, or the key it is filed under, claims.

    slot     digest of (group, model and salt, tokens[0..p]) 8 bytes | age 4 | unused 4
    block    block_size slots

`age` counts the complete cache resets before the pass: nothing older than the last one may be
findable afterwards. It is no part of the comparison.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from engine.block_hash import block_hash
from engine.outputs import TokenLogprobs
from engine.request import Request
from engine.sampler import DrawRun, Sampled, Unsampled
from engine.scheduler import ScheduledRequest
from engine.step import SequenceInput, StepInput, StepOutput
from engine.verification import verify
from offload.tier import BlockHash, BlockKey, BlockMeta

SLOT_BYTES = 16
VOCAB_SIZE = 5
STOP_ID = 4


class Truth:
    """What every slot ought to hold, what every key names, what the model says next."""

    def __init__(self, block_size: int, num_groups: int) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        self._digests: dict[tuple[bytes, int], bytes] = {}
        self._slots: dict[tuple[int, bytes], bytes] = {}
        self._named: dict[BlockHash, tuple[BlockMeta, tuple[bytes, ...]]] = {}
        self._origins: dict[str, bytes] = {}
        self.committed: set[BlockHash] = set()  # what some request was entitled to keep
        self._learnt: dict[tuple[BlockHash, tuple[int, ...]], BlockHash] = {}

    def digests(self, request: Request, token_ids: Sequence[int]) -> list[bytes]:
        """One per position of a sequence of `request`: of everything up to and including it."""
        digests: list[bytes] = []
        digest = self._origins[request.request_id]
        for token in token_ids:
            known = self._digests.get((digest, token))
            if known is None:
                known = hashlib.blake2b(digest + struct.pack("<I", token), digest_size=16).digest()
                self._digests[digest, token] = known
            digest = known
            digests.append(digest)
        return digests

    def slot(self, group: int, digest: bytes) -> bytes:
        """The digest part of a slot."""
        slot = self._slots.get((group, digest))
        if slot is None:
            slot = hashlib.blake2b(digest + bytes([group]), digest_size=8).digest()
            self._slots[group, digest] = slot
        return slot

    def next_token(self, digest: bytes) -> int:
        """What the target draws after the position of `digest`; STOP_ID now and then."""
        return digest[0] % 16 % VOCAB_SIZE if digest[1] % 8 else STOP_ID

    def admit(self, request: Request, origin: object) -> None:
        """`origin` is what tells the request's KV from that of equal tokens: model and salt."""
        self._origins[request.request_id] = repr(origin).encode()
        self.learn(request)

    def learn(self, request: Request) -> None:
        """From now on the keys of the request's full blocks have a meaning."""
        parent, token_ids = request.root_hash, request.token_ids
        digests = self.digests(request, token_ids)
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            tokens = tuple(token_ids[end - self.block_size : end])
            contents = self._contents(digests[end - self.block_size : end])
            known = self._learnt.get((parent, tokens))
            if known is None:
                known = self._learnt[parent, tokens] = block_hash(parent, tokens)
            named = self._named.setdefault(
                known, (BlockMeta(parent, tokens, request.root_hash), contents)
            )
            assert named[1] == contents, "one key names two contents"
            parent = known

    def commit(self, request: Request, num_tokens: int) -> None:
        """The KV of the first `num_tokens` of the request is computed and final."""
        parent = request.root_hash
        for end in range(self.block_size, num_tokens + 1, self.block_size):
            parent = self._learnt[parent, tuple(request.token_ids[end - self.block_size : end])]
            self.committed.add(parent)

    def _contents(self, digests: Sequence[bytes]) -> tuple[bytes, ...]:
        groups = range(self.num_groups)
        return tuple(b"".join(self.slot(group, d) for d in digests) for group in groups)

    def content(self, key: BlockKey) -> bytes:
        """The digest parts of the slots of the block that `key` names."""
        assert key.block_hash in self._named, "a key that no sequence ever had"
        return self._named[key.block_hash][1][key.group]

    def meta(self, key: BlockKey) -> BlockMeta:
        """What a stored block says of itself."""
        return self._named[key.block_hash][0]


def digest_parts(block: bytes | bytearray | memoryview) -> bytes:
    whole = bytes(block)
    return b"".join(whole[at : at + 8] for at in range(0, len(whole), SLOT_BYTES))


def ages(block: bytes | bytearray | memoryview) -> list[int]:
    whole = bytes(block)
    return [struct.unpack_from("<I", whole, at + 8)[0] for at in range(0, len(whole), SLOT_BYTES)]


class GhostDevice:
    """In place of `ModelRunner`: executes steps on ghost memory and asserts what a kernel cannot.

    `windows[g]` is the attention span of group g, None for full attention.
    """

    def __init__(self, truth: Truth, num_blocks: int, windows: Sequence[int | None]) -> None:
        self.truth = truth
        self.windows = windows
        self.memory = [bytearray(truth.block_size * SLOT_BYTES) for _ in range(num_blocks)]
        self.age = 0
        self.fail_next = False
        self.num_rows = 0
        self.num_copies = 0

    def holds(self, group: int, table: Sequence[int], position: int, digest: bytes) -> bool:
        """Whether the slot that `table` gives for `position` holds the KV of `digest`."""
        block_id = table[position // self.truth.block_size]
        if block_id < 0:
            return False
        at = position % self.truth.block_size * SLOT_BYTES
        slot = self.memory[block_id][at : at + 8]
        return bytes(slot) == self.truth.slot(group, digest)

    def first_seen(self, group: int, position: int) -> int:
        """The first position that the row at `position` attends to."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def copy(self, step: StepInput) -> None:
        """Out of the device before into it, each block compared with what its key names."""
        for out in step.copies_out:
            block = self.memory[out.block_id]
            assert digest_parts(block) == self.truth.content(out.key), "saved under a wrong key"
            for destination in out.destinations:
                destination[:] = block
            self.num_copies += 1
        for copy in step.copies_in:
            assert digest_parts(copy.source) == self.truth.content(copy.key), "a wrong load"
            self.memory[copy.block_id][:] = copy.source
            self.num_copies += 1

    def forward(self, step: StepInput, plan: Sequence[ScheduledRequest]) -> StepOutput:
        """One pass: every row is written, then every row reads what it attends to.

        `plan[i]` is what sequence i of the step was made from.
        """
        if self.fail_next:
            self.fail_next = False
            return StepOutput(error=RuntimeError("planted"))
        work = []
        for sequence, scheduled in zip(step.sequences, plan, strict=True):
            request = scheduled.request
            before = request.token_ids[: sequence.start]
            digests = self.truth.digests(request, [*before, *sequence.token_ids])
            work.append((sequence, tables_of(sequence), digests))
        written: set[tuple[int, int]] = set()
        for sequence, tables, digests in work:
            self._write(sequence, tables, digests, written)
        draws, prompt = [], []
        for sequence, tables, digests in work:
            self._read(sequence, tables, digests)
            draws.append(self._draws(sequence.run, digests))
            wanted = sequence.prompt_logprobs
            next_ids = wanted.next_ids if wanted is not None else ()
            prompt.append([TokenLogprobs(token_id, 0.0, 1) for token_id in next_ids])
        return StepOutput(draws, prompt, seconds=0.001)

    def _draws(self, run: DrawRun | None, digests: Sequence[bytes]) -> list[Sampled | Unsampled]:
        if run is None:
            return []
        drawn_after = digests[len(digests) - run.num_rows :]

        def draw(num_accepted: int) -> Sampled | Unsampled:
            return Sampled(self.truth.next_token(drawn_after[num_accepted]), None)

        return verify(run.draft_token_ids, draw)

    def _write(
        self,
        sequence: SequenceInput,
        tables: Sequence[Sequence[int]],
        digests: Sequence[bytes],
        written: set[tuple[int, int]],
    ) -> None:
        self.num_rows += len(sequence.token_ids)
        for group, table in enumerate(tables):
            for position in range(sequence.start, len(digests)):
                index, offset = divmod(position, self.truth.block_size)
                block_id = table[index]
                assert block_id >= 0, "a row without a slot"
                assert (block_id, offset) not in written, "two rows of one pass share a slot"
                written.add((block_id, offset))
                at = offset * SLOT_BYTES
                slot = self.truth.slot(group, digests[position]) + struct.pack("<II", self.age, 0)
                self.memory[block_id][at : at + SLOT_BYTES] = slot

    def _read(
        self, sequence: SequenceInput, tables: Sequence[Sequence[int]], digests: Sequence[bytes]
    ) -> None:
        for group, table in enumerate(tables):
            for position in range(self.first_seen(group, sequence.start), len(digests)):
                assert self.holds(group, table, position, digests[position]), (
                    f"a row of group {group} from {sequence.start} on attends to position"
                    f" {position}, which holds another sequence's KV or none"
                )


def tables_of(sequence: SequenceInput) -> list[Sequence[int]]:
    """The block table of each group that the runner is told to use."""
    return list(sequence.block_tables)
