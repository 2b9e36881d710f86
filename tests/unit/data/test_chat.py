import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import pytest

from rlctl.config.data_schema import DataSection, DatasetSection
from rlctl.config.model_exceptions import model_exceptions
from rlctl.data.chat import Chat, make_chat
from rlctl.data.files import DataError
from rlctl.data.load_tokenizer import is_general, load_tokenizer
from rlctl.data.unwritten_messages import require_system_message
from tests.unit.data.conftest import CHATML, UNMARKED, UNSTABLE, chat_tokens

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]


def data(template: str, system_prompt: str | None = None) -> DataSection:
    none = DatasetSection(None, "train", "prompt", "answer", "messages", None, {})
    return DataSection(none, none, system_prompt, template, {}, "text", max_prompt_length=None, shuffle=True)


def trained_texts(chat: Chat, messages: list[dict[str, str]], train: Literal["all", "last"]) -> list[str]:
    """Return the stretches of text that are trained on."""
    tokens, mask = chat_tokens(chat, messages, train)
    assert len(tokens) == len(mask)
    texts = []
    for is_trained, pairs in groupby(zip(tokens, mask, strict=True), key=lambda pair: bool(pair[1])):
        if is_trained:
            texts.append(chat.tokenizer.decode([token for token, _ in pairs]))
    return texts


def test_every_assistant_turn_is_trained_with_its_end_token_and_nothing_else(tokenizer):
    assert trained_texts(Chat(tokenizer, CHATML, None), CHAT, "all") == ["yes<|im_end|>", "no<|im_end|>"]


def test_last_trains_the_last_assistant_turn_alone(tokenizer):
    assert trained_texts(Chat(tokenizer, CHATML, None), CHAT, "last") == ["no<|im_end|>"]


def test_what_stands_before_a_trained_turn_is_what_generation_starts_from(tokenizer):
    chat = Chat(tokenizer, CHATML, None)
    tokens, mask = chat_tokens(chat, CHAT, "last")
    assert tokens[: mask.argmax()] == chat.prompt_tokens(chat.prompt_text(CHAT[:3]))


def test_messages_after_the_last_assistant_turn_are_left_out(tokenizer):
    chat = Chat(tokenizer, CHATML, None)
    assert chat_tokens(chat, CHAT[:3], "all")[0] == chat_tokens(chat, CHAT[:2], "all")[0]


def test_a_template_that_rewrites_what_it_wrote_before_is_refused(tokenizer):
    with pytest.raises(DataError, match=r"not prefix-stable at message 2.*data\.chat_template"):
        chat_tokens(Chat(tokenizer, UNSTABLE, None), CHAT, "all")


def test_a_template_without_an_end_token_gets_the_tokenizers_own_behind_the_last_turn(tokenizer):
    assert trained_texts(Chat(tokenizer, UNMARKED, None), CHAT, "all") == ["yes", "no<eos>"]


def test_without_a_template_texts_are_joined_and_the_end_token_is_trained(tokenizer):
    chat = Chat(tokenizer, None, None)
    tokens, _ = chat_tokens(chat, CHAT[:2], "all")
    assert tokenizer.decode(tokens) == "hiyes<eos>"
    assert trained_texts(chat, CHAT[:2], "all") == ["yes<eos>"]


def test_white_space_that_belongs_to_a_plain_answer_is_trained(tokenizer):
    answer = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes \n"}]
    assert trained_texts(Chat(tokenizer, None, None), answer, "all") == ["yes \n<eos>"]


def test_the_system_prompt_comes_first_unless_the_chat_has_one_of_its_own(tokenizer):
    chat = Chat(tokenizer, CHATML, "be brief")
    assert chat.prompt_text(CHAT[:1]).startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi")
    messages = [{"role": "system", "content": "be long"}, *CHAT[:1]]
    assert "be brief" not in chat.prompt_text(messages)


def test_an_odd_template_is_one_error_and_no_traceback(tokenizer):
    failing = Chat(tokenizer, "{{ raise_exception('no \x1b[31m') }}", None)
    assert failing.shows_tools and not failing.rewrites_history()
    for template in (5, ["a"], {"default": 5}):
        tokenizer.chat_template = template
        try:
            with pytest.raises(DataError, match="the tokenizer's chat_template is no text"):
                make_chat(tokenizer, data("auto"), None)
        finally:
            tokenizer.chat_template = None


def test_a_chat_without_an_assistant_is_refused(tokenizer):
    with pytest.raises(DataError, match="no assistant message"):
        chat_tokens(Chat(tokenizer, CHATML, None), CHAT[:1], "all")


def test_auto_takes_the_tokenizers_template_and_none_leaves_it(tokenizer, tmp_path):
    assert make_chat(tokenizer, data("auto"), None).template is None
    (tmp_path / "chat.jinja").write_text(CHATML)
    assert make_chat(tokenizer, data(str(tmp_path / "chat.jinja")), None).template == CHATML
    tokenizer.chat_template = CHATML
    try:
        assert make_chat(tokenizer, data("auto", "be brief"), None).template == CHATML
        assert make_chat(tokenizer, data("none"), None).template is None
    finally:
        tokenizer.chat_template = None


def test_a_system_prompt_that_no_template_writes_and_a_missing_template_are_errors(tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"data\.system_prompt needs a chat template"):
        make_chat(tokenizer, data("auto", "be brief"), None)
    for source, verb in (("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "leaves out"),
                         ("{{ raise_exception('no \x1b[31m system') }}", "refuses")):  # fmt: skip
        (tmp_path / "chat.jinja").write_text(source)
        chat = make_chat(tokenizer, data(str(tmp_path / "chat.jinja"), "be brief"), None)
        with pytest.raises(DataError, match=rf"^data\.system_prompt: the chat template {verb} a system message"):
            require_system_message(chat, "be brief")
    with pytest.raises(DataError, match=r"nowhere\.jinja: no such file"):
        make_chat(tokenizer, data("nowhere.jinja"), None)


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path):
    with pytest.raises(DataError, match="no tokenizer") as error:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "mistral", "deepseek_v3", "qwen2", "qwen3_5", None])
def test_the_class_that_is_taken_without_torch_is_the_one_that_transformers_takes(
    tmp_path: Path, tokenizer: Any, model_type: str | None
) -> None:
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    expected = AutoTokenizer.from_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert type(loaded) is type(expected) and loaded("1+1<eos>") == expected("1+1<eos>")
    assert is_general(tmp_path) == (model_type not in ("qwen2", "qwen3_5"))
    (tmp_path / "tekken.json").write_text("{}")
    assert not is_general(tmp_path)


def test_every_model_type_with_a_class_of_its_own_in_transformers_is_listed() -> None:
    """The list serves all releases: 5.20 has one more than 5.19."""
    from transformers.models.auto import tokenization_auto as auto

    general = ("TokenizersBackend", "PythonBackend", "PreTrainedTokenizerFast", "MistralCommonBackend", None)
    names = auto.TOKENIZER_MAPPING_NAMES
    with_own_class = {kind for kind in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS if names[kind] not in general}
    exceptions = model_exceptions("tokenizer_class").items()
    assert with_own_class <= {kind for kind, class_name in exceptions if class_name == "own"}


def test_a_tokenizer_is_loaded_without_torch() -> None:
    folder = Path(__file__).parents[3] / "recipes" / "tiny" / "qwen3-tiny"
    loading = "from rlctl.data.load_tokenizer import load_tokenizer; load_tokenizer(sys.argv[1])"
    code = f"import sys; {loading}; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    modules = process.stdout.split()
    assert "transformers" in modules and "torch" not in modules
