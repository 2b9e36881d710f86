"""The chat model of the games: its template and tokens, and how its teacher plays."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.data.chat import Chat
from rlctl.data.load_tokenizer import load_tokenizer
from rlctl.environments.calculator import Calculator
from rlctl.environments.contract import read_contract
from rlctl.environments.guess import Guess
from rlctl.environments.tool_calls import parse_tool_calls
from rlctl.environments.tool_formats import ToolCall, tool_format
from tests.unit.data.test_tiny_material import read

RECIPES = Path(__file__).parents[3] / "recipes"
MODEL = RECIPES / "tiny" / "qwen3-games"
TOOLS = read_contract(Calculator, {}).tools
ROLES = st.sampled_from(["user", "assistant", "tool"])
TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)


@pytest.fixture(scope="module")
def chat() -> Chat:
    tokenizer = load_tokenizer(str(MODEL))
    return Chat(tokenizer, tokenizer.chat_template, None, MODEL)


def test_a_number_up_to_99_is_one_token_and_a_turn_of_the_game_is_six(chat):
    for number in range(100):
        assert len(chat.prompt_tokens(str(number))) == 1
    opening = [{"role": "user", "content": Guess().reset(10, 24, 12)}]
    assert len(chat.prompt_tokens(chat.prompt_text(opening))) == 10
    link = chat.link(opening, [{"role": "user", "content": "higher"}])
    assert len(link.between) + 2 == 6


@settings(max_examples=30)
@given(text=st.text(st.characters(max_codepoint=126, exclude_categories=["Cc"])))
def test_any_line_of_ascii_comes_back_from_its_tokens(chat, text):
    assert chat.decode(chat.tokenizer(text, add_special_tokens=False).input_ids) == text


@settings(max_examples=30)
@given(talk=st.lists(st.tuples(ROLES, TEXT), min_size=1, max_size=5), added=st.lists(TEXT, min_size=1, max_size=3))
def test_a_chat_only_grows_also_with_tools(chat, talk, added):
    messages = [{"role": role, "content": text} for role, text in talk]
    answers = [{"role": "tool", "content": text} for text in added]
    before = chat.prompt_text(messages, TOOLS)
    grown = [*messages, {"role": "assistant", "content": "an answer"}, *answers]
    link = chat.link(messages, answers, TOOLS)
    tokens = chat.prompt_tokens(before) + chat.prompt_tokens("an answer") + link.tokens_after([], chat.ends.stops)
    assert tokens == chat.prompt_tokens(chat.prompt_text(grown, TOOLS))
    assert not chat.rewrites_history()


def test_a_call_is_read_back_from_the_tokens_that_its_template_writes(chat):
    call = {"function": {"name": "calculate", "arguments": {"expression": "23 + 45 * 6"}}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = chat.decode(chat.prompt_tokens(chat.prompt_text(messages, TOOLS)))
    format = tool_format(chat.template)
    assert format == "hermes"
    assert parse_tool_calls(text, format, TOOLS).calls == [ToolCall("calculate", {"expression": "23 + 45 * 6"})]


def test_the_warm_start_meets_the_tools_as_an_episode_shows_them(chat):
    taught = next(row["messages"] for row in read("games-sft.jsonl.gz") if row["messages"][0]["role"] == "system")
    assert chat.prompt_text(taught[:2]) == chat.prompt_text(taught[1:2], TOOLS)
    assert len(chat.prompt_tokens(chat.prompt_text(taught[:1]))) == 4


def test_a_role_that_the_template_does_not_know_is_refused(chat):
    with pytest.raises(Exception, match="then user, assistant and tool messages"):
        chat.prompt_text([{"role": "judge", "content": "?"}])
