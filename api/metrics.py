"""`/metrics`: the engine's counters and what the HTTP surface observes, under vLLM's names.

Dashboards, routers and load generators read vLLM's metric names, so the engine's plain numbers are
rendered under those; the few that vLLM lacks start with `api_` or end the list.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from api.histogram import SECONDS, TOKENS, Histogram
from engine.outputs import FinishReason, RequestOutput

if TYPE_CHECKING:
    from api.holder import EngineHolder
    from api.settings import ServerSettings
    from engine.stats import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_IGNORED_NAMES = 64  # clients choose the names: without a bound they could fill the memory
OTHER = "other"

HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Arrival to the first token.", SECONDS),
    "inter_token_latency_seconds": ("Between two tokens of one request.", SECONDS),
    "e2e_request_latency_seconds": ("Arrival to the end.", SECONDS),
    "request_queue_time_seconds": ("Arrival to the first scheduled step.", SECONDS),
    "request_prefill_time_seconds": ("First scheduled step to the first token.", SECONDS),
    "request_decode_time_seconds": ("First token to the end.", SECONDS),
    "request_prompt_tokens": ("Prompt tokens per request.", TOKENS),
    "request_generation_tokens": ("Generated tokens per request.", TOKENS),
}


class Metrics:
    """What the HTTP surface counts. One per app; touched on the event loop only."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.responses: dict[int, int] = {}  # by HTTP status
        self.ignored_fields: dict[str, int] = {}

    def count_ignored_field(self, name: str) -> bool:
        """Counts an unknown body field; true the first time, when a log line is due."""
        name = name[:64]
        if name not in self.ignored_fields and len(self.ignored_fields) >= MAX_IGNORED_NAMES:
            name = OTHER
        seen = self.ignored_fields.get(name, 0)
        self.ignored_fields[name] = seen + 1
        return seen == 0

    def count_response(self, status: int) -> None:
        self.responses[status] = self.responses.get(status, 0) + 1

    def observe_finished(self, output: RequestOutput) -> None:
        """Adds the life of one engine request; `output` is its last event."""
        observe = {name: histogram.observe for name, histogram in self.histograms.items()}
        times = output.times
        observe["request_prompt_tokens"](output.num_prompt_tokens)
        observe["request_generation_tokens"](output.num_output_tokens)
        finished = times.finished if times.finished is not None else time.monotonic()
        observe["e2e_request_latency_seconds"](finished - times.arrival)
        if times.first_scheduled is None:
            return
        observe["request_queue_time_seconds"](times.first_scheduled - times.arrival)
        if times.first_token is None:
            return
        observe["time_to_first_token_seconds"](times.first_token - times.arrival)
        observe["request_prefill_time_seconds"](times.first_token - times.first_scheduled)
        observe["request_decode_time_seconds"](finished - times.first_token)


class TokenClock:
    """Inter-token latency of one engine request, as its events come out of the engine."""

    def __init__(self, metrics: Metrics) -> None:
        self._latency = metrics.histograms["inter_token_latency_seconds"]
        self._last: float | None = None

    def tick(self, num_tokens: int) -> None:
        """`num_tokens` came at once: the time since the last ones is spread over them."""
        if not num_tokens:
            return
        now = time.monotonic()
        if self._last is not None:
            self._latency.observe((now - self._last) / num_tokens, num_tokens)
        self._last = now


