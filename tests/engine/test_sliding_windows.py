"""Window groups: what they hold, store and can be asked for. Planning alone, with a CPU tier."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from engine.kv_cache_manager import KVCacheManager
from engine.kv_groups import KVGroup, group_layers, max_blocks_held, required_blocks
from engine.request import NO_BLOCK, Request
from engine.scheduler import Scheduler, SchedulerLimits
from offload.cpu_tier import CpuTier
from offload.manager import OffloadManager
from tests.engine.planning import BLOCK_SIZE, make_request, run_pass, run_to_end, settle

BLOCK_BYTES = 64
WINDOW = 10
INTERLEAVED = (KVGroup(0, WINDOW, (0, 1)), KVGroup(1, None, (2, 5)), KVGroup(2, WINDOW, (3, 4)))
TWO_WINDOWS = (KVGroup(0, 6, (0,)), KVGroup(1, WINDOW, (1,)))


def make(
    groups: tuple[KVGroup, ...], num_blocks: int = 256, budget: int = 16, **fields: bool
) -> Scheduler:
    cpu = CpuTier(4096 * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    offload = OffloadManager([cpu], block_bytes=BLOCK_BYTES)
    kv = KVCacheManager(num_blocks, BLOCK_SIZE, offload, groups=groups, **fields)
    return Scheduler(SchedulerLimits(8, budget), kv)


def serve(scheduler: Scheduler, request: Request, *, evicted: bool = True) -> int:
    """Run to the end, loads and saves included; cached tokens. `evicted`: from the tier alone."""
    if evicted:
        scheduler.kv.reset([])
    scheduler.add(request)
    while scheduler.live():
        plan = scheduler.schedule()
        assert plan or request.pending_loads, "nothing to do"
        run_pass(scheduler, plan)
        settle(scheduler)
    scheduler.kv.check([])
    return request.cached.total


def floor(num_tokens: int) -> int:
    return num_tokens // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("groups", [INTERLEAVED, TWO_WINDOWS, (KVGroup(0, WINDOW, (0,)),)])
@pytest.mark.parametrize("budget", [3, 16])
def test_every_prompt_length_hits_what_was_stored(groups: tuple[KVGroup, ...], budget: int) -> None:
    """Replayed, gone on from, and gone on from its answer: always to the last block there is."""
    scheduler = make(groups, budget=budget)
    for num_prompt in range(1, 4 * WINDOW + 1):
        first = make_request(num_prompt, max_tokens=5)
        prompt = list(first.prompt_token_ids)
        assert serve(scheduler, first) == 0
        assert serve(scheduler, make_request(prompt, max_tokens=1)) == floor(num_prompt - 1)
        assert serve(scheduler, make_request([*prompt, 1], max_tokens=1)) == floor(num_prompt)
        again = make_request([*first.token_ids, 1, 2], max_tokens=1)
        assert serve(scheduler, again) == floor(num_prompt + 4)


@pytest.mark.parametrize("num_output", range(1, 14))
def test_an_answer_is_stored_up_to_its_committed_length(num_output: int) -> None:
    scheduler = make(INTERLEAVED)
    first = make_request(23, max_tokens=num_output)
    serve(scheduler, first)
    replay = make_request([*first.token_ids, 1, 2, 3, 4], max_tokens=1)
    assert serve(scheduler, replay) == floor(23 + num_output - 1)


def test_blocks_that_slid_out_are_free_while_the_request_runs() -> None:
    """Full group 25 blocks; each window group the three blocks that 10 positions can touch."""
    scheduler = make(INTERLEAVED)
    request = make_request(100, max_tokens=20)
    scheduler.add(request)
    most = 0
    while scheduler.live():
        run_pass(scheduler, scheduler.schedule())
        for group in INTERLEAVED:
            held = [b for b in (request.block_tables or [[]] * 3)[group.index] if b != NO_BLOCK]
            if group.window is not None:
                most = max(most, len(held))
    # Before it slides, a prompt's chunk of 16 rows has four blocks more.
    assert most == 4
    assert max_blocks_held(INTERLEAVED[0], 120, BLOCK_SIZE) == 5


def test_a_prompt_far_larger_than_the_pool_has_windows_for_is_computed() -> None:
    """Only the windows are held: 200 positions through a pool of 6 blocks."""
    scheduler = make((KVGroup(0, WINDOW, (0,)),), num_blocks=6)
    assert scheduler.kv.capacity_tokens(10_000) == 10_000
    request = make_request(200, max_tokens=3)
    scheduler.add(request)
    run_to_end(scheduler)
    assert request.num_output_tokens == 3


def test_several_windowed_prompts_share_a_pool_that_holds_one() -> None:
    scheduler = make((KVGroup(0, WINDOW, (0,)),), num_blocks=6)
    requests = [make_request(60, max_tokens=12) for _ in range(4)]
    for request in requests:
        scheduler.add(request)
    run_to_end(scheduler)
    assert [request.num_output_tokens for request in requests] == [12] * 4
    assert scheduler.kv.pool.num_available == 6


def test_capacity_counts_every_group() -> None:
    """10 blocks: two windows of at most 5, and what is left for the full group."""
    kv = make(INTERLEAVED, num_blocks=30).kv
    assert kv.capacity_tokens(10_000) == (30 - 5 - 5) * BLOCK_SIZE
    assert kv.capacity_tokens(50) == 50
    assert make(INTERLEAVED, num_blocks=6).kv.capacity_tokens(10_000) == 2 * BLOCK_SIZE


def test_a_window_group_stores_only_what_can_be_asked_for() -> None:
    """Prompt 40 at block 4: its end and a replay's end need blocks 6..9, the answer's end 8..10."""
    scheduler = make(INTERLEAVED)
    serve(scheduler, make_request(40, max_tokens=6))
    stats = scheduler.kv.offload.stats()["cpu"]
    full, window = 11, len({6, 7, 8, 9} | {8, 9, 10})
    assert stats.saved_blocks == full + 2 * window


def test_an_aborted_prompt_is_stored_up_to_where_it_got() -> None:
    """Judged anew at the abort: the prompt's end, for which chunks were judged, never came."""
    scheduler = make(INTERLEAVED, budget=16)
    request = make_request(100, max_tokens=4)
    scheduler.add(request)
    for _ in range(3):
        run_pass(scheduler, scheduler.schedule())
    scheduler.finish(request)
    settle(scheduler)
    assert serve(scheduler, make_request(list(request.prompt_token_ids), max_tokens=1)) == 48


