"""Text comes as early as it is safe, joins to the decoded whole, and never shows a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.decoders import DecodeStream

from engine.detokenizer import Detokenizer, StopMatcher

CORPUS = [
    "the stop string ends the text, the near miss does not",
    "héllo wörld, naïve café; 東京タワー と 大阪城; 🙂🙃👩‍👩‍👧‍👦 é ñ",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level BPE, so that a character may span tokens and a token several characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


class Stream:
    """A TokenStream over the tokenizers library's own incremental decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.decoder = DecodeStream(skip_special_tokens=True)
        self.token_ids: list[int] = []
        self.text = ""

    def push(self, token_id: int) -> str:
        self.token_ids.append(token_id)
        new = self.decoder.step(self.tokenizer, token_id) or ""
        self.text += new
        return new

    def flush(self) -> str:
        return self.tokenizer.decode(self.token_ids)[len(self.text) :]


class Script:
    """A TokenStream that shows `chunks[token_id]` for each token and `rest` at the end."""

    def __init__(self, chunks: list[str], rest: str = "") -> None:
        self.chunks = chunks
        self.rest = rest

    def push(self, token_id: int) -> str:
        return self.chunks[token_id]

    def flush(self) -> str:
        return self.rest


def run(chunks: list[str], stop: list[str], min_tokens: int = 0, rest: str = ""):
    """Texts shown per token, the stop string found, and the flushed rest."""
    detokenizer = Detokenizer(Script(chunks, rest), stop, min_tokens)
    shown = []
    found = None
    for token_id in range(len(chunks)):
        text, found = detokenizer.push(token_id)
        shown.append(text)
        if found is not None:
            break
    return shown, found, detokenizer.flush()


@pytest.mark.parametrize(
    ("chunks", "stop", "shown", "found", "rest"),
    [
        pytest.param(["ab", "c"], [], ["ab", "c"], None, "", id="no stop: nothing held"),
        pytest.param(["aXY", "b"], ["XY"], ["a"], "XY", "", id="inside one token"),
        pytest.param(["aX", "Y"], ["XY"], ["a", ""], "XY", "", id="over two tokens"),
        pytest.param(["aS", "T", "O", "P!"], ["STOP"], ["a", "", "", ""], "STOP", "", id="four"),
        pytest.param(["aX", "Z"], ["XY"], ["a", "XZ"], None, "", id="near miss"),
        pytest.param(["aX", "X", "Y"], ["XY"], ["a", "X", ""], "XY", "", id="miss, then hit"),
        pytest.param(["aX"], ["XY"], ["a"], None, "X", id="near miss at the end"),
        pytest.param(["aXYb"], ["XY"], ["a"], "XY", "", id="text after the stop is dropped"),
        pytest.param(["abcd"], ["bcd", "c"], ["ab"], "c", "", id="the earliest end wins"),
        pytest.param(["abcd"], ["c", "bc"], ["a"], "bc", "", id="of equal ends the longest"),
        pytest.param(["ab", "c"], ["abcd", "bc"], ["", "a"], "bc", "", id="held part shown at hit"),
        pytest.param(["aab", "aac"], ["aabaac"], ["", ""], "aabaac", "", id="overlapping itself"),
        pytest.param(["aaba", "abaac"], ["aabaac"], ["", "aab"], "aabaac", "", id="falls back"),
        pytest.param(["X", "", "Y"], ["XY"], ["", "", ""], "XY", "", id="a token without text"),
        pytest.param(["XYXY"], ["XY", "XY"], [""], "XY", "", id="named twice"),
    ],
)
def test_stop_strings(chunks, stop, shown, found, rest):
    assert run(chunks, stop) == (shown, found, rest)


def test_a_stop_string_counts_from_the_min_tokens_th_token_on():
    chunks = ["aX", "Yb", "X", "Y", "c"]
    assert run(chunks, ["XY"], min_tokens=2) == (["a", ""], "XY", "")
    assert run(chunks, ["XY"], min_tokens=3) == (["a", "XYb", "", ""], "XY", "")
    assert run(chunks, ["XY"], min_tokens=4) == (["a", "XYb", "", ""], "XY", "")
    assert run(chunks, ["XY"], min_tokens=5) == (["a", "XYb", "", "XY", "c"], None, "")


