"""How token ids spell a text: bytes in which nobody can forge a special token.

    <|im_start|>user\nHi          0xff "1" 0xff  "user\nHi"         0xff never occurs in UTF-8
    the same typed by a user      "<|im_start|>user\nHi"

Marked text (see `Tokenizer.render_marked`) and token ids are both brought into this form. Ids that
spell what a text spells are an encoding of that text, whatever ids the tokenizer would have chosen;
special tokens stand where the template put them and nowhere else.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

_FENCE = b"\xff"
_SPECIAL = re.compile(rb"\xff([0-9]+)\xff")
_SPECIAL_AND_SPACE = re.compile(rb"(\xff[0-9]+\xff) ")


class Speller:
    """Spellings by one tokenizer. Immutable in effect, and safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces = _Pieces(tokenizer)

    def of_text(self, marked: str) -> bytes:
        """What marked text spells."""
        tokenizer = self._tokenizer
        parts: list[bytes] = []
        strips_next = False
        for text, token_id in tokenizer.split_marked(marked):
            if token_id is not None:
                if token_id in tokenizer.strips_before and parts:
                    parts[-1] = parts[-1].rstrip()
                parts.append(self._pieces[token_id])
                strips_next = token_id in tokenizer.strips_after
            elif text:
                plain = text.lstrip() if strips_next else text
                parts.append(tokenizer.normalized(plain).encode("utf-8", "surrogatepass"))
                strips_next = False
        return b"".join(parts)

    def of_ids(self, token_ids: Sequence[int]) -> bytes:
        """What token ids spell from the beginning of a text."""
        spelling = b"".join(map(self._pieces.__getitem__, token_ids))
        at_start, after_special = self._adds_space
        if after_special:
            spelling = _SPECIAL_AND_SPACE.sub(rb"\1", spelling)
        return spelling[1:] if at_start and spelling[:1] == b" " else spelling

    def match(
        self, token_ids: Sequence[int], spelling: bytes, start: int, after: int
    ) -> tuple[int, int]:
        """How many leading `token_ids` spell on from `start`, behind the token `after`, and where
        they end.

            spelling  ... start |--- 1 ---|--- 2 ---|-- depart

        Ends where text could go on from: between two characters, and where ordinary text follows
        an ordinary token, one token earlier, because the last one may stand for the beginning of a
        longer word. That costs nothing: the last token of an answer was never computed.
        """
        special_ids, (_, after_special) = self._tokenizer.special_ids, self._adds_space
        ends = [start]
        position, previous = start, after
        for token_id in token_ids:
            piece = self._pieces[token_id]
            if after_special and previous in special_ids:
                piece = piece.removeprefix(b" ")
            if not spelling.startswith(piece, position):
                break
            position, previous = position + len(piece), token_id
            ends.append(position)
        count = len(ends) - 1
        follows = spelling[position : position + 1]
        if count and previous not in special_ids and follows not in (b"", _FENCE):
            count -= 1
        while count and _is_inside_character(spelling, ends[count]):
            count -= 1
        return count, ends[count]

    def encode(self, spelling: bytes, after: int) -> list[int]:
        """Ids of what is spelled, by the tokenizer's own rules, behind the token `after`."""
        text = ""
        for n, part in enumerate(_SPECIAL.split(spelling)):
            if n % 2:
                text += self._tokenizer.token_text(int(part))
            else:
                text += self._tokenizer.mark(part.decode("utf-8", "surrogatepass"))
        return self._tokenizer.encode_marked(text, after)

    @functools.cached_property
    def _adds_space(self) -> tuple[bool, bool]:
        """Whether the tokenizer puts a space before a text, and before one behind a special token;
        such a space is not part of what the tokens spell."""
        tokenizer = self._tokenizer
        at_start = tokenizer.encode("x", False)
        is_added = bool(at_start) and tokenizer.token_bytes(at_start[0]).startswith(b" ")
        special_id = min(tokenizer.special_ids, default=None)
        if special_id is None:
            return is_added, False
        behind = tokenizer.encode_marked("x", special_id)
        return is_added, bool(behind) and tokenizer.token_bytes(behind[0]).startswith(b" ")


def _is_inside_character(spelling: bytes, position: int) -> bool:
    return b"\x80" <= spelling[position : position + 1] < b"\xc0"


class _Pieces(dict[int, bytes]):
    """By id, what one token adds to a spelling; filled as it is asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        if token_id in self._tokenizer.special_ids:
            piece = _FENCE + str(token_id).encode() + _FENCE
        else:
            # A vocabulary of bytes has one for 0xff. No text holds it, so no spelling may.
            piece = self._tokenizer.token_bytes(token_id).replace(_FENCE, b"\xfe")
        self[token_id] = piece
        return piece