def test_a_preempted_request_resumes_from_the_tier() -> None:
    scheduler = make(INTERLEAVED)
    request = make_request(30, max_tokens=30)
    scheduler.add(request)
    for _ in range(12):
        run_pass(scheduler, scheduler.schedule())
    committed = request.num_tokens - 1
    scheduler._preempt(request)
    settle(scheduler)
    scheduler.kv.reset([])
    assert scheduler.kv.match(request).num_held == committed // BLOCK_SIZE


def test_where_prefixes_part_is_learned_from_the_first_that_parts() -> None:
    """Nobody knew that others would leave the first one's prompt at 41: the second computes its
    windows there again, and stores them for everyone after it."""
    scheduler = make(INTERLEAVED)
    shared = list(range(41))
    serve(scheduler, make_request([*shared, *range(500, 560)], max_tokens=1))
    assert serve(scheduler, make_request([*shared, *range(600, 660)], max_tokens=1)) == 0
    assert serve(scheduler, make_request([*shared, *range(700, 760)], max_tokens=1)) == 40


def test_on_the_device_a_parted_prefix_hits_while_its_windows_are_there() -> None:
    scheduler = make(INTERLEAVED, num_blocks=256)
    shared = list(range(41))
    serve(scheduler, make_request([*shared, *range(500, 560)], max_tokens=1))
    other = make_request([*shared, *range(600, 660)], max_tokens=1)
    assert serve(scheduler, other, evicted=False) == 40


def test_what_slid_out_goes_before_everything_that_can_be_asked_for() -> None:
    scheduler = make((KVGroup(0, WINDOW, (0,)),), num_blocks=16)
    prompt = list(range(41))
    serve(scheduler, make_request(prompt, max_tokens=1))  # 10 blocks: 6 cold, 4 reachable
    serve(scheduler, make_request(9, max_tokens=1), evicted=False)
    for _ in range(2):
        filler = make_request(17, max_tokens=1)
        assert serve(scheduler, filler, evicted=False) == 0
    assert scheduler.kv.match(make_request(prompt, max_tokens=1)).num_device == 10


