"""Builds the tokenizer that a GGUF file describes, from its own metadata.

The general converter of transformers looks at the vocabulary only and gets the cuts before merging
wrong (SmolLM2's digits among them); here they come from `tokenizer.ggml.pre`.

Two families of vocabulary are known: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from tokenizers.decoders import Decoder
from tokenizers.normalizers import Normalizer

from engine.errors import StartupError
from engine.gguf_file import GGUFHeader
from engine.pre_tokenizers import pre_tokenizer_kind

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"  # what SentencePiece writes for a space

# Tokens that end a turn; a GGUF has no generation config to list them beside its EOS.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")
_KEY = "tokenizer.ggml."


def build_tokenizer(header: GGUFHeader) -> Tokenizer:
    """The tokenizer of `header`, equal in its ids to the one the model was trained with.

    Raises:
        StartupError: no vocabulary, or one of a kind that is not known here.
    """
    metadata = header.metadata
    if not metadata.get(_KEY + "tokens"):
        raise StartupError(f"{header.path} holds no tokenizer; use a complete GGUF of the model")
    model = metadata.get(_KEY + "model")
    if model not in ("gpt2", "llama"):
        raise StartupError(
            f"tokenizer model {model!r} of {header.path} is not known, only gpt2 and llama are;"
            " use the model's Hugging Face directory"
        )
    try:
        if model == "gpt2":
            tokenizer, adds_bos = _byte_level(metadata)
        else:
            tokenizer, adds_bos = _sentencepiece(metadata), True
        _add_tokens(tokenizer, metadata)
        _add_affixes(tokenizer, metadata, adds_bos)
    except StartupError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise StartupError(
            f"the vocabulary of {header.path} is damaged ({error}); download it again"
        ) from error
    return tokenizer


def save_tokenizer(header: GGUFHeader, directory: Path, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` of `header` into `directory`.

    `max_length` is the context in tokens.
    """
    tokenizer = build_tokenizer(header)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    for theirs, ours in names.items():
        token_id = header.metadata.get(f"{_KEY}{theirs}_token_id")
        if token_id is not None:
            config[f"{ours}_token"] = header.metadata[_KEY + "tokens"][token_id]
    template = header.metadata.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    text = json.dumps(config, ensure_ascii=False, indent=1)
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def stop_ids(metadata: dict[str, Any]) -> list[int]:
    """Ids that end a generation: EOS, EOT, EOM, and the control tokens that end a turn."""
    tokens, kinds = metadata[_KEY + "tokens"], metadata.get(_KEY + "token_type", ())
    ids = [metadata.get(f"{_KEY}{name}_token_id") for name in ("eos", "eot", "eom")]
    controls = {tokens[i]: i for i, kind in enumerate(kinds) if kind == CONTROL}
    ids += [controls.get(text) for text in _TURN_ENDS]
    return list(dict.fromkeys(i for i in ids if i is not None))


def _byte_level(metadata: dict[str, Any]) -> tuple[Tokenizer, bool]:
    name = metadata.get(_KEY + "pre")
    if name is None:
        raise StartupError(
            "this GGUF does not name its pre-tokenizer (an old conversion);"
            " use the model's Hugging Face directory, or a newer GGUF"
        )
    kind = pre_tokenizer_kind(name)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocabulary(metadata),
            merges=[_pair(merge) for merge in metadata.get(_KEY + "merges", ())],
            ignore_merges=kind.ignore_merges,
        )
    )
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = kind.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, kind.adds_bos


def _sentencepiece(metadata: dict[str, Any]) -> Tokenizer:
    vocabulary = _vocabulary(metadata)
    unknown = metadata.get(_KEY + "unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_from_scores(metadata),
            unk_token=None if unknown is None else metadata[_KEY + "tokens"][unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get(_KEY + "add_space_prefix", True)
    steps: list[Normalizer] = [normalizers.Replace(" ", SPACE)]
    back: list[Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        steps.insert(0, normalizers.Prepend(SPACE))
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def _vocabulary(metadata: dict[str, Any]) -> dict[str, int]:
    # The first of two equal texts wins, as in the runtime that these files come from.
    vocabulary: dict[str, int] = {}
    for token_id, text in enumerate(metadata[_KEY + "tokens"]):
        vocabulary.setdefault(text, token_id)
    return vocabulary


def _pair(merge: str) -> tuple[str, str]:
    # A piece may itself begin with a space, so the separator is the first one after that.
    cut = merge.index(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _merges_from_scores(metadata: dict[str, Any]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score first.

    SentencePiece joins the adjacent pair whose result scores best; as merge ranks that is the order
    of scores. User-defined and control tokens are matched before merging and take no part.
    """
    scores = metadata[_KEY + "scores"]
    kinds = metadata.get(_KEY + "token_type") or [NORMAL] * len(scores)
    pieces = {
        text: scores[i]
        for i, text in enumerate(metadata[_KEY + "tokens"])
        if kinds[i] in (NORMAL, UNUSED, USER_DEFINED)
    }
    ranked = []
    for text, score in pieces.items():
        cuts = [
            (text[:cut], text[cut:])
            for cut in range(1, len(text))
            if text[:cut] in pieces and text[cut:] in pieces
        ]
        cuts.sort(key=lambda pair: (-pieces[pair[0]], -pieces[pair[1]]))
        ranked += [(score, pair) for pair in cuts]
    ranked.sort(key=lambda item: -item[0])
    return [pair for _, pair in ranked]


def _add_tokens(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    tokens = metadata[_KEY + "tokens"]
    added = []
    for token_id, kind in enumerate(metadata.get(_KEY + "token_type", ())):
        if kind in (CONTROL, USER_DEFINED, UNKNOWN) and tokens[token_id]:
            special = kind != USER_DEFINED
            added.append(AddedToken(tokens[token_id], special=special, normalized=False))
    tokenizer.add_tokens(added)


def _add_affixes(tokenizer: Tokenizer, metadata: dict[str, Any], adds_bos: bool) -> None:
    """Make `encode` put BOS and EOS where the file says; its default is the kind's."""
    wanted = {
        "bos": metadata.get(_KEY + "add_bos_token", adds_bos),
        "eos": metadata.get(_KEY + "add_eos_token", False),
    }
    ids = {name: metadata.get(f"{_KEY}{name}_token_id") for name in wanted}
    present = {name: ids[name] for name in wanted if wanted[name] and ids[name] is not None}
    if not present:
        return
    texts = {name: metadata[_KEY + "tokens"][token_id] for name, token_id in present.items()}
    pattern = [texts[name] for name in ("bos",) if name in texts] + ["$A"]
    pattern += [texts[name] for name in ("eos",) if name in texts]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=pattern,
        special_tokens=[(texts[name], token_id) for name, token_id in present.items()],
    )
