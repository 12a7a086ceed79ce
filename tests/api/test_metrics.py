"""`/metrics` as Prometheus' own parser reads it."""

from __future__ import annotations

from dataclasses import replace

import httpx
from prometheus_client.parser import text_string_to_metric_families

from api.metrics import HISTOGRAMS, MAX_IGNORED_NAMES, Metrics, TokenClock
from engine.config import EngineConfig
from engine.outputs import CachedTokens, FinishReason, RequestOutput, RequestTimes
from tests.api.live_server import SETTINGS, LiveServer

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    *("prompt_tokens_total", "generation_tokens_total", "num_preemptions_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("external_prefix_cache_queries_total", "external_prefix_cache_hits_total"),
    *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"),
    *("spec_decode_num_accepted_tokens_total", "prefill_seconds_saved_total"),
)
TIER_COUNTERS = (
    *("kv_offload_load_bytes_total", "kv_offload_store_bytes_total"),
    *("kv_offload_load_time_seconds_total", "kv_offload_store_time_seconds_total"),
    "kv_offload_verify_failures_total",
)

Samples = dict[str, list[tuple[dict[str, str], float]]]


def scrape(http: httpx.Client) -> Samples:
    response = http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples: Samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    expected = {"model_name": "tiny", "engine": "0", **labels}
    (found,) = [number for given, number in samples[name] if given == expected]
    return found


def test_vllms_names_and_labels(http: httpx.Client, server: LiveServer) -> None:
    server.wait_idle()
    samples = scrape(http)
    for name in (*GAUGES, *COUNTERS):
        value(samples, f"vllm:{name}")
    for name in TIER_COUNTERS:
        value(samples, f"vllm:{name}", tier="cpu")
    for result in ("passed", "failed", "skipped"):
        value(samples, "vllm:kv_offload_load_audits_total", result=result)
    for name in HISTOGRAMS:
        value(samples, f"vllm:{name}_count")
        value(samples, f"vllm:{name}_bucket", le="+Inf")
    for reason in ("stop", "length", "abort", "error"):
        value(samples, "vllm:request_success_total", finished_reason=reason)
    config = value(samples, "vllm:cache_config_info", block_size="4", num_gpu_blocks="512")
    assert config == 1.0
    assert value(samples, "vllm:num_requests_running") == 0.0
    assert 0.0 <= value(samples, "vllm:kv_offload_cpu_cache_usage_perc") <= 1.0


def test_a_request_shows_in_every_number(http: httpx.Client) -> None:
    before = scrape(http)
    body = {"prompt": [50] * 9, "max_tokens": 5, "ignore_eos": True, "n": 2}
    assert http.post("/v1/completions", json=body).status_code == 200
    after = scrape(http)

    def grown(name: str, **labels: str) -> float:
        return value(after, f"vllm:{name}", **labels) - value(before, f"vllm:{name}", **labels)

    assert grown("prompt_tokens_total") == 18
    assert grown("generation_tokens_total") == 10
    assert grown("request_success_total", finished_reason="length") == 2
    assert grown("request_prompt_tokens_sum") == 18
    assert grown("request_generation_tokens_sum") == 10
    assert grown("api_responses_total", status="200") == 2  # the answer and the first scrape
    for name in HISTOGRAMS:
        expected = 8 if name == "inter_token_latency_seconds" else 2
        assert grown(f"{name}_count") == expected, name


def test_the_prefix_is_a_setting(engine_config: EngineConfig) -> None:
    settings = replace(SETTINGS, metrics_prefix="hive")
    with LiveServer(engine_config, settings) as server, server.client() as client:
        names = set(scrape(client))
    assert "hive:num_requests_running" in names
    assert not any(name.startswith("vllm") for name in names)


def output(times: RequestTimes, num_output_tokens: int) -> RequestOutput:
    return RequestOutput(
        *("id", "", [], None, None, FinishReason.LENGTH, None, None, 30, num_output_tokens),
        CachedTokens(),
        0,
        times,
    )


def test_times_are_the_differences_of_a_requests_moments() -> None:
    metrics = Metrics()
    times = RequestTimes(arrival=10.0, first_scheduled=10.5, first_token=12.0, finished=16.0)
    metrics.observe_finished(output(times, 4))
    sums = {name: histogram.sum for name, histogram in metrics.histograms.items()}
    assert sums == {
        "time_to_first_token_seconds": 2.0,
        "inter_token_latency_seconds": 0.0,
        "e2e_request_latency_seconds": 6.0,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 1.5,
        "request_decode_time_seconds": 4.0,
        "request_prompt_tokens": 30,
        "request_generation_tokens": 4,
    }


def test_a_request_without_tokens_has_no_first_one() -> None:
    metrics = Metrics()
    metrics.observe_finished(output(RequestTimes(10.0, 10.5, None, 11.0), 0))
    metrics.observe_finished(output(RequestTimes(10.0, None, None, 11.0), 0))
    counts = {name: histogram.count for name, histogram in metrics.histograms.items()}
    assert counts["e2e_request_latency_seconds"] == 2
    assert counts["request_queue_time_seconds"] == 1
    assert counts["time_to_first_token_seconds"] == 0


def test_tokens_that_come_together_share_the_time() -> None:
    metrics = Metrics()
    clock = TokenClock(metrics)
    latency = metrics.histograms["inter_token_latency_seconds"]
    clock.tick(3)
    assert latency.count == 0  # the time to the first token is another histogram's
    clock.tick(0)
    clock.tick(2)
    clock.tick(1)
    assert latency.count == 3


def test_clients_cannot_grow_the_page_without_bound() -> None:
    metrics = Metrics()
    first = [metrics.count_ignored_field(f"field{i}") for i in range(MAX_IGNORED_NAMES + 10)]
    assert first == [True] * (MAX_IGNORED_NAMES + 1) + [False] * 9
    assert metrics.ignored_fields["other"] == 10
    assert metrics.count_ignored_field("field0") is False
    assert metrics.ignored_fields["field0"] == 2
