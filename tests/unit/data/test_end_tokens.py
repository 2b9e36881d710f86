"""The end tokens of an answer, by the templates of the usual models, on real tokenizers made here."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.data.chat import Chat
from rlctl.data.files import DataError
from rlctl.data.supervised import chat_samples
from tests.unit.data.conftest import ALL, CHATML, UNMARKED, chat_tokens
from tests.unit.data.test_supervised import sample_text

SPECIAL = ["<unk>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"]
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<h>{{ m.role }}</h>\n\n{{ m.content | trim }}"
    "{% if m.tool_calls %}<|eom_id|>{% else %}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<h>assistant</h>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<t>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<t>model\n{% endif %}"
)
WORDS = "{% for m in messages %}{{ m.role }}: {{ m.content }} [END]\n{% endfor %}"
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def make(*, begins: bool = False) -> Any:
    """Return a character tokenizer. begins: it puts <bos> before every text, as Llama's and Gemma's do."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    characters = [*SPECIAL, *map(chr, range(32, 127)), "\n"]
    vocabulary = {character: number for number, character in enumerate(characters)}
    base = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    base.decoder = decoders.Fuse()
    base.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    base.add_tokens([AddedToken("</think>", special=False, normalized=False)])
    if begins:
        base.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<eos>", bos_token="<bos>", unk_token="<unk>")


def model(folder: Path, config: Any, generation: Any = None) -> Path:
    (folder / "config.json").write_text(json.dumps({"eos_token_id": config}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return folder


def names(chat: Chat) -> list[str]:
    return list(chat.tokenizer.convert_ids_to_tokens(list(chat.ends.stops)))


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (GEMMA, "<end_of_turn>"), (UNMARKED, "<eos>"), (None, "<eos>")],
)
def test_what_sft_trains_behind_an_answer_is_where_sampling_stops(template: str | None, end: str) -> None:
    chat = Chat(make(begins=True), template, None)
    assert set(names(chat)) == {end, "<eos>"}
    assert chat.tokenizer.convert_ids_to_tokens(chat.ends.trained) == end
    tokens, mask = chat_tokens(chat, CHAT, "all")
    assert (tokens[-1], bool(mask[-1])) == (chat.ends.trained, True)
    assert tokens.count(2) == (template not in (CHATML, UNMARKED)), "the token that begins a text comes once"


def test_stop_tokens_are_the_union_of_all_that_name_one(tmp_path: Path) -> None:
    chat = Chat(make(), CHATML, None, model(tmp_path, 7, [5, 6]))
    assert set(names(chat)) == {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<eos>"}
    further = chat.ends.with_further([9, 1], chat.tokenizer)
    assert further.stops == (*chat.ends.stops, 9)
    assert "<eos> 1 (tokenizer, generation.stop_token_ids)" in str(further)


@pytest.mark.parametrize(("config", "generation"), [(1, None), ([1, 4], None), (None, [4, 1]), (None, None)])
def test_files_may_list_one_token_or_several_or_none(tmp_path: Path, config: Any, generation: Any) -> None:
    ends = Chat(make(), CHATML, None, model(tmp_path, config, generation)).ends
    assert set(ends.stops) == {1, 4}
    assert bool(ends.warnings) == (config == 1), "files that list another end than the template's are told"


def test_an_end_that_the_models_files_do_not_list_is_a_warning_with_its_remedy(tmp_path: Path) -> None:
    (warning,) = Chat(make(), CHATML, None, model(tmp_path, 1)).ends.warnings
    assert warning.startswith("answers end with <|im_end|>, but neither generation_config.json nor config.json")
    mend = "add 4 to eos_token_id in generation_config.json; checkpoints that are exported have it there"
    assert warning.endswith(mend)


def test_a_template_that_ends_turns_with_text_is_a_warning() -> None:
    (warning,) = Chat(make(), WORDS, None).ends.warnings
    assert "ends a turn with '[END]', which is no token" in warning


def test_an_id_that_is_no_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json: 9999 ends an answer, but is no token"):
        _ = Chat(make(), CHATML, None, model(tmp_path, 9999)).ends
    chat = Chat(make(), CHATML, None)
    with pytest.raises(DataError, match=r"generation\.stop_token_ids: 9999 ends an answer, but is no token"):
        chat.ends.with_further([9999], chat.tokenizer)


@pytest.mark.parametrize("template", [None, UNMARKED])
@pytest.mark.parametrize("last", ["</think>", "<|im_start|>", "yes"])
def test_text_whose_last_token_is_any_added_one_still_gets_its_end_token(template: str | None, last: str) -> None:
    chat = Chat(make(), template, None)
    tokens, mask = chat_tokens(chat, [CHAT[0], {"role": "assistant", "content": f"so {last}"}], "all")
    assert chat.tokenizer.decode(tokens).endswith(f"so {last}<eos>") and mask[-1]
    written, _ = chat_tokens(chat, [CHAT[0], {"role": "assistant", "content": f"so {last}<eos>"}], "all")
    assert written == tokens, "an end token that the answer has is not put there twice"


# A turn ends with the mark of the next role.
GLM = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.name }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALLS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]


