"""A text is encoded where it stands: the pieces of a chat have the tokens of the whole, as the model meets them."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.data.chat import Chat
from rlctl.data.supervised import chat_samples

CORPUS = ["The result of the sum is 42 .", "Yes. The answer is Paris", "def f(x):\n\n    return x", "assistant"] * 20
# As Zephyr's and Phi-3's: the role is text, the end of a turn is the only token, or each mark is one.
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
MARKS = ["<|user|>", "<|assistant|>", "</s>"]
KINDS = ["first", "always", "legacy", "bytes", "strips"]


@cache
def tokenizer_of(kind: str) -> Any:
    """Return one of SentencePiece's three forms (legacy: Llama 2's), or bytes, whose marks may take blanks (Phi-3)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    alphabet = ["\u2581", "\n", *map(chr, range(33, 127))]
    texts = CORPUS
    if kind in ("bytes", "strips"):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    if kind == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        texts = [text.replace(" ", "\u2581") for text in CORPUS]
    elif kind in ("first", "always"):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    added = MARKS if kind == "strips" else ["</s>"]
    rules = {"special": True, "normalized": False, "rstrip": kind == "strips"}
    tokenizer.add_special_tokens([AddedToken(token, **rules) for token in [*added, "<unk>"]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def talk(*contents: str) -> list[dict[str, str]]:
    return [
        {"role": "assistant" if number % 2 else "user", "content": content} for number, content in enumerate(contents)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer", ["The result is 42.", " Paris", "Yes.\n", "", "</s> x"])
def test_the_tokens_of_a_sample_and_of_a_link_are_those_of_the_whole(kind: str, answer: str) -> None:
    chat = Chat(tokenizer_of(kind), ZEPHYR, None)
    messages = talk("Add 3 and 4", answer, "More", "Yes. Paris")
    chat_tokens = chat.encode(chat.render(messages, generation=False))
    ((tokens, _),) = chat_samples(chat, messages, "all", "strip").rows
    assert tokens == chat_tokens[: len(tokens)] and chat.decode(chat_tokens[len(tokens) :]).strip() == ""
    prompt = chat.prompt(messages[:1])
    sampled = tokens[len(prompt.tokens) : tokens.index(chat.ends.trained, len(prompt.tokens)) + 1]
    link = chat.link(messages[:1], messages[2:3]).tokens_after(sampled, chat.ends.stops)
    assert prompt.tokens + sampled + link == chat.prompt(messages[:3]).tokens


TEXT = st.lists(st.sampled_from([*"The rsult is 42.\n(x)", "\n\n", "    "]), min_size=1, max_size=12).map("".join)


@pytest.mark.parametrize("kind", ["first", "always", "legacy", "bytes"])
@settings(max_examples=150, deadline=None)
@given(before=TEXT, text=TEXT)
def test_the_tokens_before_a_text_stay_and_the_text_is_whole(kind: str, before: str, text: str) -> None:
    """Also where a token would reach into both, as that of two line breaks."""
    chat = Chat(tokenizer_of(kind), None, None)
    before = f"a{before}"
    tokens = chat.encode(before) + chat.encode(text, before)
    assert chat.decode(tokens) == before + text


def test_text_that_spells_a_token_begins_no_word_within() -> None:
    """The model has the token as a piece too: the parts of its text are encoded one by one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "</s>", "\u2581", *map(chr, range(33, 127))]
    base = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    base.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    base.add_special_tokens(["</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="</s>", unk_token="<unk>")
    tokens = Chat(tokenizer, ZEPHYR, None).prompt(talk("a</s>b")).tokens
    pieces_of_prompt = tokenizer.convert_ids_to_tokens(tokens)
    # One is at the beginning, and one behind the turn.
    assert "".join(pieces_of_prompt).count("\u2581") == 2
