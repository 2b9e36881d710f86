"""A section of the config in, a source to draw from out: what the loops call."""

from typing import Any, Literal

from rlctl.config.schema import DataSection, DatasetSection
from rlctl.data.chat import make_chat
from rlctl.data.datasets import load_rows
from rlctl.data.prompts import Prompt, Sample
from rlctl.data.tokenize import LengthReport, tokenize_prompts, tokenize_samples


def load_prompts(data: DataSection, section: DatasetSection, tokenizer: Any) -> tuple[list[Prompt], LengthReport]:
    """The prompts of `section` (data.train or data.validation) under the settings of `data`. Raises DataError."""
    chat = make_chat(tokenizer, data.chat_template, data.system_prompt)
    return tokenize_prompts(load_rows(section), section, chat, data.max_prompt_length)


def load_samples(
    data: DataSection, section: DatasetSection, tokenizer: Any, mask: Literal["all", "last"], max_length: int
) -> tuple[list[Sample], LengthReport]:
    """The same for samples; `mask` is sft.mask, `max_length` in tokens. Raises DataError."""
    chat = make_chat(tokenizer, data.chat_template, data.system_prompt)
    rows = load_rows(section)
    return tokenize_samples(rows, section, chat, mask, data.max_prompt_length, max_length)
