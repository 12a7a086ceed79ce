"""Passages of real text found on this disk: none is handed out twice, no two share a paragraph."""

from __future__ import annotations

import random
import re
import sysconfig
from collections import Counter
from pathlib import Path
from pydoc_data import topics

_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_WORD = re.compile(r"[A-Za-z]+")
# What a word is replaced by where a text is to be edited; none of them is a word of the texts.
NAMES = ("Bramble", "Kestrel", "Marigold", "Juniper", "Thistle", "Sorrel", "Lantern", "Pebble")


class Passages:
    """A deck of paragraphs, shuffled by a seed and dealt without replacement.

    They are this project's documents, the language reference that `pydoc` reads from, and the
    docstrings of the standard library: about 200,000 words.
    """

    def __init__(self, seed: int) -> None:
        self._paragraphs = sorted(_paragraphs())
        random.Random(seed).shuffle(self._paragraphs)

    def take(self, num_words: int) -> str:
        """`num_words` words in a row; SystemExit when no more text is left."""
        words: list[str] = []
        while len(words) < num_words:
            if not self._paragraphs:
                raise SystemExit("no text is left that was not used: ask for fewer pairs")
            words += self._paragraphs.pop().split()
        return " ".join(words[:num_words])


def rename(passage: str, rng: random.Random) -> tuple[str, str, str]:
    """A word of `passage` that occurs in it more than once if any does, a name, and the passage
    with the one replaced by the other."""
    counts = Counter(word for word in _WORD.findall(passage) if len(word) > 4)
    if not counts:
        counts = Counter(_WORD.findall(passage))
    most = min(2, max(counts.values()))
    old = rng.choice(sorted(word for word, count in counts.items() if count >= most))
    new = rng.choice(NAMES)
    return old, new, re.sub(rf"\b{old}\b", new, passage)


def _paragraphs() -> set[str]:
    texts = [*topics.topics.values()]
    root = Path(__file__).resolve().parent.parent
    texts += [path.read_text() for path in (root / "README.md", *(root / "docs").glob("*.md"))]
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in library.rglob("*.py"):
        if not {"test", "tests", "idlelib", "site-packages"} & set(path.parts):
            texts += _DOCSTRING.findall(path.read_text(errors="replace"))
    blocks = (" ".join(block.split()) for text in texts for block in re.split(r"\n\s*\n", text))
    return {block for block in blocks if _is_prose(block)}


def _is_prose(block: str) -> bool:
    """Sentences rather than code, tables or lists of names."""
    words = block.split()
    plain = sum(word.strip(".,;:()\"'`").isalpha() for word in words)
    return block.isascii() and len(words) >= 15 and plain > 0.75 * len(words) and ">>>" not in block
