"""What the HTTP surface is told when it starts: frozen, complete, free of the engine's settings."""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Sizes are bytes, times seconds. Keys never appear in the repr."""

    served_model_names: tuple[str, ...]  # at least one; the first labels the metrics
    version: str
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: the API is open
    admin_key: str | None = field(default=None, repr=False)  # guards /cache/*
    metrics_prefix: str = "vllm"  # "vllm:num_requests_running"; empty: no prefix and no colon
    request_timeout: float = 0.0  # longest life of one request; 0: no limit
    max_body_bytes: int = 32 * MIB

    def __post_init__(self) -> None:
        if not self.served_model_names:
            raise ValueError("served_model_names must hold at least one name")
