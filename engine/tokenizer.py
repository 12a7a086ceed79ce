"""Text to token ids and back: the model's own tokenizer, its chat template, streamed decoding."""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, processors

from engine import chat_template
from engine.chat_template import ChatTemplateError
from engine.errors import StartupError

__all__ = ["ChatTemplateError", "TokenStream", "Tokenizer", "load_tokenizer"]

REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Drawn around special tokens that stand in a message's own text while its template is rendered.
_MARK_OPEN, _MARK_CLOSE = "\U000f0000", "\U000f0001"
_MARKED = re.compile(f"{_MARK_OPEN}([^{_MARK_OPEN}{_MARK_CLOSE}]*){_MARK_CLOSE}")
_LONE_MARK = re.compile(f"[{_MARK_OPEN}{_MARK_CLOSE}]")


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet: the printable letter that stands for each byte, reversed."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + n): byte for n, byte in enumerate(others)}


class Tokenizer:
    """A model's tokenizer. Immutable after construction and safe to use from several threads.

    Attributes:
        vocab_size: ids are below this, added tokens included.
        special_ids: ids that are control tokens and not shown in text.
        strips_before, strips_after: those of them that swallow the blanks around them.
        special_tokens: by role, such as `{"bos_token": "<s>"}`.
        chat_template: its jinja2 source, or None.
        class_name: the class that Hugging Face's configuration names.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, config: Mapping[str, Any], template: str | None
    ) -> None:
        """`config` is the content of `tokenizer_config.json`."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.class_name = str(config.get("tokenizer_class", "PreTrainedTokenizerFast"))
        self.chat_template = template
        self.special_tokens = _special_tokens(config)
        added = backend.get_added_tokens_decoder()
        # Not the number of tokens: a vocabulary may have holes.
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.strips_before = frozenset(i for i in self.special_ids if added[i].lstrip)
        self.strips_after = frozenset(i for i in self.special_ids if added[i].rstrip)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        _apply_affix_flags(backend, config, self.special_tokens)
        self._is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        texts = sorted((added[i].content for i in self.special_ids), key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def _id_of(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self._backend.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens written in it become their ids."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def vocabulary(self) -> dict[str, int]:
        """The id of every token by its spelling in the vocabulary, special ones too."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    @functools.cached_property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token; n bytes of text make at least n / this tokens."""
        return max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, ids beyond the vocabulary ''."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text; b"" for an id without a token."""
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            letters = _byte_of_letter()
            if all(letter in letters for letter in piece):
                return bytes(letters[letter] for letter in piece)
            return piece.encode()
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("▁", " ").encode()

    def token_text(self, token_id: int) -> str:
        """One token as shown in logprobs: special tokens too, partial characters as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the model's prompt text.

        Raises:
            ChatTemplateError: no template, or it refuses these messages.
        """
        return chat_template.render(
            self.chat_template,
            messages,
            special_tokens=self.special_tokens,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of the rendered conversation; the template alone supplies special tokens.

        A special token spelled out in a message or tool is encoded as plain text, so that no user
        can close a turn or open another. Conversations without one are encoded exactly as
        transformers does.

        Raises:
            ChatTemplateError: no template, or it refuses these messages.
        """
        return self.encode_marked(
            self.render_marked(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=template_kwargs,
            )
        )

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """`render_chat` with marks around every special token that a message or tool spells out.

        Raises:
            ChatTemplateError: no template, or it refuses these messages.
        """
        return self.render_chat(
            _mark(list(messages), self._specials),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=_mark(None if tools is None else list(tools), self._specials),
            template_kwargs=template_kwargs,
        )

    def mark(self, text: str) -> str:
        """`text` as an author's: marks around every special token that it spells out."""
        marked: str = _mark(text, self._specials)
        return marked

    def split_marked(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Marked text as runs of plain text and, by id, the special tokens between them."""
        for piece, is_literal in _pieces(text):
            if is_literal:
                yield piece, None
                continue
            start = 0
            for match in self._specials.finditer(piece):
                token_id = self._backend.token_to_id(match[0])
                yield piece[start : match.start()], None
                yield match[0], token_id
                start = match.end()
            yield piece[start:], None

    def encode_marked(self, text: str, after: int | None = None) -> list[int]:
        """Ids of marked text; special tokens between the marks are encoded as plain text.

        `after` is the id of the token that it follows, which a tokenizer may treat otherwise than
        the beginning of a text.
        """
        ids: list[int] = []
        for piece, is_literal in _pieces(text):
            if is_literal:
                ids += self._encode_literally(piece)
            elif ids:
                ids += self._encode_inside(piece)
            else:
                ids += self._encode_after(after, piece)
        return ids

    def _encode_after(self, token_id: int | None, text: str) -> list[int]:
        if token_id is None:
            return self.encode(text, False)
        if token_id in self.special_ids and text:
            ids = self.encode((self._backend.id_to_token(token_id) or "") + text, False)
            if ids[:1] == [token_id]:
                return ids[1:]
        return self._encode_inside(text)

    def _encode_literally(self, text: str) -> list[int]:
        """Encode a special token's spelling as text: cut in two, neither half matches it."""
        halves = text[:1], text[1:]
        ids = [i for half in halves for i in self._encode_inside(half)]
        if self.special_ids.isdisjoint(ids):
            return ids
        return [i for letter in text for i in self._encode_inside(letter)]

    def _encode_inside(self, text: str) -> list[int]:
        # SentencePiece puts a space before the first piece of a text; behind a newline it does not.
        if not text:
            return []
        newline = self.encode("\n", False)
        ids = self.encode("\n" + text, False)
        return ids[len(newline) :] if ids[: len(newline)] == newline else self.encode(text, False)

    def normalized(self, text: str) -> str:
        """`text` as its tokens' bytes spell it, where the tokenizer rewrites characters first."""
        normalizer = self._backend.normalizer
        if normalizer is None or not self._is_byte_level:
            return text
        rewritten: str = normalizer.normalize_str(text)
        return rewritten

    def stream_decoder(self, prompt_ids: Sequence[int] = ()) -> TokenStream:
        """A decoder for tokens that follow `prompt_ids`, one at a time."""
        if self._is_byte_level:
            return _ByteStream(self)
        return _WindowStream(self, prompt_ids)


class TokenStream:
    """Decodes a sequence token by token; the joined pieces equal the text of the whole.

    Special tokens add nothing. A piece never ends inside a character: what is incomplete is held
    back until the rest arrives or `flush` gives it up as U+FFFD.
    """

    def push(self, token_id: int) -> str:
        """The text that became certain with this token, possibly ""."""
        raise NotImplementedError

    def flush(self) -> str:
        """What was held back; call once, at the end."""
        raise NotImplementedError


class _ByteStream(TokenStream):
    """For byte-level vocabularies, where text is the tokens' bytes: constant work per token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream(TokenStream):
    """For every other vocabulary: the text gained between two decodings of a short window.

    The window keeps the tokens before the new ones, because a decoder may treat the first piece of
    a text specially.
    """

    _CONTEXT = 6  # tokens of the prompt to begin with
    _PATIENCE = 4  # tokens that one character can take; more without a character is not text

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-self._CONTEXT :])
        self._num_shown = len(self._ids)

    def push(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:
            return ""
        self._ids.append(token_id)
        gained = self._gained()
        is_partial = gained.endswith(REPLACEMENT)
        if not gained or (is_partial and len(self._ids) - self._num_shown < self._PATIENCE):
            return ""
        self._ids = self._ids[self._num_shown :] if self._num_shown else self._ids
        self._num_shown = len(self._ids)
        return gained

    def flush(self) -> str:
        return self._gained()

    def _gained(self) -> str:
        shown = self._tokenizer.decode(self._ids[: self._num_shown])
        return self._tokenizer.decode(self._ids)[len(shown) :]


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face model directory.

    Raises:
        StartupError: there is none, or it cannot be read.
    """
    config = _read_json(directory / "tokenizer_config.json")
    path = directory / "tokenizer.json"
    if path.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise StartupError(f"{path} cannot be read ({error}); download it again") from error
    else:
        backend = _convert_slow(directory)
    return Tokenizer(backend, config, _read_template(directory, config))


def _convert_slow(directory: Path) -> tokenizers.Tokenizer:
    """A directory without `tokenizer.json`: let transformers build the fast form."""
    from transformers import AutoTokenizer  # seconds to import, and rarely needed

    try:
        converted = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        backend = converted.backend_tokenizer
    except Exception as error:  # whatever a missing or foreign tokenizer makes of itself
        raise StartupError(
            f"no usable tokenizer in {directory} ({_first_line(error)});"
            " add the model's tokenizer.json"
        ) from error
    if not isinstance(backend, tokenizers.Tokenizer):
        raise StartupError(f"the tokenizer in {directory} has no fast form; add a tokenizer.json")
    return backend


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read ({error}); download it again") from error
    if not isinstance(content, dict):
        raise StartupError(f"{path} is not a JSON object; download it again")
    return content


def _read_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`*_token` entries, each written as text or as an object with `content`."""
    tokens = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens


def _apply_affix_flags(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Honour `add_bos_token` and `add_eos_token` where `tokenizer.json` does otherwise."""
    flags = {role: config.get(f"add_{role}") for role in ("bos_token", "eos_token")}
    if all(flag is None for flag in flags.values()):
        return
    ids = {role: backend.token_to_id(special_tokens.get(role, "")) for role in flags}
    probe = backend.encode("a", add_special_tokens=True).ids
    has = {
        "bos_token": probe[:1] == [ids["bos_token"]],
        "eos_token": probe[-1:] == [ids["eos_token"]],
    }
    wanted = {
        role: has[role] if flags[role] is None or ids[role] is None else bool(flags[role])
        for role in flags
    }
    if wanted == has:
        return
    bos, eos = (special_tokens.get(role, "") for role in ("bos_token", "eos_token"))
    pattern = [bos] * wanted["bos_token"] + ["$A"] + [eos] * wanted["eos_token"]
    used = [(special_tokens[role], ids[role]) for role in flags if wanted[role]]
    backend.post_processor = processors.TemplateProcessing(single=pattern, special_tokens=used)


def _mark(value: Any, specials: re.Pattern[str]) -> Any:
    """Draw marks around special tokens in every text inside `value`."""
    if isinstance(value, str):
        bare = value.replace(_MARK_OPEN, "").replace(_MARK_CLOSE, "")
        return specials.sub(lambda match: f"{_MARK_OPEN}{match[0]}{_MARK_CLOSE}", bare)
    if isinstance(value, Mapping):
        return {key: _mark(item, specials) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mark(item, specials) for item in value]
    return value


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Marked text in pieces without marks; true for what stood between a pair of them.

    A template may have torn a pair apart; the lone mark still keeps its neighbours from joining
    into a special token.
    """
    for n, part in enumerate(_MARKED.split(text)):
        if n % 2:
            yield part, True
        else:
            yield from ((piece, False) for piece in _LONE_MARK.split(part))