def test_prompt_only_stores_the_prompts_blocks_of_every_group() -> None:
    scheduler = make(INTERLEAVED, offload_prompt_only=True)
    first = make_request(40, max_tokens=20)
    serve(scheduler, first)
    assert scheduler.kv.offload.stats()["cpu"].saved_blocks == 10 + 2 * 4
    replay = make_request([*first.token_ids, 1], max_tokens=1)
    assert serve(scheduler, replay) == 40


def test_a_later_prompt_stores_what_an_earlier_answer_did_not() -> None:
    """With prompts alone offloaded, the first answer comes to the tier as the second's prompt."""
    scheduler = make((KVGroup(0),), offload_prompt_only=True)
    first = make_request(16, max_tokens=20)
    serve(scheduler, first)
    assert scheduler.kv.offload.stats()["cpu"].saved_blocks == 4
    second = make_request([*first.token_ids, 1], max_tokens=1)
    assert serve(scheduler, second, evicted=False) == floor(35)
    assert scheduler.kv.offload.stats()["cpu"].saved_blocks == len(second.prompt_token_ids) // 4


def test_a_reset_tier_does_not_get_back_what_lies_on_the_device() -> None:
    """Hits are offered again for what they make worth storing, not past a reset."""
    scheduler = make(INTERLEAVED)
    prompt = list(range(40))
    serve(scheduler, make_request(prompt, max_tokens=1))
    saved = scheduler.kv.offload.stats()["cpu"].saved_blocks
    asyncio.run(scheduler.kv.offload.reset(["cpu"]))
    assert serve(scheduler, make_request(prompt, max_tokens=1), evicted=False) == 36
    stats = scheduler.kv.offload.stats()["cpu"]
    assert (stats.saved_blocks, stats.blocks) == (saved, 0)


@pytest.mark.parametrize(
    ("window", "num_tokens", "expected"),
    [
        (None, 0, []),
        (None, 12, [0, 1, 2]),
        (4, 12, [2]),  # positions 9..11
        (5, 12, [2]),  # positions 8..11
        (6, 12, [1, 2]),  # positions 7..11
        (100, 12, [0, 1, 2]),
        (1, 12, []),  # a position sees itself alone
    ],
)
def test_required_blocks(window: int | None, num_tokens: int, expected: list[int]) -> None:
    assert list(required_blocks(KVGroup(0, window), num_tokens, 4)) == expected


def test_a_hit_ends_on_a_block_boundary() -> None:
    with pytest.raises(ValueError, match="boundary"):
        required_blocks(KVGroup(0), 5, 4)


def test_one_kind_of_layer_is_one_group() -> None:
    assert group_layers([None] * 4, 100) == [KVGroup(0, None, (0, 1, 2, 3))]
    assert group_layers([8] * 3, 100) == [KVGroup(0, 8, (0, 1, 2))]


def test_a_window_that_no_request_outgrows_is_full_attention() -> None:
    assert group_layers([100, None], 100) == [KVGroup(0, None, (0, 1))]


def test_groups_are_as_large_as_the_smaller_kind() -> None:
    windows = ([512] * 5 + [None]) * 2
    assert group_layers(windows, 8192) == [
        KVGroup(0, 512, (0, 1)),
        KVGroup(1, 512, (2, 3)),
        KVGroup(2, 512, (4, 6)),
        KVGroup(3, 512, (7, 8)),
        KVGroup(4, 512, (9, 10)),
        KVGroup(5, None, (5, 11)),
    ]


@pytest.mark.parametrize(
    ("num_window", "num_full", "size"),
    [
        (22, 4, 4),  # Gemma 3 1B: two layers of 26 are padding
        (15, 3, 3),  # Gemma 3 270M
        (13, 13, 13),  # Gemma 2
        (5, 3, 3),  # one of eight
        (4, 3, 1),  # one of seven, with twos, is too much
    ],
)
def test_padding_is_bounded(num_window: int, num_full: int, size: int) -> None:
    groups = group_layers([8] * num_window + [None] * num_full, 100)
    assert max(len(group.layers) for group in groups) == size
    layers = list(itertools.chain.from_iterable(group.layers for group in groups))
    assert sorted(layers) == list(range(num_window + num_full))
