"""A chat client sends text back, and every turn finds all that the turn before has left."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.config import EngineConfig
from engine.tokenizer import Tokenizer
from tests.api.live_server import LiveServer
from tests.running_engine import computes_ahead
from tests.tiny_models import BOS, EOS

EOS_ID = 2
NUM_TURNS = 6
_salts = (f"conversation {number}" for number in itertools.count())


@dataclass
class Turn:
    cached: int
    committed: int  # by the turn before, in whole blocks
    ahead: int  # once idle time has added what the template does, in whole blocks
    prompt_ids: list[int]
    was_known: bool  # the prompt begins with all ids of the turn before
    finish_reason: str


def in_letters(tokenizer: Tokenizer, eos_bias: float = 0.0) -> dict[str, float]:
    """The `logit_bias` that makes a random model write text, and in letters alone: ids that no
    tokenizer would choose for it."""
    letters = {bytes([letter]) for letter in b"abcdefghijklmnopqrstuvwxyz "}
    others = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) not in letters]
    return {**{str(token_id): -100.0 for token_id in others}, str(EOS_ID): eos_bias}


def at_rest(server: LiveServer) -> None:
    server.wait_until(lambda: not computes_ahead(server.engine) and server.num_running == 0)
    server.wait_until(
        lambda: not any(tier.pending_saves for tier in server.engine.stats().tiers.values())
    )


class Chat:
    """One conversation through the OpenAI client, at temperature 1."""

    def __init__(self, **extra: Any) -> None:
        self.messages: list[dict[str, str]] = []
        self._extra = {"return_token_ids": True, **extra}
        self._known: list[int] = []

    def turn(self, server: LiveServer) -> Turn:
        tokenizer = server.engine.tokenizer
        number = len(self.messages) // 2
        self.messages.append({"role": "user", "content": f"Question {number}?"})
        with server.openai() as client:
            answer = client.chat.completions.create(
                model="tiny",
                messages=self.messages,  # type: ignore[arg-type]
                temperature=1.0,
                seed=number,
                frequency_penalty=1.0,
                max_tokens=40,
                logit_bias=in_letters(tokenizer, 3.0 if number % 2 else -100.0),  # type: ignore[arg-type]
                extra_body=self._extra,
            ).model_dump()
        (choice,) = answer["choices"]
        known, prompt_ids = self._known, answer["prompt_token_ids"]
        glue = f"\n{BOS}user\n" if known[-1:] == [EOS_ID] else f"{EOS}\n{BOS}user\n"
        ahead = len(known) + len(tokenizer.encode(glue, False)) if known else 0
        block_size = server.engine.config.block_size
        turn = Turn(
            cached=answer["usage"]["prompt_tokens_details"]["cached_tokens"],
            committed=max(0, len(known) - 1) // block_size * block_size,
            ahead=ahead // block_size * block_size,
            prompt_ids=prompt_ids,
            was_known=prompt_ids[: len(known)] == known,
            finish_reason=choice["finish_reason"],
        )
        self._known = prompt_ids + choice["token_ids"]
        self.messages.append({"role": "assistant", "content": choice["message"]["content"]})
        at_rest(server)
        return turn


def test_every_turn_finds_the_turn_before_also_after_a_restart(
    engine_config: EngineConfig, tmp_path: Path
) -> None:
    config = replace(
        engine_config,
        disk_tier=tmp_path / "kv",
        disk_tier_size=256 << 20,
        load_policy="always",
    )
    chat, turns = Chat(), []
    with LiveServer(config) as server:
        turns += [chat.turn(server) for _ in range(NUM_TURNS // 2)]
    with LiveServer(config) as server:
        assert server.engine.transcripts.stats().entries == NUM_TURNS // 2
        turns += [chat.turn(server) for _ in range(NUM_TURNS // 2)]
        stats = server.engine.stats()
        assert (stats.transcript_hits, stats.transcript_misses) == (NUM_TURNS // 2, 0)
        reused = stats.transcript_tokens
        page = httpx.get(f"{server.url}/metrics").text
        labels = '{engine="0",model_name="tiny"}'
        assert f"vllm:transcript_reused_tokens_total{labels} {reused}.0" in page
        assert f"vllm:transcript_entries{labels} {NUM_TURNS}.0" in page
        assert stats.idle_prefills >= 1
        assert stats.finished["length"] + stats.finished["stop"] == NUM_TURNS // 2
    assert [turn.cached for turn in turns] == [turn.ahead for turn in turns]
    assert all(turn.ahead >= turn.committed > 0 for turn in turns[1:])
    assert all(turn.was_known for turn in turns)
    assert {turn.finish_reason for turn in turns} == {"stop", "length"}


def test_without_the_map_chats_are_read_by_the_tokenizer_alone(
    engine_config: EngineConfig,
) -> None:
    chat = Chat()
    with LiveServer(replace(engine_config, transcript_cache="off")) as server:
        turns = []
        for _ in range(3):
            messages = [*chat.messages, {"role": "user", "content": f"Question {len(turns)}?"}]
            turns.append(chat.turn(server))
            assert turns[-1].prompt_ids == server.engine.tokenizer.encode_chat(messages)
        assert server.engine.stats().idle_prefills == 0
    assert sum(turn.cached for turn in turns) < sum(turn.committed for turn in turns)


class Asked:
    """Answers of the server that the tests share, in a salt of its own."""

    def __init__(self, server: LiveServer, http: httpx.Client) -> None:
        self._server, self._http = server, http
        self.salt = next(_salts)
        self._bias = in_letters(server.engine.tokenizer, -100.0)

    def body(self, messages: Sequence[dict[str, str]], **fields: Any) -> dict[str, Any]:
        return {
            "messages": list(messages),
            "max_tokens": 30,
            "seed": 5,
            "frequency_penalty": 1.0,
            "logit_bias": self._bias,
            "return_token_ids": True,
            "cache_salt": self.salt,
            **fields,
        }

    def __call__(self, messages: Sequence[dict[str, str]], **fields: Any) -> dict[str, Any]:
        body = self.body(messages, **fields)
        answer = self._http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        at_rest(self._server)
        whole: dict[str, Any] = answer.json()
        return whole

    def after(self, messages: Sequence[dict[str, str]], text: str, **fields: Any) -> list[int]:
        """Prompt ids of the turn after `text`."""
        said = {"role": "assistant", "content": text}
        again = [*messages, said, {"role": "user", "content": "And?"}]
        ids: list[int] = self(again, max_tokens=1, **fields)["prompt_token_ids"]
        return ids


@pytest.fixture
def ask(server: LiveServer, http: httpx.Client) -> Asked:
    return Asked(server, http)


HELLO = [{"role": "user", "content": "Hello"}]


def test_every_choice_can_be_gone_on_from(ask: Asked) -> None:
    answer = ask(HELLO, n=3)
    outputs = [choice["token_ids"] for choice in answer["choices"]]
    assert len({tuple(output) for output in outputs}) == 3
    for choice in answer["choices"]:
        ids = ask.after(HELLO, choice["message"]["content"])
        known = answer["prompt_token_ids"] + choice["token_ids"]
        assert ids[: len(known)] == known


def test_an_answer_cut_at_a_stop_string_goes_on_from_the_cut(ask: Asked) -> None:
    whole = ask(HELLO)["choices"][0]
    tokenizer = ask._server.engine.tokenizer
    ends = [tokenizer.token_text(token_id) for token_id in whole["token_ids"][:9]]
    answer = ask(HELLO, stop=ends[8])
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    kept = choice["token_ids"][: len(choice["token_ids"]) - 1]
    assert choice["message"]["content"] == tokenizer.decode(kept)
    known = answer["prompt_token_ids"] + kept
    ids = ask.after(HELLO, choice["message"]["content"])
    assert ids[: len(known) + 1] == [*known, EOS_ID]


def test_what_a_leaving_client_has_read_is_kept(ask: Asked, http: httpx.Client) -> None:
    body = ask.body(HELLO, stream=True, max_tokens=900)
    text, ids = "", []
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choice = httpx.Response(200, content=line[6:]).json()["choices"][0]
                text += choice["delta"].get("content") or ""
                ids += choice["token_ids"]
            if len(ids) >= 8:
                break
    at_rest(ask._server)
    prompt = ask._server.engine.tokenizer.encode_chat(HELLO)
    ids_after = ask.after(HELLO, text)
    assert ids_after[: len(prompt) + len(ids)] == [*prompt, *ids]


def test_two_salts_share_no_transcript(ask: Asked) -> None:
    text = ask(HELLO)["choices"][0]["message"]["content"]
    said = [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
    plain = ask._server.engine.tokenizer.encode_chat(said)
    assert ask.after(HELLO, text) != plain
    assert ask.after(HELLO, text, cache_salt=next(_salts)) == plain
    assert ask.after(HELLO, text, cache_salt=None) == plain


def test_an_answer_that_failed_is_not_kept(
    ask: Asked, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ask._server.engine._core._runner
    plain_execute, num_passes = runner.execute, 0

    def execute(step: Any) -> Any:
        nonlocal num_passes
        num_passes += bool(step.sequences)
        output = plain_execute(step)
        return replace(output, error=RuntimeError("tired")) if num_passes == 6 else output

    monkeypatch.setattr(runner, "execute", execute)
    before = ask._server.engine.transcripts.stats().entries
    assert http.post("/v1/chat/completions", json=ask.body(HELLO)).status_code == 500
    monkeypatch.undo()
    at_rest(ask._server)
    assert ask._server.engine.transcripts.stats().entries == before


def test_special_tokens_around_a_conversation_stay_around_it(ask: Asked) -> None:
    answer = ask(HELLO, add_special_tokens=True)
    (choice,) = answer["choices"]
    ids = ask.after(HELLO, choice["message"]["content"], add_special_tokens=True)
    known = answer["prompt_token_ids"] + choice["token_ids"]
    assert ids[: len(known)] == known


def test_a_reset_of_everything_forgets_transcripts(ask: Asked, http: httpx.Client) -> None:
    text = ask(HELLO)["choices"][0]["message"]["content"]
    assert http.post("/cache/reset", json={"tiers": ["device"]}).status_code == 200
    assert ask._server.engine.transcripts.stats().entries > 0
    assert http.post("/cache/reset").status_code == 200
    assert ask._server.engine.transcripts.stats().entries == 0
    said = [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
    assert ask.after(HELLO, text) == ask._server.engine.tokenizer.encode_chat(said)


def test_explaining_counts_no_lookup(ask: Asked, http: httpx.Client) -> None:
    text = ask(HELLO)["choices"][0]["message"]["content"]
    said = [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
    before = ask._server.engine.transcripts.stats()
    assert http.post("/cache/explain", json=ask.body(said)).status_code == 200
    after = ask._server.engine.transcripts.stats()
    assert (after.hits, after.misses, after.reused_tokens) == (
        before.hits,
        before.misses,
        before.reused_tokens,
    )
    ask(said)
    assert ask._server.engine.transcripts.stats().hits == before.hits + 1
