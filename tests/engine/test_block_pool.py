"""The block pool: references, the prefix map, and who is evicted first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from offload.tier import BlockHash, BlockKey, Forget

ROOT = BlockHash(b"r" * 32)
OTHER_ROOT = BlockHash(b"o" * 32)


def key(number: int) -> BlockKey:
    return BlockKey(BlockHash(number.to_bytes(32, "big")), 0)


@pytest.fixture
def evicted() -> list[BlockKey]:
    return []


def make_pool(num_blocks: int, evicted: list[BlockKey]) -> BlockPool:
    return BlockPool(num_blocks, on_evict=evicted.append)


def cached_block(pool: BlockPool, number: int) -> int:
    block_id = pool.allocate()
    assert pool.register(key(number), block_id, ROOT)
    pool.release(block_id)
    return block_id


def test_a_released_block_is_found_until_it_is_needed(evicted: list[BlockKey]) -> None:
    pool = make_pool(2, evicted)
    first = cached_block(pool, 1)
    assert pool.lookup(key(1)) == first
    assert pool.num_available == 2
    pool.allocate()  # the meaningless block goes first
    assert pool.lookup(key(1)) == first
    assert evicted == []
    assert pool.allocate() == first
    assert pool.lookup(key(1)) is None
    assert evicted == [key(1)]
    with pytest.raises(IndexError):
        pool.allocate()


def test_least_recently_released_goes_first(evicted: list[BlockKey]) -> None:
    pool = make_pool(3, evicted)
    blocks = [cached_block(pool, number) for number in (1, 2, 3)]
    pool.reference(blocks[0])  # a hit makes it recent again
    pool.release(blocks[0])
    for _ in range(3):
        pool.allocate()
    assert evicted == [key(2), key(3), key(1)]


def test_a_released_block_without_meaning_goes_before_every_cached_one(
    evicted: list[BlockKey],
) -> None:
    pool = make_pool(2, evicted)
    block = pool.allocate()
    cached_block(pool, 1)
    pool.release(block)  # released last, and still the first to go
    assert pool.allocate() == block
    assert evicted == []


def test_a_referenced_block_is_never_handed_out(evicted: list[BlockKey]) -> None:
    pool = make_pool(2, evicted)
    block = cached_block(pool, 1)
    pool.reference(block)
    assert pool.allocate() != block
    with pytest.raises(IndexError):
        pool.allocate()
    assert evicted == []


def test_one_key_has_one_block(evicted: list[BlockKey]) -> None:
    pool = make_pool(2, evicted)
    first, second = pool.allocate(), pool.allocate()
    assert pool.register(key(1), first, ROOT)
    assert not pool.register(key(1), second, ROOT)
    assert pool.lookup(key(1)) == first
    assert pool.known() == [key(1)]
    pool.release(second)
    assert pool.allocate() == second
    assert evicted == []


def test_reset_forgets_but_frees_nothing_referenced(evicted: list[BlockKey]) -> None:
    pool = make_pool(3, evicted)
    kept = pool.allocate()
    pool.register(key(1), kept, ROOT)
    cached_block(pool, 2)
    assert pool.reset() == 2
    assert pool.lookup(key(1)) is None
    assert pool.lookup(key(2)) is None
    assert pool.num_available == 2
    assert set(evicted) == {key(1), key(2)}
    pool.release(kept)
    pool.check()
    assert pool.num_available == 3


def test_releasing_too_often_is_an_error(evicted: list[BlockKey]) -> None:
    pool = make_pool(1, evicted)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(block)


def test_check_finds_a_leak(evicted: list[BlockKey]) -> None:
    pool = make_pool(2, evicted)
    block = pool.allocate()
    pool._free[block] = None
    with pytest.raises(AssertionError, match="misfiled"):
        pool.check()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("arfRx"), st.integers(0, 7)), max_size=80))
def test_against_a_model(operations: list[tuple[str, int]]) -> None:
    """Random operations against two dicts: references and the prefix map."""
    evicted: list[BlockKey] = []
    pool = make_pool(4, evicted)
    held: list[int] = []
    known: dict[BlockKey, int] = {}
    for verb, number in operations:
        if verb == "a" and pool.num_available:
            block = pool.allocate()
            assert block not in held
            known = {k: b for k, b in known.items() if b != block}
            held.append(block)
        elif verb == "r" and held:
            block = held[number % len(held)]
            if block not in known.values():
                fresh = key(number) not in known
                assert pool.register(key(number), block, ROOT) is fresh
                known.setdefault(key(number), block)
        elif verb == "f" and held:
            pool.release(held.pop(number % len(held)))
        elif verb == "R" and key(number) in known:
            pool.reference(known[key(number)])
            held.append(known[key(number)])
        elif verb == "x" and number == 0:
            assert pool.reset() == len(known)
            known = {}
        pool.check()
        assert pool.num_available == 4 - len(set(held))
        for number_ in range(8):
            assert pool.lookup(key(number_)) == known.get(key(number_))


def test_cold_blocks_go_after_free_ones_and_before_all_others(evicted: list[BlockKey]) -> None:
    pool = make_pool(4, evicted)
    blocks = [pool.allocate() for _ in range(3)]
    keys = [key(number) for number in range(3)]
    for name, block in zip(keys, blocks, strict=True):
        pool.register(name, block, ROOT)
    pool.release(blocks[0])
    pool.release(blocks[1], cold=True)
    pool.release(blocks[2])
    pool.demote(blocks[2])
    for expected in ([], [keys[1]], [keys[1], keys[2]], [keys[1], keys[2], keys[0]]):
        pool.allocate()
        assert evicted == expected
    pool.check()


def test_a_demoted_block_that_is_referenced_stays_where_it_is(evicted: list[BlockKey]) -> None:
    pool = make_pool(2, evicted)
    block = pool.allocate()
    pool.register(key(1), block, ROOT)
    pool.demote(block)
    pool.check()
    pool.release(block)
    pool.allocate()
    assert evicted == []


def test_forgetting_a_block_frees_its_memory_first(evicted: list[BlockKey]) -> None:
    pool = make_pool(2, evicted)
    block = pool.allocate()
    pool.register(key(1), block, ROOT)
    assert pool.forget(block)
    assert not pool.forget(block)
    pool.check()
    pool.release(block)
    assert pool.lookup(key(1)) is None
    assert evicted == [key(1)]


def test_a_reset_takes_out_a_root_or_some_keys_and_nothing_else(evicted: list[BlockKey]) -> None:
    dropped: list[BlockKey] = []
    pool = BlockPool(4, on_evict=evicted.append, on_reset=dropped.append)
    for number, root in ((1, ROOT), (2, OTHER_ROOT), (3, ROOT), (4, OTHER_ROOT)):
        block_id = pool.allocate()
        pool.register(key(number), block_id, root)
        pool.release(block_id)
    assert pool.reset(Forget(roots=frozenset((OTHER_ROOT,)))) == 2
    assert [pool.lookup(key(n)) is None for n in (1, 2, 3, 4)] == [False, True, False, True]
    assert pool.reset(Forget(keys=frozenset((key(3), key(4))))) == 1
    assert dropped == [key(2), key(4), key(3)]
    assert pool.reset() == 1
    assert evicted == []
    pool.check()
