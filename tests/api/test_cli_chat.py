import io

import pytest

from api.cli.chat import Answer, ChatOptions, chat
from api.cli.errors import CommandError
from tests.api.scripted_server import error, events, scripted

MODELS = (200, b'{"data": [{"id": "first"}, {"id": "second"}]}')


def usage(prompt=40, completion=3, by_tier=None):
    by_tier = by_tier or {"device": 16, "cpu": 0, "disk": 16}
    details = {"cached_tokens": sum(by_tier.values()), "cached_tokens_by_tier": by_tier}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
    }


def answer(*texts, **counts):
    chunks = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
    chunks += [{"choices": [{"delta": {"content": text}}]} for text in texts]
    chunks += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}]
    return (200, events(*chunks, {"choices": [], "usage": usage(**counts)}))


def routes(*answers):
    left = list(answers)
    return {
        "/v1/models": lambda body: MODELS,
        "/v1/chat/completions": lambda body: left.pop(0),
    }


@pytest.fixture
def say(monkeypatch):
    def set_input(*lines):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return set_input


def test_a_conversation(say, capsys):
    say("Hello", "", "Again")
    with scripted(routes(answer("Hi", " there"), answer("Yes"))) as server:
        options = ChatOptions(
            server.url + "/v1/", system="Be brief.", max_tokens=5, temperature=0.0, api_key="k"
        )
        assert chat(options) == 0
    first, second = server.bodies("/v1/chat/completions")
    assert first["model"] == "first"
    assert first["stream"] is True
    assert first["stream_options"] == {"include_usage": True}
    assert (first["max_tokens"], first["temperature"]) == (5, 0.0)
    system = {"role": "system", "content": "Be brief."}
    assert first["messages"] == [system, {"role": "user", "content": "Hello"}]
    assert second["messages"] == [
        system,
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi there"},
        {"role": "user", "content": "Again"},
    ]
    assert first["prompt_cache_key"] == second["prompt_cache_key"]
    assert {key for _, _, key in server.requests} == {"Bearer k"}
    out = capsys.readouterr().out
    assert out.startswith(
        "Hi there\n[40 prompt tokens, 32 cached (device 16, cpu 0, disk 16); 3 generated, "
    )
    assert "\nYes\n[40 prompt tokens" in out


def test_reset_and_quit(say, capsys):
    say("One", "/reset", "Two", "/what", "/quit", "Three")
    with scripted(routes(answer("1"), answer("2"))) as server:
        assert chat(ChatOptions(server.url, model="second")) == 0
    first, second = server.bodies("/v1/chat/completions")
    assert first["model"] == "second"
    assert second["messages"] == [{"role": "user", "content": "Two"}]
    assert first["prompt_cache_key"] != second["prompt_cache_key"]
    assert "max_tokens" not in first
    assert "temperature" not in first
    out = capsys.readouterr().out
    assert "[new conversation]" in out
    assert "Unknown command /what." in out


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ((503, error("The model is loading.")), "HTTP 503: The model is loading."),
        ((500, b"<html>"), "HTTP 500: <html>"),
        ((200, events({"error": {"message": "draining"}})), "draining"),
        (
            (200, events({"choices": [{"delta": {"content": "Ha"}}]}, done=False)),
            "the server closed the stream before its end",
        ),
    ],
)
def test_a_failed_answer_ends_a_piped_conversation(say, capsys, failure, message):
    say("Hello", "Never sent")
    with scripted(routes(failure)) as server:
        assert chat(ChatOptions(server.url)) == 1
    assert len(server.bodies("/v1/chat/completions")) == 1
    err = capsys.readouterr().err
    assert err.startswith("overwinter: error: ")
    assert err.endswith(f"{message}\n")


def test_nobody_there(say, capsys):
    say("Hello")
    with scripted({}) as server:
        pass
    assert chat(ChatOptions(server.url)) == 1
    assert "start a server with `overwinter serve`" in capsys.readouterr().err


def test_an_address_that_is_none(say, capsys):
    say("Hello")
    assert chat(ChatOptions("ftp://x")) == 1
    assert "--url ftp://x is not an http:// or https:// address" in capsys.readouterr().err
    with pytest.raises(CommandError, match="is not an http:// or https:// address"):
        chat(ChatOptions("http://localhost:http"))


def test_the_rate_counts_tokens_after_the_first():
    told = Answer(started=1.0, first_text=3.0, last_text=5.0, usage=usage(completion=11))
    assert told.tokens_per_second(11) == 5.0
    assert told.summary() == (
        "40 prompt tokens, 32 cached (device 16, cpu 0, disk 16); 11 generated, "
        "5.0 tokens/s, first after 2.00 s"
    )
    assert told.tokens_per_second(1) is None
    assert Answer(started=1.0).summary() == "0 prompt tokens, 0 cached; 0 generated"
