"""From MODEL to a module that is ready to compute, its tokenizer and its identity."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine import architecture
from engine.config import EngineConfig
from engine.errors import StartupError
from engine.fingerprint import model_fingerprint
from engine.model_info import ModelInfo, ProgressFn
from engine.model_source import ModelSource, resolve_model
from engine.progress_bars import percentages
from engine.quantised_weights import QuantisedWeight, read_quantised
from engine.rope import pin_rope
from engine.tokenizer import Tokenizer, load_tokenizer
from engine.weight_files import DigestMemo, weight_files

ATTENTION = "overwinter_paged"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode on its device, with what belongs to it."""

    model: nn.Module
    tokenizer: Tokenizer
    info: ModelInfo
    # Of weights of the model, bit for bit, by their names in it: to be read in their place.
    quantised: Mapping[str, QuantisedWeight] = field(default_factory=dict)


def resolve_device(config: EngineConfig) -> str:
    """The device to compute on: "cpu" or "cuda".

    Raises:
        StartupError: cuda is asked for and there is none.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device cuda: no CUDA device is available; use --device cpu")
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def resolve_dtype(config: EngineConfig) -> str:
    """The dtype to compute in; "auto" is bfloat16 where the processor multiplies it natively."""
    if config.dtype != "auto":
        return config.dtype
    if resolve_device(config) == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    return "bfloat16" if has_native_bfloat16() else "float32"


def has_native_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor has bfloat16 arithmetic; emulated, it is slower than float32."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = {
        flag
        for line in lines
        if line.lower().startswith(("flags", "features"))
        for flag in line.partition(":")[2].split()
    }
    wanted = {"bf16"} if platform.machine() in ("aarch64", "arm64") else {"avx512_bf16", "amx_bf16"}
    return bool(flags & wanted)


def load_model(
    config: EngineConfig,
    progress: ProgressFn,
    *,
    attention: str = ATTENTION,
    clip_len: bool = False,
) -> LoadedModel:
    """Load MODEL with its weights mapped from disk, in eval mode, without gradients.

    `progress` gets the phases "resolving", "hashing", "converting" and "loading". `attention` names
    the function registered with transformers that computes attention. With `clip_len` a
    `max_model_len` beyond the model's positions is lowered to them.

    Raises:
        StartupError: for every failure; one line with the cause and the mend.
    """
    progress("resolving", 0.0)
    source = resolve_model(config.model)
    dtype = resolve_dtype(config)
    memo = DigestMemo(config.cache_dir / "digests.json")
    directory = _directory(source, dtype, config.cache_dir, memo, progress)
    model_config = _read_config(directory)
    files = weight_files(directory)
    max_model_len = architecture.max_model_len(model_config, config.max_model_len, clip=clip_len)
    tokenizer = load_tokenizer(directory)
    digests = [memo.digest(path, progress) for path in files]
    exact = dtype == "float32"
    quantised = read_quantised(directory, digests, memo, progress) if exact else {}

    progress("loading", 0.0)
    model = _build(directory, model_config, dtype, attention, progress)
    _check_built(model, model_config)
    model.to(resolve_device(config))
    rope = pin_rope(model, max_model_len)
    progress("loading", 100.0)
    info = ModelInfo(
        name=source.name,
        path=str(directory),
        architecture=type(model).__name__,
        max_model_len=max_model_len,
        vocab_size=int(model_config.vocab_size),
        num_layers=int(model_config.num_hidden_layers),
        num_kv_heads=architecture.num_kv_heads(model_config),
        head_dim=architecture.head_dim(model_config),
        num_heads=int(model_config.num_attention_heads),
        dtype=dtype,
        eos_token_ids=_eos_token_ids(model, model_config),
        sliding_windows=architecture.sliding_windows(model_config),
        fingerprint=model_fingerprint(
            weight_digests=digests,
            architecture=type(model).__name__,
            config=model_config.to_dict(),
            rope=rope,
            dtype=dtype,
            quantisation="none",
        ),
    )
    return LoadedModel(model, tokenizer, info, quantised)


def _directory(
    source: ModelSource, dtype: str, cache_dir: Path, memo: DigestMemo, progress: ProgressFn
) -> Path:
    if not source.is_gguf:
        return source.path
    from engine.gguf_conversion import converted_directory

    return converted_directory(source.path, dtype, cache_dir, memo, progress)


def _read_config(directory: Path) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # whatever a broken or foreign config.json makes of itself
        raise StartupError(
            f"{directory}/config.json is not usable ({_first_line(error)}); download it again,"
            " or choose an architecture that transformers knows"
        ) from error
    config = architecture.text_config(config)
    architecture.check_supported(config)
    return config


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _build(
    directory: Path, config: Any, dtype: str, attention: str, progress: ProgressFn
) -> nn.Module:
    """Build the module over the mapped weight files.

    transformers builds it without storage and then hands it the mapped tensors: no weight is copied
    where the dtype is the file's, and tied ones stay one tensor.
    """
    from transformers import AutoModelForCausalLM

    try:
        with percentages(lambda percent: progress("loading", percent)):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(directory),
                config=config,
                dtype=getattr(torch, dtype),
                attn_implementation=attention,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:  # unknown class, no support for attention functions, bad tensors
        raise StartupError(
            f"model in {directory} cannot be loaded ({_first_line(error)});"
            " check the files, or choose another model"
        ) from error
    model, report = loaded
    wrong = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if wrong:
        raise StartupError(
            f"weights in {directory} do not fit the model: {wrong[0]} and {len(wrong) - 1} others"
            " are missing or misshapen; download the model again"
        )
    if report["unexpected_keys"]:
        names = sorted(map(str, report["unexpected_keys"]))
        _log.warning("%d weights of %s are not used, first %s", len(names), directory, names[0])
    built: nn.Module = model.eval()
    return built.requires_grad_(False)


def _check_built(model: nn.Module, config: Any) -> None:
    """Refuse what shows only in the built module: sinks, and keys of an unexpected size."""
    width = architecture.num_kv_heads(config) * architecture.head_dim(config)
    for name, parameter in model.named_parameters():
        if name.endswith(".sinks"):
            raise StartupError(
                f"model type {config.model_type!r} is not supported: its attention has learned"
                f" sinks ({name}); choose another model"
            )
        is_key_or_value = name.endswith((".k_proj.weight", ".v_proj.weight"))
        if is_key_or_value and parameter.shape[0] != width:
            raise StartupError(
                f"model type {config.model_type!r} is not supported: {name} makes"
                f" {parameter.shape[0]} elements per token where {width} were expected"
            )


def _eos_token_ids(model: nn.Module, config: Any) -> tuple[int, ...]:
    """Stop ids of the generation config, or of the model's config where it has none."""
    generation = getattr(model, "generation_config", None)
    for holder in (generation, config):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(int(i) for i in ids)
    return ()
