"""The figures of a run, and how they are shown."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from api.cli.bench_client import TIERS, Measured


@dataclass(frozen=True, slots=True)
class Spread:
    """A sample's median, 99th percentile and mean, in milliseconds; None without samples."""

    p50: float | None
    p99: float | None
    mean: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        if not seconds:
            return cls(None, None, None)
        return cls(
            p50=1e3 * percentile(seconds, 50),
            p99=1e3 * percentile(seconds, 99),
            mean=1e3 * sum(seconds) / len(seconds),
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile of `values` (not empty), interpolated between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Report:
    """What a run came to; only requests answered whole count, except in `failed`."""

    completed: int
    failed: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    cached_tokens_by_tier: dict[str, int]
    recomputed_by_choice: int
    output_tokens_per_second: float
    requests_per_second: float
    ttft_ms: Spread
    itl_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    errors: dict[str, int]

    @classmethod
    def of(cls, requests: Sequence[Measured], seconds: float) -> Report:
        """The figures of `requests`, which took `seconds` altogether."""
        whole = [request for request in requests if request.error is None]
        by_tier = {tier: sum(request.cached_by_tier[tier] for request in whole) for tier in TIERS}
        output_tokens = sum(len(request.token_ids) for request in whole)
        errors: dict[str, int] = {}
        for request in requests:
            if request.error is not None:
                errors[request.error] = errors.get(request.error, 0) + 1
        return cls(
            completed=len(whole),
            failed=len(requests) - len(whole),
            seconds=seconds,
            prompt_tokens=sum(request.num_prompt_tokens for request in whole),
            output_tokens=output_tokens,
            cached_tokens=sum(by_tier.values()),
            cached_tokens_by_tier=by_tier,
            recomputed_by_choice=sum(request.recomputed_by_choice for request in whole),
            output_tokens_per_second=output_tokens / seconds if seconds else 0.0,
            requests_per_second=len(whole) / seconds if seconds else 0.0,
            ttft_ms=Spread.of([request.ttft for request in whole]),
            itl_ms=Spread.of([gap for request in whole for gap in request.gaps]),
            tpot_ms=Spread.of([t for request in whole if (t := request.tpot) is not None]),
            e2e_ms=Spread.of([request.seconds for request in whole]),
            errors=errors,
        )

    def table(self) -> str:
        """The figures for a person, one per line."""
        rows = [
            ("requests", f"{self.completed} complete, {self.failed} failed"),
            ("duration", f"{self.seconds:.2f} s"),
            ("output", f"{self.output_tokens_per_second:.1f} tokens/s"),
            ("", f"{self.requests_per_second:.2f} requests/s"),
            ("tokens", f"{self.prompt_tokens} prompt, {self.output_tokens} generated"),
            ("cached", _share(self.cached_tokens, self.prompt_tokens)),
        ]
        for tier, count in self.cached_tokens_by_tier.items():
            rows.append((f"  {tier}", _share(count, self.prompt_tokens)))
        if self.recomputed_by_choice:
            rows.append(("  recomputed by choice", str(self.recomputed_by_choice)))
        lines = [f"{name:<24}{value}" for name, value in rows]
        lines.append(f"{'milliseconds':<24}{'p50':>10}{'p99':>10}{'mean':>10}")
        for name, spread in (
            ("time to first token", self.ttft_ms),
            ("between tokens", self.itl_ms),
            ("per output token", self.tpot_ms),
            ("whole request", self.e2e_ms),
        ):
            cells = "".join(
                f"{'-' if value is None else format(value, '.1f'):>10}"
                for value in (spread.p50, spread.p99, spread.mean)
            )
            lines.append(f"{name:<24}{cells}")
        return "\n".join(lines)


def _share(count: int, total: int) -> str:
    return f"{count} tokens ({100 * count / total:.1f} %)" if total else f"{count} tokens"


def as_json(report: Report, settings: dict[str, Any], requests: Sequence[Measured]) -> Any:
    """The whole run as plain JSON values: settings, figures, every request (without its ids)."""
    rows = []
    for request in requests:
        row = dataclasses.asdict(request)
        row["num_output_tokens"] = len(row.pop("token_ids"))
        rows.append(row)
    return {"settings": settings, "report": dataclasses.asdict(report), "requests": rows}
