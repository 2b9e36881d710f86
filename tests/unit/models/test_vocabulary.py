"""Two vocabularies fit if each token of the policy's has its id in the other; the reason is named where they do not."""

import json
from pathlib import Path

import pytest

from rlctl.config.errors import ModelError
from rlctl.models.vocabulary import vocabulary_problem


def write_tokenizer(folder: Path, vocabulary: object, added: dict[str, int] | None = None) -> Path:
    folder.mkdir()
    tokens = [{"content": token, "id": token_id} for token, token_id in (added or {}).items()]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": tokens}))
    return folder


def test_a_vocabulary_with_the_same_ids_fits_also_with_further_tokens_and_padding(tmp_path: Path) -> None:
    policy = write_tokenizer(tmp_path / "policy", {"a": 0, "b": 1}, {"<eos>": 2})
    teacher = write_tokenizer(tmp_path / "teacher", [["a", -1.0], ["b", -2.0]], {"<eos>": 2, "<think>": 3})
    assert vocabulary_problem(policy, teacher, rows=64) is None
    assert vocabulary_problem(policy, teacher, rows=None) is None


@pytest.mark.parametrize(
    ("vocabulary", "rows", "problem"),
    [
        ({"a": 1, "b": 0, "<eos>": 2}, 3, "another tokenizer than the policy's: token 'a' is 1 there, and 0 here"),
        ({"a": 0, "b": 1}, 3, "another tokenizer than the policy's: it has no token '<eos>', 2 of the policy's"),
        ({"a": 0, "b": 1, "<eos>": 2}, 2, "its embedding has 2 rows, and the policy's tokenizer has 3 tokens"),
    ],
)
def test_another_vocabulary_is_refused_with_the_reason(
    vocabulary: dict[str, int], rows: int, problem: str, tmp_path: Path
) -> None:
    policy = write_tokenizer(tmp_path / "policy", {"a": 0, "b": 1}, {"<eos>": 2})
    assert vocabulary_problem(policy, write_tokenizer(tmp_path / "teacher", vocabulary), rows) == problem


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    policy = write_tokenizer(tmp_path / "policy", {"a": 0})
    (tmp_path / "bare").mkdir()
    problem = vocabulary_problem(policy, tmp_path / "bare", rows=1)
    assert problem == f"{tmp_path / 'bare'} has no tokenizer.json: its vocabulary cannot be compared with the policy's"
    with pytest.raises(ModelError, match="has no vocab in its section model"):
        vocabulary_problem(policy, write_tokenizer(tmp_path / "odd", None), rows=1)
