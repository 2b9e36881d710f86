"""Exceptions by model type: facts that a model's files do not contain.

All other facts of a model are derived. To add an exception, add a row here; the code that needs it looks it up by
subject. Limits of an engine or of a training backend are in `preflight/engines/` and `preflight/backends/`.
"""

from dataclasses import dataclass
from typing import Any, Literal

# "tokenizer_class" is read by `data/load_tokenizer.py`. Its value "own" means that AutoTokenizer uses the class of the
# model type.
Subject = Literal["tokenizer_class"]
_OWN_CLASS = "transformers passes over the TokenizersBackend that the folder names, and takes the model type's class"
_OWN_CLASS_TEST = (
    "tests/unit/data/test_chat.py::test_every_model_type_with_a_class_of_its_own_in_transformers_is_listed"
)


@dataclass(frozen=True)
class ModelException:
    """One exception for one model type."""

    # `model_type` of config.json.
    model_type: str
    subject: Subject
    value: Any
    reason: str
    # Test that covers the row, as FILE::NAME.
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
    """Return model_type -> value, for the exceptions with this subject."""
    return {row.model_type: row.value for row in EXCEPTIONS if row.subject == subject}
