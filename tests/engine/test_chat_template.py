"""Templates see what transformers shows them and nothing they could break out with."""

from __future__ import annotations

from typing import Any

import pytest

from engine.chat_template import ChatTemplateError, render

USER = [{"role": "user", "content": "hi"}]


def text(source: str | None, messages: Any = USER, **options: Any) -> str:
    options.setdefault("add_generation_prompt", False)
    return render(source, messages, special_tokens={"bos_token": "<s>"}, **options)


def test_special_tokens_and_template_kwargs_are_variables() -> None:
    assert text("{{ bos_token }}{{ x }}", template_kwargs={"x": 7}) == "<s>7"


def test_template_kwargs_cannot_replace_the_messages() -> None:
    assert text("{{ messages[0].content }}", template_kwargs={"messages": []}) == "hi"


def test_blocks_are_trimmed_as_transformers_does() -> None:
    assert text(
        "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}"
    ) == ("user\n")


def test_tojson_leaves_html_and_unicode_alone() -> None:
    assert text("{{ tools | tojson }}", tools=[{"a": "<é>"}]) == '[{"a": "<é>"}]'
    assert text("{{ tools | tojson(indent=1) }}", tools=[{"a": 1}]) == '[\n {\n  "a": 1\n }\n]'


def test_generation_block_is_transparent() -> None:
    assert text("{% generation %}{{ messages[0].content }}{% endgeneration %}.") == "hi."


def test_loop_controls_and_strftime_work() -> None:
    assert text("{% for m in messages %}{% break %}{% endfor %}{{ strftime_now('%%') }}") == "%"


def test_null_fields_are_absent() -> None:
    message = [{"role": "assistant", "content": "x", "tool_calls": None}]
    assert text("{{ 'tool_calls' in messages[0] }}", message) == "False"


def test_raise_exception_is_the_requests_fault() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        text("{{ raise_exception('roles must alternate') }}")


def test_any_failure_in_a_template_is_the_requests_fault() -> None:
    with pytest.raises(ChatTemplateError, match="refused these messages"):
        text("{{ messages[0].content + 1 }}")


def test_a_template_cannot_reach_python() -> None:
    with pytest.raises(ChatTemplateError, match="unsafe"):
        text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ChatTemplateError):
        text("{{ messages.append(1) }}")


def test_broken_template_is_named() -> None:
    with pytest.raises(ChatTemplateError, match="template is broken"):
        text("{% if %}")


CLOSING = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (CLOSING, "so far", "[so far"),
        (CLOSING, "so far ", "[so far "),
        (CLOSING.replace("m.content", "m.content | trim"), "so far ", "[so far"),
    ],
)
def test_continuing_the_final_message(source: str, content: str, expected: str) -> None:
    messages = [{"role": "assistant", "content": content}]
    assert text(source, messages, continue_final_message=True) == expected
    assert messages[0]["content"] == content  # the caller's message is untouched


def test_continuing_the_last_text_part() -> None:
    source = "{% for p in messages[0].content %}{{ p.text }};{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "assistant", "content": parts}]
    assert text(source, messages, continue_final_message=True) == "a;b"


@pytest.mark.parametrize("messages", [[], [{"role": "assistant", "content": None}]])
def test_nothing_to_continue(messages: Any) -> None:
    with pytest.raises(ChatTemplateError, match="to continue"):
        text(CLOSING, messages, continue_final_message=True)


def test_a_template_that_drops_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(ChatTemplateError, match="drops the final message"):
        text("nothing", continue_final_message=True)


def test_prompt_and_continuation_exclude_each_other() -> None:
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        text(CLOSING, add_generation_prompt=True, continue_final_message=True)
