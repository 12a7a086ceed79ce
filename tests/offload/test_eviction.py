"""Which block goes first: one-off prompts before chats, tails before roots, left branches first."""

from __future__ import annotations

from collections.abc import Iterable

from offload.block_index import BlockIndex
from offload.eviction import EvictionOrder
from offload.tier import BlockState, Entry, FoundBlock
from tests.offload.harness import key


class Cache:
    """An index that holds `capacity` blocks of one byte; blocks are numbers."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order = EvictionOrder()
        self.index = BlockIndex(self.order)
        self.numbers = {key(number): number for number in range(2000)}

    def store(self, number: int, parent: int | None = None) -> None:
        if len(self.index) >= self.capacity:
            victim = next(self.index.evictable())
            self.index.begin_evict(victim)
            self.index.forget(victim)
        entry = Entry(key(number), 1)
        self.index.begin_save(entry, None if parent is None else key(parent).block_hash)
        self.index.publish(entry)
        self.index.check()

    def store_chain(self, numbers: Iterable[int]) -> None:
        """What one request does: commits from the root, and at its end a touch from the tail."""
        numbers, parent = list(numbers), None
        for number in numbers:
            if self.index.state(key(number)) is BlockState.ABSENT:
                self.store(number, parent)
            parent = number
        self.touch(numbers)

    def touch(self, numbers: Iterable[int], again: bool = False) -> None:
        for number in reversed(list(numbers)):
            self.index.touch(key(number), 1.0, again)

    def order_of_eviction(self) -> list[int]:
        return [self.numbers[entry.key] for entry in self.index.evictable()]


def test_what_nobody_asks_for_again_goes_by_recency_and_tail_first() -> None:
    cache = Cache(6)
    cache.store_chain(range(3))
    cache.store_chain(range(10, 13))
    assert cache.order_of_eviction() == [2, 1, 0, 12, 11, 10]
    cache.touch(range(3))
    assert cache.order_of_eviction() == [12, 11, 10, 2, 1, 0]


def test_long_prompts_push_out_each_other_and_not_a_chat() -> None:
    cache = Cache(20)
    cache.store_chain(range(8))
    cache.touch(range(8), again=True)  # its second turn
    for prompt in range(100, 1100, 50):
        cache.store_chain(range(prompt, prompt + 50))
    held = {number for number in range(8) if cache.index.state(key(number)) is BlockState.PRESENT}
    assert held == set(range(8))
    assert len(cache.index) == 20


def test_a_request_touching_what_it_stored_has_not_used_it_again() -> None:
    cache = Cache(8)
    cache.store_chain(range(4))
    cache.touch(range(4))
    cache.store_chain(range(10, 18))
    assert set(cache.order_of_eviction()) == set(range(10, 18))


def test_what_continues_a_chat_belongs_to_it_at_once() -> None:
    cache = Cache(10)
    cache.store_chain(range(3))
    cache.touch(range(3), again=True)
    cache.store_chain(range(6))  # nobody has asked for the last three yet
    cache.store_chain(range(100, 150))
    kept = [number for number in cache.order_of_eviction() if number < 100]
    assert kept == [5, 4, 3, 2, 1, 0]
    other = Cache(10)
    other.store_chain(range(3))
    other.store_chain(range(6))  # no later request has found the first three
    other.store_chain(range(100, 150))
    assert min(other.order_of_eviction()) == 140


def test_a_chain_hands_on_what_it_is_while_it_is_being_saved() -> None:
    index = BlockIndex()
    first = Entry(key(1), 1, reused=True)  # a promotion, not yet there
    second = Entry(key(2), 1)
    index.begin_save(first)
    index.begin_save(second, key(1).block_hash)
    window = Entry(key(3, group=1), 1)  # of which the block before is not stored
    index.begin_save(window, key(2).block_hash)
    stranger = Entry(key(4), 1)
    index.begin_save(stranger, key(9).block_hash)
    assert (second.reused, window.reused, stranger.reused) == (True, True, False)


def test_a_block_that_comes_back_says_which_list_was_too_short() -> None:
    cache = Cache(4)
    cache.store_chain([0, 1])
    cache.touch([0, 1], again=True)
    cache.store_chain([2, 3])
    cache.store(4)  # evicts 3, which is remembered
    assert cache.order_of_eviction() == [2, 4, 1, 0]
    cache.store(3)  # evicts 2; 3 was evicted too early: it counts as used again from now on
    assert cache.order._target == 1.0
    # Now `once` may keep one block, so the others give up theirs first.
    assert cache.order_of_eviction() == [1, 0, 3, 4]
    cache.store(5)  # evicts 1 from the chats
    assert cache.order_of_eviction() == [4, 0, 3, 5]
    cache.store(1)  # evicts 4; that was the wrong list
    assert cache.order._target == 0.0
    assert cache.order_of_eviction() == [5, 0, 3, 1]


def test_what_is_remembered_is_bounded_by_what_is_held() -> None:
    cache = Cache(10)
    cache.store_chain(range(5))
    cache.touch(range(5), again=True)
    for number in range(100, 400):
        cache.store(number)
        assert len(cache.order._once_ghosts) <= 10 - len(cache.order._once) + 1
        assert len(cache.order._once_ghosts) + len(cache.order._again_ghosts) <= 10
    assert len(cache.order._once_ghosts) == 6


def test_a_left_branch_goes_first_and_its_tail_before_all() -> None:
    cache = Cache(9)
    cache.store_chain(range(3))
    cache.touch(range(3), again=True)
    cache.store_chain(range(6))
    cache.store_chain(range(10, 13))
    for number in (5, 4):
        cache.index.age(key(number))
    assert cache.order_of_eviction() == [5, 4, 12, 11, 10, 3, 2, 1, 0]
    assert cache.index.get(key(4)).superseded
    cache.touch([4])  # the conversation has gone back to it
    assert cache.order_of_eviction() == [5, 12, 11, 10, 3, 2, 1, 0, 4]
    assert not cache.index.get(key(4)).superseded
    cache.store(20)
    assert not cache.order.recall(key(5))  # nothing is learnt from a branch that was left
    cache.index.check()


def test_what_could_not_be_removed_is_next_and_no_ghost() -> None:
    cache = Cache(9)
    cache.store_chain(range(3))
    entry = cache.index.get(key(0))
    cache.index.begin_evict(entry)
    cache.index.restore(entry)
    assert cache.order_of_eviction() == [0, 2, 1]
    assert not cache.order.recall(key(0))


def test_after_a_restart_recency_decides_until_something_is_used_again() -> None:
    cache = Cache(4)
    cache.index.adopt(FoundBlock(key(number), b"", b"", 1, number) for number in range(4))
    assert cache.order_of_eviction() == [0, 1, 2, 3]
    cache.touch([0, 1], again=True)
    cache.store_chain(range(10, 20))
    assert cache.order_of_eviction()[-2:] == [1, 0]
    cache.index.check()


def test_a_reset_forgets_what_was_evicted_too() -> None:
    cache = Cache(2)
    cache.store_chain(range(10))
    cache.index.clear()
    assert not any(cache.order.recall(key(number)) for number in range(10))
    assert (len(cache.order), cache.order._target) == (0, 0.0)
    cache.index.check()
