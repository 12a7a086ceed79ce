"""Converts a GGUF file once into a model directory inside the cache, and finds it again.

    <cache>/conversions/<digest of the file>-<dtype>-v<VERSION>/    complete, or not there
    <cache>/conversions/<same>.lock                                 held while converting
    <cache>/conversions/<same>.partial/                             a conversion under way, or dead

Beside the float32 weights lies the quantised form that they were made of (`quantised_weights`).
The partial directory is synced and then renamed, so that a crash at any instant leaves either no
conversion or a whole one; its remains are swept by the next process that takes the lock.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
from pathlib import Path
from typing import Any

from engine.errors import StartupError
from engine.gguf_file import GGUFHeader
from engine.gguf_reading import quick_reading
from engine.gguf_tokenizer import build_tokenizer, save_tokenizer, stop_ids
from engine.model_info import ProgressFn
from engine.progress_bars import percentages
from engine.weight_files import DigestMemo, weight_files

# Raise when a conversion of today would differ from one of before.
VERSION = 3

# Architectures whose GGUF metadata says all that transformers' configuration needs. Others convert
# too, but silently take the class's defaults for what llama.cpp keeps in its own source.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
_FREE_SPACE_MARGIN = 1 << 26  # bytes beside the weights


def converted_directory(
    path: Path, dtype: str, cache_dir: Path, memo: DigestMemo, progress: ProgressFn
) -> Path:
    """The converted form of GGUF file `path` in `dtype`, converting it now if need be.

    Raises:
        StartupError: damaged or unsupported file, or a cache that cannot be written.
    """
    digest = memo.digest(path, progress)
    folder = cache_dir / "conversions"
    target = folder / f"{digest[:32]}-{dtype}-v{VERSION}"
    if _is_whole(target, dtype):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be converting: wait for it
            if not _is_whole(target, dtype):
                _convert_into(target, path, dtype, progress)
    except OSError as error:
        raise StartupError(
            f"cannot write the converted model to {folder}: {error.strerror or error};"
            " free space there or choose another --cache-dir"
        ) from error
    return target


def _is_whole(target: Path, dtype: str) -> bool:
    from engine.quantised_weights import quantised_file

    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    if not all((target / name).is_file() for name in names):
        return False
    try:
        weight_files(target)
    except StartupError:
        return False
    return dtype != "float32" or quantised_file(target) is not None


def _convert_into(target: Path, path: Path, dtype: str, progress: ProgressFn) -> None:
    """Convert under the lock; `target` appears whole or not at all."""
    progress("converting", 0.0)
    header = GGUFHeader.read(path)
    _check(header)
    build_tokenizer(header)  # refuse an unknown vocabulary before minutes of work
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    partial.mkdir()
    try:
        max_length = _write_model(header, dtype, partial, progress)
        save_tokenizer(header, partial, max_length)
        for file in sorted(partial.iterdir()):
            _sync(file)
        _sync(partial)
        partial.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    progress("converting", 100.0)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check(header: GGUFHeader) -> None:
    """Refuse what would convert into a different model, by name."""
    import gguf

    if header.architecture not in ARCHITECTURES:
        raise StartupError(
            f"GGUF architecture {header.architecture!r} of {header.path} is not supported"
            f" ({', '.join(ARCHITECTURES)} are); use the model's Hugging Face directory"
        )
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    tables = [tensor.name for tensor in header.tensors if tensor.name.startswith("rope_f")]
    if scaling != "none" or tables:
        raise StartupError(
            f"{header.path} scales its RoPE ({tables[0] if tables else scaling}), which would be"
            " lost in the conversion; use the model's Hugging Face directory"
        )
    if all(tensor.name != "token_embd.weight" for tensor in header.tensors):
        raise StartupError(f"{header.path} holds no weights of a model; use a complete GGUF")
    end = header.data_start
    for tensor in header.tensors:
        try:
            kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        except ValueError:
            raise StartupError(
                f"{header.path} holds weights of unknown type {tensor.ggml_type}; use another GGUF"
            ) from None
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        end = max(
            end, header.data_start + tensor.offset + _product(tensor.shape) // elements * size
        )
    actual = header.path.stat().st_size
    if actual < end:
        raise StartupError(f"{header.path} is cut off: {actual} bytes of {end}; download it again")


def _product(shape: tuple[int, ...]) -> int:
    return functools.reduce(int.__mul__, shape, 1)


def _write_model(header: GGUFHeader, dtype: str, directory: Path, progress: ProgressFn) -> int:
    """Dequantise straight into `dtype` and save; returns the context length in tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    from engine.gguf_blocks import quantised_forms
    from engine.quantised_weights import write_quantised

    parent, name = str(header.path.parent), header.path.name
    num_elements = sum(_product(tensor.shape) for tensor in header.tensors)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    needed = num_elements * torch_dtype.itemsize + header.path.stat().st_size + _FREE_SPACE_MARGIN
    if shutil.disk_usage(directory).free < needed:
        raise StartupError(
            f"converting {header.path} needs {needed >> 20} MiB in {directory.parent};"
            " free space there or choose another --cache-dir"
        )
    try:
        with quick_reading(lambda percent: progress("converting", percent * 0.9)):
            config = AutoConfig.from_pretrained(parent, gguf_file=name, local_files_only=True)
            config = _corrected(config, header)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                parent,
                gguf_file=name,
                config=config,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch_dtype,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, StartupError):
        raise
    except Exception as error:  # whatever a foreign file makes of the reader
        raise StartupError(f"{header.path} cannot be converted ({error})") from error
    model, report = loaded
    lost = num_elements - sum(parameter.numel() for parameter in model.parameters())
    if report["missing_keys"] or report["mismatched_keys"] or lost:
        raise StartupError(
            f"{header.path} holds weights that its architecture does not have, or lacks some"
            f" ({lost} elements over); use the model's Hugging Face directory"
        )
    model.generation_config.eos_token_id = stop_ids(header.metadata) or None
    with percentages(lambda percent: progress("converting", 90 + percent * 0.08)):
        model.save_pretrained(directory)
    if dtype == "float32":  # a narrower one has rounded the values: no form is exact
        write_quantised(directory, dict(quantised_forms(header, model)))
    return int(model.config.max_position_embeddings)


def _corrected(config: Any, header: GGUFHeader) -> Any:
    """The configuration as the model's authors wrote it.

    GGUF keeps floats in 32 bits: 1e-5 comes back as 9.999999747378752e-06. The shortest decimal
    that means the same 32 bits is what was written.
    """
    fields = _shortened(config.to_dict())
    metadata, architecture = header.metadata, header.architecture
    embedding = next(t for t in header.tensors if t.name == "token_embd.weight")
    overrides = {
        "vocab_size": embedding.shape[0],
        "head_dim": metadata.get(f"{architecture}.attention.key_length"),
        "sliding_window": metadata.get(f"{architecture}.attention.sliding_window"),
    }
    fields |= {key: value for key, value in overrides.items() if value is not None}
    fields.pop("_model_name_or_path", None)
    return type(config).from_dict(fields)


def _shortened(value: Any) -> Any:
    import numpy as np

    if isinstance(value, float):
        single = np.float32(value)
        return float(str(single)) if float(single) == value else value
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    return value
