"""The pre-tokenizer kinds of GGUF vocabularies: how text is cut before byte-pair merging.

A vocabulary with the wrong cuts still tokenises everything, only differently from how the model was
trained, so a kind that is not listed is refused. The kinds are those whose cuts the tests hold
against golden tokenisations, plus other names of the same rules.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from engine.errors import StartupError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)
_CJK = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
# deepseek-llm lists its letters one by one: those with case, of the scripts that have case.
_DEEPSEEK_LETTERS = (
    r"[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}"
    r"\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}"
    r"\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}"
    r"\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}"
    r"\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}"
    r"\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}"
    r"\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}"
    r"\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}"
    r"\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}"
    r"\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}"
    r"\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}"
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}"
    r"\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}"
    r"\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}"
    r"\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}"
    r"\x{1E900}-\x{1E943}]+"
)
_DEEPSEEK_PUNCTUATION = (
    r"[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizerKind:
    """One rule: each of `splits` cuts what the ones before left; then bytes are mapped to letters.

    `gpt2_words` says whether GPT-2's own word pattern is the last cut.
    """

    splits: tuple[str, ...] = ()
    gpt2_words: bool = False
    nfc: bool = False  # text is composed first
    ignore_merges: bool = False  # a word that is a token is taken whole, whatever the merges say
    adds_bos: bool = False  # unless the file says otherwise

    def build(self) -> PreTokenizer:
        """The rule as a pre-tokenizer of the `tokenizers` library."""
        cuts: list[PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.splits
        ]
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2_words))
        return pre_tokenizers.Sequence(cuts)


_GPT2 = PreTokenizerKind(gpt2_words=True)
_GPT_NEOX = PreTokenizerKind(gpt2_words=True, nfc=True)
_DIGITS = PreTokenizerKind(splits=(r"\p{N}",), gpt2_words=True)
_LLAMA3_KIND = PreTokenizerKind(splits=(_LLAMA3,), ignore_merges=True, adds_bos=True)
_QWEN2_KIND = PreTokenizerKind(splits=(_QWEN2,), nfc=True)

KINDS: dict[str, PreTokenizerKind] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT_NEOX,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": PreTokenizerKind(splits=(r"\p{N}",), gpt2_words=True, nfc=True),
    "llama3": _LLAMA3_KIND,
    "llama-v3": _LLAMA3_KIND,
    "llama-bpe": _LLAMA3_KIND,
    "falcon": PreTokenizerKind(
        splits=(
            r"[\p{P}\$\+<=>\^~\|`]+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
            r"[0-9][0-9][0-9]",
        )
    ),
    "qwen2": _QWEN2_KIND,
    "deepseek-r1-qwen": _QWEN2_KIND,
    "qwen35": PreTokenizerKind(splits=(_QWEN35,)),  # its goldens keep combining marks apart
    "tekken": PreTokenizerKind(splits=(_TEKKEN,), ignore_merges=True, adds_bos=True),
    "deepseek-llm": PreTokenizerKind(
        splits=(
            r"[\r\n]",
            r"\s?" + _DEEPSEEK_LETTERS,
            r"\s?" + _DEEPSEEK_PUNCTUATION,
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizerKind(
        splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
    ),
}


def pre_tokenizer_kind(name: str) -> PreTokenizerKind:
    """The rule that GGUF metadata names in `tokenizer.ggml.pre`.

    Raises:
        StartupError: the kind is not known here.
    """
    try:
        return KINDS[name]
    except KeyError:
        raise StartupError(
            f"pre-tokenizer {name!r} of this GGUF is not known, so its text would be cut wrongly;"
            f" use the model's Hugging Face directory, or a GGUF of kind {', '.join(sorted(KINDS))}"
        ) from None
