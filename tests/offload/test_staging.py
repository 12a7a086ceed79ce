"""A quarter of the staging is kept for loads."""

from __future__ import annotations

import pytest

from offload.staging import Staging


@pytest.mark.parametrize(("buffers", "for_saves"), [(2, 1), (3, 2), (8, 6), (100, 75)])
def test_saves_never_take_what_is_kept_for_loads(buffers: int, for_saves: int) -> None:
    staging = Staging(buffers * 4096 + 100, 4096)
    assert staging.num_buffers == staging.num_free == buffers
    taken = []
    while (buffer := staging.take_for_save()) is not None:
        taken.append(buffer)
    assert len(taken) == for_saves
    while (buffer := staging.take_for_load()) is not None:
        taken.append(buffer)
    assert sorted(taken) == list(range(buffers))
    staging.give_back(taken[0])
    assert staging.take_for_save() is None
    assert staging.take_for_load() == taken[0]


def test_there_are_at_least_two() -> None:
    assert Staging(0, 4096).num_buffers == 2


def test_buffers_do_not_overlap() -> None:
    staging = Staging(3 * 4096, 4096)
    for buffer in range(3):
        staging.view(buffer)[:] = bytes([buffer]) * 4096
    assert [bytes(staging.view(buffer)) for buffer in range(3)] == [
        bytes([buffer]) * 4096 for buffer in range(3)
    ]


def test_a_buffer_comes_back_once() -> None:
    staging = Staging(2 * 4096, 4096)
    buffer = staging.take_for_load()
    assert buffer is not None
    staging.give_back(buffer)
    with pytest.raises(ValueError, match="twice"):
        staging.give_back(buffer)