def test_a_stop_string_that_came_too_early_may_begin_the_next_one():
    assert run(["XaX", "aX", "b"], ["XaX"], min_tokens=2) == (["Xa", ""], "XaX", "")
    assert run(["XaX", "b"], ["XaX"], min_tokens=2) == (["Xa", "Xb"], None, "")


def test_flush_cuts_at_a_stop_string_that_the_rest_completes():
    assert run(["aX"], ["X\ufffd"], rest="\ufffdb") == (["a"], None, "")
    assert run(["aX"], ["XY"], rest="\ufffd") == (["a"], None, "X\ufffd")
    assert run(["aX"], ["X\ufffd"], rest="\ufffd", min_tokens=2) == (["a"], None, "X\ufffd")


def test_flush_gives_the_rest_once():
    detokenizer = Detokenizer(Script(["aX"]), ["XY"], 0)
    assert detokenizer.push(0) == ("a", None)
    assert detokenizer.flush() == "X"
    assert detokenizer.flush() == ""


def test_a_token_after_the_stop_is_refused():
    detokenizer = Detokenizer(Script(["XY", "a"]), ["XY"], 0)
    assert detokenizer.push(0) == ("", "XY")
    with pytest.raises(RuntimeError, match="after the text had ended"):
        detokenizer.push(1)


@given(st.text("ab", min_size=1, max_size=6), st.text("ab", max_size=30))
def test_matcher_matches_its_definition(stop, text):
    matcher = StopMatcher(stop)
    for end, character in enumerate(text, start=1):
        assert matcher.advance(character) == text[:end].endswith(stop)
        longest = max(n for n in range(len(stop)) if text[:end].endswith(stop[:n]))
        assert matcher.num_held == longest


def reference_cut(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that is completed first, the longest of equal ends."""
    for end in range(1, len(text) + 1):
        completed = [s for s in stop if text[:end].endswith(s)]
        if completed:
            longest = max(completed, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_the_result_does_not_depend_on_the_tokens(chunks, stop):
    shown, found, rest = run(chunks, stop)
    assert ("".join(shown) + rest, found) == reference_cut("".join(chunks), stop)


characters = st.one_of(
    st.sampled_from(
        ["é", "ñ", "🙂", "👩‍👩‍👧‍👦", "🇩🇪", "東京", "ー", "한", "ह्न", "\u0301", "\ufe0f", "\u200d"]
    ),
    st.sampled_from(["stop", "sto", " the", "\n\n", " ", "top"]),
    st.characters(exclude_categories=["Cs"]),
)


@given(
    st.lists(characters, max_size=25).map("".join),
    st.lists(st.lists(characters, min_size=1, max_size=2).map("".join), max_size=3),
    st.integers(0, 3),
)
def test_streamed_text_is_the_decoded_text_cut_at_the_first_stop(tokenizer, text, stop, cut):
    token_ids = tokenizer.encode(text).ids
    token_ids = token_ids[: len(token_ids) - cut]  # may end inside a character
    detokenizer = Detokenizer(Stream(tokenizer), stop, 0)
    shown = ""
    found = None
    for token_id in token_ids:
        new, found = detokenizer.push(token_id)
        shown += new
        assert not any(s in shown for s in stop)
        assert "\ufffd" not in new or "\ufffd" in text
        if found is not None:
            break
    shown += detokenizer.flush()
    expected, expected_stop = reference_cut(tokenizer.decode(token_ids), stop)
    assert shown == expected
    # A stop string that only the flushed U+FFFD completes cuts the text, but ended no generation.
    assert found == expected_stop or (found is None and "\ufffd" in expected_stop)


def test_an_incomplete_character_is_held_back(tokenizer):
    token_ids = tokenizer.encode("a\U0001f9ca").ids  # not in the corpus: a token for each byte
    assert len(token_ids) >= 4
    detokenizer = Detokenizer(Stream(tokenizer), [], 0)
    shown = [detokenizer.push(token_id)[0] for token_id in token_ids]
    assert shown[0] == "a"
    assert shown[1:] == [""] * (len(token_ids) - 2) + ["\U0001f9ca"]
    cut = Detokenizer(Stream(tokenizer), [], 0)
    assert [cut.push(token_id)[0] for token_id in token_ids[:-1]] == ["a"] + [""] * (
        len(token_ids) - 2
    )
    assert cut.flush() == "\ufffd"
