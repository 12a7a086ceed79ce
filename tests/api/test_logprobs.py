"""Log probabilities as JSON: collisions, infinities, offsets."""

from __future__ import annotations

import math

import pytest

from api.logprobs import LOWEST, chat_logprobs, completion_logprobs, positions
from engine.outputs import Logprob, TokenLogprobs
from engine.tokenizer import Tokenizer, load_tokenizer
from tests.tiny_models import make_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer(directory)
    return load_tokenizer(directory)


def test_offsets_go_on_where_the_last_chunk_ended(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The store keeps")
    texts = [tokenizer.token_text(token) for token in ids]
    entries = positions(TokenLogprobs(token, -1.0, 1) for token in ids)
    whole, end = completion_logprobs(tokenizer, entries, 5)
    assert end == 5 + len("The store keeps")
    assert whole["tokens"] == texts
    first, middle = completion_logprobs(tokenizer, entries[:1], 5)
    rest, _ = completion_logprobs(tokenizer, entries[1:], middle)
    assert {name: first[name] + rest[name] for name in whole} == whole


def test_of_two_alternatives_with_one_text_the_likelier_stays(tokenizer: Tokenizer) -> None:
    halves = [token for token in range(384) if tokenizer.token_text(token) == "\ufffd"]
    one, two, drawn = halves[:3]
    top = (Logprob(one, -0.5, 1), Logprob(two, -1.5, 2))
    entry = TokenLogprobs(drawn, -7.0, 9, top)
    body, _ = completion_logprobs(tokenizer, positions([entry]), 0)
    assert body["top_logprobs"] == [{"\ufffd": -0.5}]
    assert body["token_logprobs"] == [-7.0]


def test_minus_infinity_has_a_number(tokenizer: Tokenizer) -> None:
    entry = TokenLogprobs(50, -math.inf, 384, (Logprob(51, -math.inf, 2),))
    body, _ = completion_logprobs(tokenizer, positions([entry]), 0)
    assert body["token_logprobs"] == [LOWEST]
    assert set(body["top_logprobs"][0].values()) == {LOWEST}
    (content,) = chat_logprobs(tokenizer, [entry])["content"]
    assert content["logprob"] == content["top_logprobs"][0]["logprob"] == LOWEST


def test_half_a_character_has_its_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("漢")
    entries = [TokenLogprobs(token, -1.0, 1) for token in ids]
    content = chat_logprobs(tokenizer, entries)["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]) == "漢".encode()
