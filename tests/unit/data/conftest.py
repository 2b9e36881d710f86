"""A character tokenizer with ChatML's two special tokens, and chat templates that behave and misbehave."""

from typing import Any, Literal

import pytest

from rlctl.config.data_schema import TrainDataSection
from rlctl.config.schema import SftLossSection, SftSection
from rlctl.data.chat import Chat
from rlctl.data.supervised import Tokens, chat_samples

ALL = SftSection(
    num_steps=1, batch_size=1, mask="all", history="strip", loss=SftLossSection(nll_coef=1.0, distillation=None)
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: only the last turn carries the empty thinking block.
THINKING = CHATML.replace(
    "{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}"
)
UNSTABLE = "{{ messages | length }} messages\n" + CHATML
UNMARKED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def chat_tokens(chat: Chat, messages: Any, train: Literal["all", "last"]) -> Tokens:
    """Return tokens and mask of a chat that is one sample."""
    (row,) = chat_samples(chat, messages, train, "strip").rows
    return row


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = ["<unk>", "<eos>", *map(chr, range(32, 127)), "\n"]
    vocabulary = {character: number for number, character in enumerate(characters)}
    base = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    base.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<eos>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


@pytest.fixture
def section() -> TrainDataSection:
    return TrainDataSection("some.jsonl", "train", "prompt", "answer", "messages", None, {}, {})
