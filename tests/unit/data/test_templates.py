"""A template gets the arguments that it takes, of several templates the one is chosen that transformers takes."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.data.chat import Chat, ChatSpec, make_chat
from rlctl.data.files import DataError
from rlctl.data.load_tokenizer import load_tokenizer
from rlctl.data.templates import read_templates, unknown_arguments, write_arguments
from tests.unit.data.conftest import CHATML
from tests.unit.data.test_chat import data

# As Qwen3's: the opening of a turn says that there is no thinking.
SWITCH = CHATML.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}",
)
STYLE = "{% if style %}{{ style }}\n{% endif %}{% generation %}{% endgeneration %}" + CHATML
USER = [{"role": "user", "content": "guess"}]
TOOL = {"type": "function", "function": {"name": "add"}}


def test_arguments_are_in_the_prompt_and_in_the_link(tokenizer: Any) -> None:
    chat = Chat(tokenizer, SWITCH, None, template_kwargs={"enable_thinking": False})
    opening = "<|im_start|>assistant\n<think></think>"
    assert chat.prompt(USER).text.endswith(opening)
    assert chat.decode(chat.link(USER, USER).between).endswith(opening)
    with_thinking = chat.with_kwargs({"enable_thinking": True})
    assert with_thinking.prompt(USER).text.endswith("assistant\n")
    assert chat.with_kwargs({}) is chat and chat.with_kwargs({"enable_thinking": True}) is with_thinking


def test_an_argument_from_outside_is_no_control_token_and_the_configs_own_may_be(tokenizer: Any) -> None:
    spelled = {"style": "<|im_end|>"}
    from_outside = Chat(tokenizer, STYLE, None).with_kwargs(spelled)
    of_config = Chat(tokenizer, STYLE, None, template_kwargs=spelled)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert from_outside.prompt(USER).tokens.count(end) == 1
    assert of_config.prompt(USER).tokens.count(end) == 2
    assert from_outside.prompt(USER).text == of_config.prompt(USER).text


def test_another_process_gets_the_arguments(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    chat = Chat(load_tokenizer(str(tmp_path)), SWITCH, None, template_kwargs={"enable_thinking": False})
    assert ChatSpec.from_chat(chat).load().prompt(USER) == chat.prompt(USER)


@pytest.mark.parametrize(
    ("template", "names", "reasons"),
    [
        (SWITCH, ["enable_thinking"], {}),
        (STYLE, ["style"], {}),
        (
            SWITCH,
            ["enable_thinkin"],
            {
                "enable_thinkin": "is no argument of the chat template, which takes enable_thinking; "
                "did you mean enable_thinking?"
            },
        ),
        (CHATML, ["tools"], {"tools": "is no argument of the chat template"}),
        ({"default": CHATML, "tool_use": SWITCH}, ["enable_thinking"], {}),
        ("{% unknown %}", ["anything"], {}),
        ("{% unknown %}", ["tokenize"], {"tokenize": "is no argument of the chat template"}),
    ],
)
def test_names_that_a_template_does_not_take_are_told(template: Any, names: list[str], reasons: dict[str, str]) -> None:
    assert unknown_arguments(names, template) == reasons


def test_a_config_with_such_a_name_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(SWITCH)
    section = data(str(tmp_path / "chat.jinja"))
    section.chat_template_kwargs = {"thinking": True}
    with pytest.raises(
        DataError, match=r"^data\.chat_template_kwargs\.thinking: is no argument of the chat template, "
    ):
        make_chat(tokenizer, section, None)
    section = data("none")
    section.chat_template_kwargs = {"thinking": True}
    with pytest.raises(DataError, match=r"^data\.chat_template_kwargs\.thinking: needs a chat template"):
        make_chat(tokenizer, section, None)


BY_NAME = {"default": CHATML, "tool_use": "{{ tools | length }} tools\n" + CHATML}


@pytest.mark.parametrize("form", ["files", "list", "dict"])
def test_of_named_templates_the_one_for_tools_is_taken_as_transformers_takes_it(
    tokenizer: Any, tmp_path: Path, form: str
) -> None:
    tokenizer.save_pretrained(tmp_path)
    if form == "files":
        (tmp_path / "chat_template.jinja").write_text(BY_NAME["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(BY_NAME["tool_use"])
    else:
        listed = [{"name": name, "template": text} for name, text in BY_NAME.items()]
        template: Any = BY_NAME if form == "dict" else listed
        file = tmp_path / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    loaded = load_tokenizer(str(tmp_path))
    chat = make_chat(loaded, data("auto"), tmp_path)
    for tools in ([], [TOOL]):
        expected = loaded.apply_chat_template(USER, tools=tools or None, tokenize=False, add_generation_prompt=True)
        assert chat.prompt(USER, tools).text == expected
    assert chat.prompt(USER, [TOOL]).text.startswith("1 tools")
    assert read_templates(tmp_path) == BY_NAME
    assert chat.shows_tools


def test_named_templates_without_a_default_are_told(tokenizer: Any) -> None:
    chat = Chat(tokenizer, {"rag": CHATML, "tool_use": CHATML}, None)
    with pytest.raises(DataError, match=r"the chat templates rag, tool_use, and none named default"):
        chat.prompt(USER)
    assert chat.prompt(USER, [TOOL]).text.startswith("<|im_start|>user")


@pytest.mark.parametrize("form", ["files", "config", "list"])
def test_an_exported_template_has_the_arguments_of_its_run_where_a_caller_names_none(
    tokenizer: Any, tmp_path: Path, form: str
) -> None:
    tokenizer.save_pretrained(tmp_path)
    # Jinja drops the line break of this beginning, and white space before a block that begins a line.
    template = "\n  {% if odd %}{{ odd }}{% endif %}" + SWITCH
    if form == "files":
        (tmp_path / "chat_template.jinja").write_text(template)
    else:
        file = tmp_path / "tokenizer_config.json"
        setting: Any = template if form == "config" else [{"name": "default", "template": template}]
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": setting}))
    before = load_tokenizer.__wrapped__(str(tmp_path))
    arguments = {"enable_thinking": False, "odd": {"a": None, "b": [True, 'x"%}\n']}}
    write_arguments(tmp_path, arguments)
    after = load_tokenizer.__wrapped__(str(tmp_path))

    def render(loaded: Any, **kwargs: Any) -> str:
        return str(loaded.apply_chat_template(USER, tokenize=False, add_generation_prompt=True, **kwargs))

    assert render(after) == render(before, **arguments) != render(before)
    assert render(after, enable_thinking=True) == render(before, odd=arguments["odd"], enable_thinking=True)
