"""Conversations: the chain of the last turn, and what a new turn supersedes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from engine.block_hash import chain_hashes
from engine.sessions import MAX_ASIDE_BLOCKS, TABLE, Session, Sessions
from offload.side_store import SideStore
from offload.tier import BlockHash
from tests.engine.ghost_engine import GhostEngine, Shape

SPACE = BlockHash(b"s" * 32)
OTHER = BlockHash(b"o" * 32)


def chain(*names: object) -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(str(name).encode()).digest()) for name in names]


@pytest.fixture
def store() -> SideStore:
    return SideStore.open(None, max_bytes=1 << 22)


@pytest.fixture
def sessions(store: SideStore) -> Sessions:
    return Sessions(store)


def test_an_unknown_key_has_nothing(sessions: Sessions) -> None:
    assert sessions.get(SPACE, "k") == Session()
    assert sessions.superseded(SPACE, "k", chain(1, 2)) == ()


def test_a_turn_that_goes_on_supersedes_nothing(sessions: Sessions) -> None:
    sessions.record(SPACE, "k", chain(1, 2, 3))
    assert sessions.superseded(SPACE, "k", chain(1, 2, 3, 4, 5)) == ()
    sessions.record(SPACE, "k", chain(1, 2, 3, 4, 5))
    assert sessions.get(SPACE, "k") == Session(tuple(chain(1, 2, 3, 4, 5)))


def test_a_new_branch_supersedes_what_is_behind_the_fork(sessions: Sessions) -> None:
    sessions.record(SPACE, "k", chain(1, 2, 3, 4))
    assert sessions.superseded(SPACE, "k", chain(1, 2, 5)) == tuple(chain(3, 4))
    sessions.record(SPACE, "k", chain(1, 2, 5, 6))
    assert sessions.get(SPACE, "k") == Session(tuple(chain(1, 2, 5, 6)), tuple(chain(3, 4)))


def test_a_branch_that_is_taken_up_again_is_not_aside(sessions: Sessions) -> None:
    sessions.record(SPACE, "k", chain(1, 2, 3))
    sessions.record(SPACE, "k", chain(1, 4))
    sessions.record(SPACE, "k", chain(1, 2, 3, 5))
    assert sessions.get(SPACE, "k") == Session(tuple(chain(1, 2, 3, 5)), tuple(chain(4)))


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_a_turn_that_got_no_further_than_the_last_one_changes_nothing(
    sessions: Sessions, length: int
) -> None:
    """An aborted retry must not lose the chain that the next turn continues."""
    sessions.record(SPACE, "k", chain(1, 2, 3))
    sessions.record(SPACE, "k", chain(1, 2, 3)[:length])
    assert sessions.get(SPACE, "k") == Session(tuple(chain(1, 2, 3)))


def test_keys_live_in_the_space_of_their_salt(sessions: Sessions) -> None:
    sessions.record(SPACE, "k", chain(1))
    sessions.record(OTHER, "k", chain(2))
    sessions.record(SPACE, "l", chain(3))
    assert sessions.get(SPACE, "k").chain == tuple(chain(1))
    assert sessions.get(OTHER, "k").chain == tuple(chain(2))
    sessions.forget(SPACE, "k")
    assert sessions.get(SPACE, "k") == Session()
    assert sessions.get(OTHER, "k").chain == tuple(chain(2))
    assert sessions.get(SPACE, "l").chain == tuple(chain(3))


def test_what_is_aside_is_bounded_and_the_latest_stays(sessions: Sessions) -> None:
    sessions.record(SPACE, "k", chain(*range(MAX_ASIDE_BLOCKS)))
    sessions.record(SPACE, "k", chain("a", "b"))
    sessions.record(SPACE, "k", chain("c"))
    aside = sessions.get(SPACE, "k").aside
    assert len(aside) == MAX_ASIDE_BLOCKS
    assert list(aside[-2:]) == chain("a", "b")
    assert list(aside[:1]) == chain(2)


@pytest.mark.parametrize("value", [b"", b"abc", b"\0" * 36 + b"x"])
def test_a_record_that_is_not_ours_is_no_session(
    sessions: Sessions, store: SideStore, value: bytes
) -> None:
    sessions.record(SPACE, "k", chain(1))
    [(name, _)] = store.items(TABLE, SPACE)
    store.put(TABLE, SPACE, name, value)
    assert sessions.get(SPACE, "k") == Session()


def test_a_key_of_any_size_costs_the_same(sessions: Sessions, store: SideStore) -> None:
    sessions.record(SPACE, "k" * 1_000_000, chain(1))
    [(name, value)] = store.items(TABLE, SPACE)
    assert (len(name), len(value)) == (32, 36)


def test_what_was_computed_ahead_supersedes_nothing(sessions: Sessions) -> None:
    sessions.foresee(SPACE, "k", chain(1, 2))
    assert sessions.get(SPACE, "k") == Session(tuple(chain(1, 2)))
    sessions.foresee(SPACE, "k", chain(1, 2, 3))
    sessions.foresee(SPACE, "k", chain(1))
    assert sessions.get(SPACE, "k") == Session(tuple(chain(1, 2, 3)))
    sessions.foresee(SPACE, "k", chain(1, 4, 5))
    assert sessions.get(SPACE, "k") == Session(tuple(chain(1, 2, 3)), tuple(chain(4, 5)))


def test_a_turn_that_ends_while_it_is_preempted_leaves_what_it_had_committed(
    tmp_path: Path,
) -> None:
    ghost = GhostEngine(Shape(), tmp_path)
    told = ghost.arrive(list(range(9)), 4)
    request = told.request
    ghost.core._live[request.request_id].cache_key = "k"
    ghost.step()
    ghost.scheduler._preempt(request)
    assert request.num_computed_tokens == 0
    ghost.core.abort(request.request_id)
    left = ghost.core._sessions.get(request.root_hash, "k").chain
    assert left == tuple(chain_hashes(request.root_hash, range(9), 4)[:2])
    ghost.close()
