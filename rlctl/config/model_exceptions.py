"""Exceptions by model: facts of a model type that its files do not tell.

All other facts of a model are derived. To add an exception, add a row here; its owner reads it by subject. Limits of an
engine or of a trainer's backend are in `preflight/engines/` and `preflight/backends/`.
"""

from dataclasses import dataclass
from typing import Any, Literal

# "tokenizer_class": `data/load_tokenizer.py` reads it. "own": AutoTokenizer takes the class of the model type.
Subject = Literal["tokenizer_class"]
_OWN_CLASS = "transformers passes over the TokenizersBackend that the folder names, and takes the model type's class"
_OWN_CLASS_TEST = (
    "tests/unit/data/test_chat.py::test_every_model_type_with_a_class_of_its_own_in_transformers_is_listed"
)


@dataclass(frozen=True)
class ModelException:
    """One exception of one model type."""

    # `model_type` of config.json.
    model_type: str
    subject: Subject
    value: Any
    reason: str
    # The test that holds the row, as FILE::NAME.
    test: str


EXCEPTIONS = (
    ModelException("qwen2", "tokenizer_class", "own", _OWN_CLASS, _OWN_CLASS_TEST),
    ModelException("qwen3_5", "tokenizer_class", "own", _OWN_CLASS, _OWN_CLASS_TEST),
    ModelException("qwen3_5_moe", "tokenizer_class", "own", _OWN_CLASS, _OWN_CLASS_TEST),
    ModelException("qwen3_5_moe_text", "tokenizer_class", "own", _OWN_CLASS, _OWN_CLASS_TEST),
    ModelException("qwen4_exp", "tokenizer_class", "own", _OWN_CLASS, _OWN_CLASS_TEST),
    ModelException("hyperclovax_vision_v2", "tokenizer_class", "own", _OWN_CLASS, _OWN_CLASS_TEST),
    ModelException("siglip2", "tokenizer_class", "own", _OWN_CLASS, _OWN_CLASS_TEST),
)


def model_exceptions(subject: Subject) -> dict[str, Any]:
    """Return the value of each model type that is an exception in `subject`."""
    return {row.model_type: row.value for row in EXCEPTIONS if row.subject == subject}
