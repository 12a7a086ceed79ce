"""`committed_len`: the one number. Every row of the design's table, and nothing else decides."""

import pytest

from engine.block_hash import root_hash
from engine.request import Request, committed_len
from engine.sampling_params import SamplingParams


def make_request(num_prompt: int, num_output: int, num_computed: int) -> Request:
    request = Request(
        request_id="r",
        prompt_token_ids=list(range(num_prompt)),
        params=SamplingParams(),
        max_tokens=16,
        stop_ids=frozenset(),
        seed=0,
        root_hash=root_hash(b"f" * 32),
        arrival_order=0,
    )
    request.token_ids += [100 + i for i in range(num_output)]
    request.num_computed_tokens = num_computed
    return request


@pytest.mark.parametrize(
    ("num_prompt", "num_output", "num_computed", "expected"),
    [
        pytest.param(10, 0, 0, 0, id="nothing computed"),
        pytest.param(10, 0, 6, 6, id="mid-prompt"),
        pytest.param(10, 0, 10, 10, id="no output: the prompt"),
        pytest.param(10, 1, 10, 10, id="one token drawn, its slot unwritten"),
        pytest.param(10, 6, 15, 15, id="block boundary at num_tokens: one below it"),
        pytest.param(10, 6, 16, 15, id="an accepted run wrote the last slot: still one below"),
        pytest.param(10, 6, 19, 15, id="rejected drafts beyond it never count"),
        pytest.param(10, 6, 3, 3, id="preempted and resumed: what is confirmed again"),
    ],
)
def test_committed_len(num_prompt: int, num_output: int, num_computed: int, expected: int) -> None:
    assert committed_len(make_request(num_prompt, num_output, num_computed)) == expected


def test_tokens_in_flight_commit_nothing() -> None:
    request = make_request(10, 0, 4)
    request.num_inflight_tokens = 6
    assert committed_len(request) == 4


@pytest.mark.parametrize(
    ("num_prompt", "num_output", "num_computed", "decoding"),
    [(10, 0, 9, False), (10, 1, 10, True), (10, 3, 12, True), (10, 3, 5, False)],
)
def test_is_decoding_means_one_drawn_token_left(
    num_prompt: int, num_output: int, num_computed: int, decoding: bool
) -> None:
    assert make_request(num_prompt, num_output, num_computed).is_decoding is decoding
