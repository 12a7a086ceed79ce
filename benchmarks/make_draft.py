"""A draft model to try `--speculative draft:DIR` with: a model's first layers, nothing trained.

    python benchmarks/make_draft.py --layers N --out DIR [--model MODEL] [--dtype float32]
    overwinter serve --speculative draft:DIR

Embeddings, final norm, head and tokenizer are the target's own, so that the vocabulary fits by
itself; the layers from N on are left out. Such a model guesses badly, because the layers that are
left were never trained to be the last ones: it shows that drafting works and what it costs, not
what it gains. For gain take a small model that was trained, of the same family.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)


def write_draft(source: Path, out: Path, num_layers: int) -> Path:
    """The first `num_layers` layers of the model in the directory `source`, as the new directory
    `out`, which is returned. Raises ValueError if the model has fewer layers, or none."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if not 1 <= num_layers <= config["num_hidden_layers"]:
        raise ValueError(f"1 to {config['num_hidden_layers']} layers can be kept, not {num_layers}")
    config["num_hidden_layers"] = num_layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:num_layers]
    kept = {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  (it is no mapping)
                layer = _LAYER.search(name)
                if layer is None or int(layer[1]) < num_layers:
                    kept[name] = weights.get_tensor(name)
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, out / name)
    return out


def model_directory(model: str | None, dtype: str) -> Path:
    """The Hugging Face directory of MODEL (None: the default model); a GGUF is converted into the
    cache that `overwinter serve` uses."""
    from api.cli.options import user_cache_dir
    from engine.gguf_conversion import converted_directory
    from engine.model_source import default_model_path, resolve_model
    from engine.weight_files import DigestMemo

    source = resolve_model(model or str(default_model_path()))
    if not source.is_gguf:
        return source.path
    cache_dir = Path(os.environ.get("OVERWINTER_CACHE_DIR") or user_cache_dir())
    memo = DigestMemo(cache_dir / "digests.json")
    return converted_directory(source.path, dtype, cache_dir, memo, lambda *_: None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, required=True, help="how many of them to keep")
    parser.add_argument("--out", type=Path, required=True, help="a directory that is not there yet")
    parser.add_argument("--model", help="directory, .gguf file or hub id; the default model if not")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights of a converted GGUF")
    given = parser.parse_args(arguments)
    write_draft(model_directory(given.model, given.dtype), given.out, given.layers)
    print(f"{given.out}: {given.layers} layers, {_mib(given.out)} MiB")


def _mib(directory: Path) -> int:
    return sum(os.path.getsize(path) for path in directory.iterdir()) >> 20


if __name__ == "__main__":
    main()