def glm(folder: Path, ends: list[str]) -> Chat:
    """Return a chat whose model stops at these tokens."""
    tokenizer = make()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>", "<tool>"]})
    return Chat(tokenizer, GLM, None, model(folder, 1, tokenizer.convert_tokens_to_ids(ends)))


@pytest.mark.parametrize("history", ["strip", "keep"])
def test_the_mark_of_the_next_role_is_the_end_of_each_turn_where_sampling_stops_there(
    tmp_path: Path, history: Any
) -> None:
    chat = glm(tmp_path, ["<user>", "<tool>"])
    samples = chat_samples(chat, CALLS, "all", history)
    assert sample_text(chat, samples.rows[0]) == (
        "<user>hi<assistant>{+[f]<tool>+}7<assistant>{+yes<user>+}more<assistant>{+no<eos>+}"
    )
    assert samples.unended == 0
    # The last trained turn ends as the row goes on.
    assert sample_text(chat, chat_samples(chat, CALLS[:3], "last", history).rows[0]).endswith("{+[f]<tool>+}")


def test_a_turn_behind_which_sampling_does_not_stop_is_counted(tmp_path: Path) -> None:
    chat = glm(tmp_path, ["<user>"])
    samples = chat_samples(chat, CALLS, "all", "strip")
    assert sample_text(chat, samples.rows[0]) == (
        "<user>hi<assistant>{+[f]+}<tool>7<assistant>{+yes<user>+}more<assistant>{+no<eos>+}"
    )
    assert samples.unended == 1
    # The last turn of a sample gets the tokenizer's end.
    assert sample_text(chat, chat_samples(chat, CALLS[:3], "last", "strip").rows[0]).endswith("{+[f]<eos>+}")


def test_a_sampled_mark_of_the_next_role_comes_once_and_a_cut_turn_gets_it(tmp_path: Path) -> None:
    chat = glm(tmp_path, ["<user>", "<tool>"])
    link = chat.link(CALLS[:3], CALLS[4:5])
    for sampled, text in (("yes<user>", "more<assistant>"), ("ye", "<user>more<assistant>")):
        assert chat.decode(link.tokens_after(chat.encode(sampled), chat.ends.stops)) == text
    assert chat.decode(link.tokens_after(chat.encode("yes<eos>"), chat.ends.stops)) == "<user>more<assistant>"


def test_another_end_such_as_that_of_a_tool_call_is_kept_and_counted() -> None:
    from rlctl.config.data_schema import DatasetSection
    from rlctl.data.datasets import Row
    from rlctl.data.tokenize import tokenize_samples

    chat = Chat(make(), LLAMA3, None)
    with_call = [CHAT[0], {**CHAT[1], "tool_calls": [{"name": "f"}]}]
    rows = [Row(0, "a.jsonl:1", {"messages": CHAT}), Row(1, "a.jsonl:2", {"messages": with_call})]
    section = DatasetSection("a.jsonl", "train", "prompt", "answer", "messages", None, {})
    samples, report = tokenize_samples(rows, section, chat, ALL, None, 64)
    ends = chat.tokenizer.convert_ids_to_tokens([int(sample.tokens[-1]) for sample in samples])
    assert ends == ["<|eot_id|>", "<|eom_id|>"]
    assert str(report).endswith("1 turn ends with no token at which sampling stops")


def test_the_token_that_begins_a_text_comes_once() -> None:
    chat = Chat(make(begins=True), None, None)
    assert chat.prompt_tokens("a") == chat.prompt_tokens("<bos>a") == [2, *chat.tokenizer("a").input_ids[1:]]
    assert chat.prompt_tokens("") == [2]
    tokens, mask = chat_tokens(chat, [{"role": "user", "content": ""}, CHAT[1]], "all")
    assert (tokens.count(2), mask.tolist()) == (1, [False, True, True, True, True])
    (warning,) = Chat(make(begins=True), CHATML, None).ends.warnings
    assert warning.startswith("the chat template writes no <bos>")


def test_an_empty_prompt_without_a_beginning_is_refused() -> None:
    chat = Chat(make(), None, None)
    with pytest.raises(DataError, match="the prompt is empty"):
        chat.prompt_tokens("")
    with pytest.raises(DataError, match="the prompt is empty"):
        chat_tokens(chat, [{"role": "user", "content": ""}, CHAT[1]], "all")
