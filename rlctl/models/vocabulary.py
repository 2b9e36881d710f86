"""Comparison of two models' vocabularies, from their tokenizer files. No torch and no transformers."""

from pathlib import Path
from typing import Any

from rlctl.config.errors import ModelError
from rlctl.config.json_files import read_object

_FILE = "tokenizer.json"


def vocabulary_problem(policy: Path, other: Path, rows: int | None) -> str | None:
    """Return why a model cannot score the policy's tokens; None if each of them has the same id in both.

    policy, other: folders with the tokenizers. rows: number of rows of the other model's embedding; None: unknown. The
    other model may have further tokens, and its embedding may be padded. Raises ModelError for an unreadable file.
    """
    policy_ids = _token_ids(policy)
    other_ids = _token_ids(other)
    if policy_ids is None:
        return None
    if other_ids is None:
        return f"{other} has no {_FILE}: its vocabulary cannot be compared with the policy's"
    for token, token_id in policy_ids.items():
        other_id = other_ids.get(token)
        if other_id is None:
            return f"another tokenizer than the policy's: it has no token {token!r}, {token_id} of the policy's"
        if other_id != token_id:
            return f"another tokenizer than the policy's: token {token!r} is {other_id} there, and {token_id} here"
    needed_rows = max(policy_ids.values(), default=-1) + 1
    if rows is not None and rows < needed_rows:
        return f"its embedding has {rows:,} rows, and the policy's tokenizer has {needed_rows:,} tokens"
    return None


def count_tokens(folder: Path) -> int | None:
    """Return 1 + the largest id of a folder's tokenizer; None without a tokenizer.json."""
    ids = _token_ids(folder)
    return None if ids is None else max(ids.values(), default=-1) + 1


def _token_ids(folder: Path) -> dict[str, int] | None:
    """Return token -> id of a folder's tokenizer.json; None if there is no such file."""
    file = folder / _FILE
    if not file.is_file():
        return None
    raw = read_object(file)
    model = raw.get("model")
    vocabulary: Any = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str, int] = {}
    if isinstance(vocabulary, dict):
        ids.update(vocabulary)
    elif isinstance(vocabulary, list):
        # Unigram: [token, score] of each id.
        ids.update((str(entry[0]), token_id) for token_id, entry in enumerate(vocabulary))
    else:
        raise ModelError(f"{file} has no vocab in its section model; needed: a file of the library tokenizers")
    ids.update((token["content"], token["id"]) for token in raw.get("added_tokens") or [])
    return ids