class MetricsPage(Collector):
    """Renders everything at scrape time; engine metrics appear once the engine has loaded."""

    def __init__(self, settings: ServerSettings, holder: EngineHolder, metrics: Metrics) -> None:
        self._prefix = f"{settings.metrics_prefix}:" if settings.metrics_prefix else ""
        self._holder = holder
        self._metrics = metrics
        self._labels = {"model_name": settings.served_model_names[0], "engine": "0"}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The page in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for name, (text, _) in HISTOGRAMS.items():
            histogram = self._metrics.histograms[name]
            family = HistogramMetricFamily(self._prefix + name, text, labels=list(self._labels))
            labels = list(self._labels.values())
            family.add_metric(labels, histogram.buckets(), histogram.sum)
            yield family
        yield self._counters(
            "api_responses",
            "HTTP responses.",
            "status",
            {str(status): n for status, n in sorted(self._metrics.responses.items())},
        )
        yield self._counters(
            "api_ignored_fields",
            "Unknown fields of request bodies.",
            "field",
            self._metrics.ignored_fields,
        )
        if self._holder.engine is not None:
            stats = self._holder.engine.stats()
            yield from self._engine_gauges(stats)
            yield from self._engine_counters(stats)
            yield from self._tier_metrics(stats)

    def _gauge(self, name: str, text: str, value: float, **extra: str) -> Metric:
        labels = {**extra, **self._labels}
        family = GaugeMetricFamily(self._prefix + name, text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        """`name` without `_total`, which the client library adds."""
        family = CounterMetricFamily(self._prefix + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        names = [label, *self._labels]
        family = CounterMetricFamily(self._prefix + name, text, labels=names)
        for key, value in values.items():
            family.add_metric([key, *self._labels.values()], value)
        return family

    def _gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, text, labels=[label, *self._labels])
        for key, value in values.items():
            family.add_metric([key, *self._labels.values()], value)
        return family

    def _engine_gauges(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Sequences running.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences waiting.", stats.num_waiting)
        yield self._gauge(
            "kv_cache_usage_perc", "Device blocks in use, 0 to 1.", stats.kv_cache_usage
        )
        yield self._gauge("transcript_entries", "Transcripts held.", stats.transcript_entries)
        yield self._gauge(
            "transcript_bytes", "Bytes of all records beside the KV.", stats.transcript_bytes
        )
        yield self._gauge(
            "transcript_pending", "Records on their way to the disk.", stats.transcript_pending
        )
        yield self._gauge(
            "cache_config_info",
            "Shape of the device pool.",
            1,
            block_size=str(stats.block_size),
            num_gpu_blocks=str(stats.num_blocks),
        )

    def _engine_counters(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens.", stats.prompt_tokens),
            ("generation_tokens", "Generated tokens.", stats.generation_tokens),
            ("num_preemptions", "Requests that had to give up their blocks.", stats.preemptions),
            ("prefix_cache_queries", "Tokens looked up.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Tokens found on the device.", stats.prefix_cache_hits),
            ("external_prefix_cache_queries", "Tokens asked of tiers.", stats.external_queries),
            ("external_prefix_cache_hits", "Tokens found in tiers.", stats.external_hits),
            ("spec_decode_num_drafts", "Drafts verified.", stats.spec_num_drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens.", stats.spec_num_draft_tokens),
            (
                "spec_decode_num_accepted_tokens",
                "Draft tokens accepted.",
                stats.spec_num_accepted_tokens,
            ),
            (
                "transcript_hits",
                "Chats read with ids that were really generated.",
                stats.transcript_hits,
            ),
            ("transcript_misses", "Chats read by the tokenizer alone.", stats.transcript_misses),
            ("transcript_reused_tokens", "Ids from transcripts.", stats.transcript_tokens),
            ("transcript_dropped", "Transcripts found of no use.", stats.transcript_dropped),
            ("idle_prefills", "Prompts computed ahead in idle time.", stats.idle_prefills),
            ("idle_prefill_tokens", "Tokens of them.", stats.idle_prefill_tokens),
            ("engine_failed_steps", "Steps that failed.", stats.failed_steps),
            (
                "engine_failed_checks",
                "Idle-time checks of the KV accounting that did not add up.",
                stats.failed_checks,
            ),
            (
                "recomputed_by_choice_tokens",
                "Stored tokens that the load policy chose to recompute.",
                stats.recomputed_by_choice,
            ),
            (
                "prefill_seconds_saved",
                "Seconds that computing the cached tokens would have taken.",
                stats.prefill_seconds_saved,
            ),
        ):
            yield self._counter(name, text, value)
        yield self._counters(
            "request_success",
            "Requests ended, by reason.",
            "finished_reason",
            {reason.value: stats.finished.get(reason.value, 0) for reason in FinishReason},
        )
        yield self._counters(
            "kv_offload_load_audits",
            "Loaded blocks computed anew while idle (--verify-loads), by result.",
            "result",
            {name: stats.load_audits.get(name, 0) for name in ("passed", "failed", "skipped")},
        )
        yield self._counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            "position",
            {str(position): n for position, n in enumerate(stats.spec_accepted_per_pos)},
        )
        yield self._counters(
            "spec_decode_drafter_failures",
            "Drafts thrown away, by what the drafter did wrong.",
            "reason",
            stats.drafter_failures,
        )

    def _tier_metrics(self, stats: EngineStats) -> Iterator[Metric]:
        tiers = stats.tiers
        for name, text, values in (
            ("load_bytes", "Bytes loaded.", {k: t.load_bytes for k, t in tiers.items()}),
            ("load_time_seconds", "Time loading.", {k: t.load_seconds for k, t in tiers.items()}),
            ("store_bytes", "Bytes stored.", {k: t.store_bytes for k, t in tiers.items()}),
            ("store_time_seconds", "Time storing.", {k: t.store_seconds for k, t in tiers.items()}),
            (
                "verify_failures",
                "Loaded blocks refused because their content was not what it claimed.",
                {k: t.verify_failures for k, t in tiers.items()},
            ),
            ("evicted_blocks", "Blocks evicted.", {k: t.evicted_blocks for k, t in tiers.items()}),
            ("failed_blocks", "Saves failed.", {k: t.failed_blocks for k, t in tiers.items()}),
        ):
            yield self._counters(f"kv_offload_{name}", text, "tier", values)
        skipped: dict[str, float] = {}
        for tier in tiers.values():
            for reason, number in tier.skipped.items():
                skipped[reason] = skipped.get(reason, 0) + number
        yield self._counters(
            "kv_offload_stores_skipped",
            "Saves not begun and stored blocks passed over, by reason.",
            "reason",
            skipped,
        )
        yield self._gauges(
            "kv_offload_pending_saves",
            "Blocks waiting to be saved.",
            "tier",
            {k: t.pending_saves for k, t in tiers.items()},
        )
        if "cpu" in tiers:
            cpu = tiers["cpu"]
            usage = cpu.bytes / cpu.capacity_bytes if cpu.capacity_bytes else 0.0
            yield self._gauge("kv_offload_cpu_cache_usage_perc", "CPU tier in use, 0 to 1.", usage)
