import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.models.model_sizes import read_sizes

QWEN3_0_6B = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


def write_config(folder: Path, raw: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    return folder / "config.json"


def test_a_published_size(tmp_path: Path) -> None:
    architecture = read_sizes(write_config(tmp_path, QWEN3_0_6B))
    assert architecture.parameters == 596_049_920
    assert architecture.kv_values_per_token == 2 * 28 * 8 * 128


def test_a_folder_without_a_config_says_so(tmp_path: Path) -> None:
    # The hub's cache has such a folder after a download that was broken off.
    with pytest.raises(ValueError, match=r"config\.json cannot be read: No such file or directory"):
        read_sizes(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "config.json holds .*; needed: a JSON object"),
        ('{"hidden_size": 64}', "config.json has no model_type"),
    ],
)
def test_a_config_that_cannot_be_used_says_why(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_sizes(tmp_path / "config.json")
