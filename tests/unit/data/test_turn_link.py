"""Tokens between two sampled turns: sampled tokens are not rendered again; the rest is the template's."""

from typing import Any

import pytest

from rlctl.data.chat import Chat
from rlctl.data.files import DataError
from tests.unit.data.conftest import CHATML, THINKING, UNMARKED

USER = [{"role": "user", "content": "guess"}]
HINT = [{"role": "user", "content": "higher"}]
# As Qwen3's: thinking is dropped from all turns before the last question.
STRIPS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content if m.role != 'assistant' or loop.last else m.content.split('</think>')[-1].lstrip() }}",
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|>\n{% endif %}"
    + CHATML
)


def tokens(chat: Chat, text: str) -> list[int]:
    return chat.prompt_tokens(text)


@pytest.mark.parametrize("template", [CHATML, THINKING, STRIPS, TOOLS])
def test_a_turn_that_ended_is_followed_by_what_is_said_and_the_next_opening(tokenizer: Any, template: str) -> None:
    chat = Chat(tokenizer, template, None)
    link = chat.link(USER, HINT)
    text = "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(link.tokens_after(tokens(chat, "7<|im_end|>"), chat.ends.stops)) == text
    assert tokenizer.decode(link.tokens_after(tokens(chat, "7"), chat.ends.stops)) == "<|im_end|>" + text


def test_appended_turns_equal_the_rendered_chat_where_the_template_keeps_history(tokenizer: Any) -> None:
    chat = Chat(tokenizer, CHATML, "be brief")
    rendered = chat.prompt_tokens(chat.prompt_text([*USER, {"role": "assistant", "content": "7"}, *HINT]))
    sampled = tokens(chat, "7<|im_end|>")
    appended = [*chat.prompt_tokens(chat.prompt_text(USER)), *sampled]
    assert appended + chat.link(USER, HINT).tokens_after(sampled, chat.ends.stops) == rendered


def test_a_template_without_an_end_token_and_plain_text_go_on_at_once(tokenizer: Any) -> None:
    unmarked = Chat(tokenizer, UNMARKED, None)
    link = unmarked.link(USER, HINT)
    assert (link.close, tokenizer.decode(link.between)) == ([], "\nuser: higher\nassistant: ")
    plain = Chat(tokenizer, None, None)
    assert tokenizer.decode(plain.link(USER, HINT).between) == "higher"


def test_a_template_that_rewrites_earlier_turns_is_known(tokenizer: Any) -> None:
    assert Chat(tokenizer, STRIPS, None).rewrites_history()
    assert not Chat(tokenizer, CHATML, None).rewrites_history()
    assert not Chat(tokenizer, None, None).rewrites_history()


def test_tools_are_part_of_the_prompt_and_of_no_link(tokenizer: Any) -> None:
    chat = Chat(tokenizer, TOOLS, None)
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert chat.prompt_text(USER, tools).startswith("<|im_start|>system\nadd <|im_end|>")
    assert chat.link(USER, HINT, tools) == chat.link(USER, HINT)


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{{ raise_exception('roles must alternate') if messages | length > 1 }}" + CHATML, "roles must alternate"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "leaves out the assistant's text"),
    ],
)
def test_a_template_that_cannot_go_on_after_a_turn_is_refused(tokenizer: Any, template: str, line: str) -> None:
    with pytest.raises(DataError, match=line):
        Chat(tokenizer, template, None).link(USER, HINT)
