"""`overwinter chat`: a conversation in the terminal that shows what each answer reused."""

from __future__ import annotations

import sys
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, TextIO

import httpx

from api.cli.client import base_url, describe, error_message, headers, iter_events
from api.cli.errors import EXIT_FAILURE, CommandError, complain

HELP = "/reset starts a new conversation, /quit (or Ctrl-D) leaves."
# Prompts may take long to compute on a small machine; a dead server shows as a closed connection.
TIMEOUT = httpx.Timeout(10.0, read=None)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What `overwinter chat` was told; None leaves the choice to the server."""

    url: str
    model: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    api_key: str | None = None


@dataclass(slots=True)
class Answer:
    """One streamed answer; times are monotonic seconds."""

    started: float
    text: str = ""
    first_text: float | None = None
    last_text: float | None = None
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None

    def summary(self) -> str:
        """What was reused and how fast the rest went, in one line."""
        usage = self.usage or {}
        prompt = usage.get("prompt_tokens", 0)
        generated = usage.get("completion_tokens", 0)
        details = usage.get("prompt_tokens_details") or {}
        tiers = details.get("cached_tokens_by_tier") or {}
        shown = ", ".join(f"{tier} {count}" for tier, count in tiers.items())
        line = f"{prompt} prompt tokens, {details.get('cached_tokens', 0)} cached"
        if shown:
            line += f" ({shown})"
        line += f"; {generated} generated"
        rate = self.tokens_per_second(generated)
        if rate is not None:
            line += f", {rate:.1f} tokens/s"
        if self.first_text is not None:
            line += f", first after {self.first_text - self.started:.2f} s"
        return line

    def tokens_per_second(self, generated: int) -> float | None:
        """Rate after the first token; None where there is nothing to measure."""
        if self.first_text is None or self.last_text is None or generated < 2:
            return None
        seconds = self.last_text - self.first_text
        return (generated - 1) / seconds if seconds > 0 else None


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the key by which the server may group them."""

    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)
    key: str = ""

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.key = f"chat-{uuid.uuid4().hex}"
        self.messages = [{"role": "system", "content": self.system}] if self.system else []


class ChatError(Exception):
    """One answer failed; the conversation may go on."""


class Chat:
    """Reads lines, streams answers. One instance per run of the command."""

    def __init__(self, options: ChatOptions, client: httpx.Client, out: TextIO) -> None:
        self.options = options
        self.client = client
        self.out = out
        self.conversation = Conversation(options.system)
        self.model = options.model

    def answer(self, text: str) -> None:
        """Sends `text` as the next turn and prints the answer.

        The turn joins the conversation only with its answer. Raises `ChatError`.
        """
        turn = {"role": "user", "content": text}
        answer = Answer(started=time.monotonic())
        interrupted = False
        try:
            self._stream([*self.conversation.messages, turn], answer)
        except KeyboardInterrupt:
            # Leaving the stream closes its connection, which stops the generation.
            interrupted = True
        except (httpx.HTTPError, httpx.InvalidURL, ConnectionError) as error:
            raise ChatError(describe(error, self.options.url)) from error
        finally:
            if answer.text:
                print(file=self.out)
        print("[interrupted]" if interrupted else f"[{answer.summary()}]", file=self.out)
        if answer.text or not interrupted:
            reply = {"role": "assistant", "content": answer.text}
            self.conversation.messages += [turn, reply]

    def _stream(self, messages: list[dict[str, str]], answer: Answer) -> None:
        if self.model is None:
            self.model = self._served_model()
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "prompt_cache_key": self.conversation.key,
        }
        if self.options.max_tokens is not None:
            body["max_tokens"] = self.options.max_tokens
        if self.options.temperature is not None:
            body["temperature"] = self.options.temperature
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise ChatError(error_message(response.status_code, response.read()))
            for event in iter_events(response):
                self._show(event, answer)

    def _show(self, event: dict[str, Any], answer: Answer) -> None:
        if "error" in event:
            raise ChatError(str(event["error"].get("message", event["error"])))
        answer.usage = event.get("usage") or answer.usage
        for choice in event.get("choices", ()):
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            text = (choice.get("delta") or {}).get("content")
            if not text:
                continue
            answer.last_text = time.monotonic()
            if answer.first_text is None:
                answer.first_text = answer.last_text
            answer.text += text
            self.out.write(text)
            self.out.flush()

    def _served_model(self) -> str:
        response = self.client.get("/v1/models")
        if response.status_code != 200:
            raise ChatError(error_message(response.status_code, response.content))
        models = response.json().get("data") or []
        if not models:
            raise ChatError("the server lists no model: give --model")
        return str(models[0]["id"])


def chat(options: ChatOptions) -> int:
    """Runs the conversation on stdin and stdout until `/quit` or the end of input.

    Returns 0, or 1 if an answer failed and nobody is there to try again (input is not a terminal).
    """
    interactive = sys.stdin.isatty()
    try:
        client = httpx.Client(
            base_url=base_url(options.url), headers=headers(options.api_key), timeout=TIMEOUT
        )
    except httpx.InvalidURL as error:
        raise CommandError(describe(error, options.url)) from error
    with client:
        session = Chat(options, client, sys.stdout)
        if interactive:
            # Line editing and history for input().
            import readline  # noqa: F401

            print(f"Talking to {options.url}. {HELP}")
        while True:
            try:
                line = input("> " if interactive else "").strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                print()
                return 0
            if line == "/quit":
                return 0
            if line == "/reset":
                session.conversation.reset()
                print("[new conversation]")
            elif line.startswith("/"):
                print(f"Unknown command {line.split()[0]}. {HELP}")
            elif line:
                try:
                    session.answer(line)
                except ChatError as error:
                    complain(error)
                    if not interactive:
                        return EXIT_FAILURE
