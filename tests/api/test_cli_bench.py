import json

import pytest

from api.cli.bench import BenchOptions, bench
from api.cli.bench_client import Measured
from api.cli.bench_report import Report, Spread, percentile
from api.cli.errors import CommandError, UsageError
from tests.api.scripted_server import error, events, scripted


def routes(complete):
    return {
        "/v1/models": lambda body: (200, b'{"data": [{"id": "m"}]}'),
        "/tokenize": lambda body: (200, b'{"tokens": [5, 6, 7, 5]}'),
        "/v1/completions": complete,
    }


def whole(body, **changes):
    """What a server answers that generates 9s; `changes` are the lies it tells."""
    prompt = len(body["prompt"])
    count = changes.get("tokens", body["max_tokens"])
    cached = (prompt - 1) // 4 * 4
    usage = {
        "prompt_tokens": changes.get("prompt_tokens", prompt),
        "completion_tokens": changes.get("completion_tokens", count),
        "prompt_tokens_details": {
            "cached_tokens": changes.get("cached", cached),
            "cached_tokens_by_tier": {"device": cached, "cpu": 0, "disk": 0},
            "recomputed_by_choice": 1,
        },
    }
    chunks = [{"choices": [{"token_ids": [9], "text": "x"}]} for _ in range(count)]
    finish = {"choices": [{"text": "", "finish_reason": changes.get("finish", "length")}]}
    last = [] if changes.get("no_usage") else [{"choices": [], "usage": usage}]
    return (200, events(*chunks, finish, *last, done=changes.get("done", True)))


def options(url, tmp_path=None, **changes):
    given = {"concurrency": 2, "num_requests": 5, "input_tokens": 3, "output_tokens": 4, "turns": 2}
    path = None if tmp_path is None else tmp_path / "bench.json"
    return BenchOptions(url, json_path=path, api_key="secret", **(given | changes))


def test_a_run(tmp_path, capsys):
    with scripted(routes(whole)) as server:
        assert bench(options(server.url, tmp_path)) == 0
    bodies = server.bodies("/v1/completions")
    assert sorted(len(body["prompt"]) for body in bodies) == [3, 3, 3, 10, 10]
    for body in bodies:
        assert body["model"] == "m"
        assert set(body["prompt"]) <= {5, 6, 7, 9}
        assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (4, True, True)
    # Turns carry the answer that went before, and a conversation's turns share one key.
    by_key = {}
    for body in bodies:
        by_key.setdefault(body["prompt_cache_key"], []).append(body["prompt"])
    assert sorted(len(prompts) for prompts in by_key.values()) == [1, 2, 2]
    for prompts in by_key.values():
        if len(prompts) == 2:
            assert prompts[1][:7] == prompts[0] + [9, 9, 9, 9]
    assert len({body["cache_salt"] for body in bodies}) == 1

    written = json.loads((tmp_path / "bench.json").read_text())
    report = written["report"]
    assert (report["completed"], report["failed"]) == (5, 0)
    assert (report["prompt_tokens"], report["output_tokens"]) == (29, 20)
    assert report["cached_tokens_by_tier"] == {"device": 16, "cpu": 0, "disk": 0}
    assert report["recomputed_by_choice"] == 5
    assert [(row["conversation"], row["turn"]) for row in written["requests"]] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
    ]
    assert "secret" not in json.dumps(written)
    assert written["requests"][0]["num_output_tokens"] == 4
    out = capsys.readouterr().out
    assert "5 complete, 0 failed" in out
    assert "16 tokens (55.2 %)" in out


def test_prompts_repeat_with_the_seed_and_caches_only_with_the_salt():
    def prompts(**changes):
        with scripted(routes(whole)) as server:
            assert bench(options(server.url, **changes)) == 0
        bodies = server.bodies("/v1/completions")
        return sorted(body["prompt"] for body in bodies), bodies[0]["cache_salt"]

    first, first_salt = prompts(seed=1)
    again, again_salt = prompts(seed=1)
    other, other_salt = prompts(seed=2, cache_salt="mine")
    assert first == again
    assert first != other
    assert first_salt != again_salt
    assert other_salt == "mine"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 3}, "3 tokens instead of 4"),
        ({"finish": "stop"}, "finish reason 'stop' instead of 'length'"),
        ({"no_usage": True}, "no usage chunk"),
        ({"prompt_tokens": 2}, "2 prompt tokens instead of 3"),
        ({"completion_tokens": 5}, "usage counts 5 tokens"),
        ({"cached": 1}, "do not sum to 1 cached tokens"),
        ({"done": False}, "the server closed the stream before its end"),
    ],
)
def test_an_answer_that_is_not_whole_fails_the_run(capsys, changes, message):
    with scripted(routes(lambda body: whole(body, **changes))) as server:
        assert bench(options(server.url, num_requests=2, turns=1)) == 1
    captured = capsys.readouterr()
    assert "0 complete, 2 failed" in captured.out
    assert captured.err.startswith("2 failed: ")
    assert message in captured.err


def test_a_failed_turn_fails_those_that_build_on_it(capsys):
    with scripted(routes(lambda body: (503, error("full")))) as server:
        assert bench(options(server.url, num_requests=3, turns=3)) == 1
    assert len(server.bodies("/v1/completions")) == 1
    err = capsys.readouterr().err
    assert "1 failed: HTTP 503: full" in err
    assert "2 failed: an earlier turn failed" in err


def test_a_server_that_cannot_be_asked():
    refused = routes(whole) | {"/tokenize": lambda body: (401, error("no key"))}
    with scripted(refused) as server, pytest.raises(CommandError, match="HTTP 401: no key"):
        bench(options(server.url))
    with pytest.raises(CommandError, match="start a server with `overwinter serve`"):
        bench(options(server.url))


@pytest.mark.parametrize("name", ["concurrency", "num_requests", "input_tokens", "turns"])
def test_counts_start_at_one(name):
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} takes a whole number"):
        BenchOptions("http://x", **{name: 0})


def test_percentiles_are_interpolated():
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0], 99) == pytest.approx(1.99)
    assert percentile([7.0], 99) == 7.0


def test_the_figures_of_one_request():
    request = Measured(0, 0, 10, token_ids=[1, 2, 3, 4, 5], arrivals=[0.5, 0.75, 1.0], seconds=1.5)
    assert request.ttft == 0.5
    assert request.gaps == [0.25, 0.25]
    assert request.tpot == 0.125
    report = Report.of([request], 2.0)
    assert report.output_tokens_per_second == 2.5
    assert report.requests_per_second == 0.5
    assert report.ttft_ms == Spread(500.0, 500.0, 500.0)
    assert report.itl_ms == Spread(250.0, 250.0, 250.0)
    assert report.tpot_ms == Spread(125.0, 125.0, 125.0)
    assert report.e2e_ms == Spread(1500.0, 1500.0, 1500.0)


def test_failed_requests_are_counted_and_nothing_else():
    failed = Measured(0, 0, 10, token_ids=[1], arrivals=[0.1], error="why")
    report = Report.of([failed], 2.0)
    assert (report.completed, report.failed, report.output_tokens) == (0, 1, 0)
    assert report.errors == {"why": 1}
    assert report.ttft_ms == Spread(None, None, None)
    assert "0 complete, 1 failed" in report.table()
