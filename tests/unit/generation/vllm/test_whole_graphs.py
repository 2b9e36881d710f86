"""A whole step is one CUDA graph only for models whose log-probs were compared."""

from pathlib import Path
from typing import Any

import pytest

from rlctl.generation.vllm.build import allows_full_graphs, is_worth_a_note
from rlctl.models.derive import load_facts
from tests.tiny_models import make_model


@pytest.mark.parametrize(
    ("kind", "dim", "config_keys", "is_whole"),
    [
        ("qwen3", 128, {}, True),
        ("llama", 128, {}, True),
        ("qwen3", 64, {}, False),
        ("qwen3", 256, {}, False),
        ("qwen3_moe", 128, {}, False),
        ("mistral", 128, {"sliding_window": 16}, False),
        ("gpt_oss", 128, {"num_local_experts": 4}, False),
        ("qwen3_5_text", 128, {"layer_types": ["linear_attention", "full_attention"]}, False),
    ],
)
def test_only_plain_heads_of_128_may(
    kind: str, dim: int, config_keys: dict[str, Any], is_whole: bool, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model", kind, head_dim=dim, more=config_keys)
    load_facts(folder)
    assert allows_full_graphs(str(folder)) is is_whole
    assert not is_worth_a_note(str(folder))


def test_a_model_that_cannot_train_has_none(tmp_path: Path) -> None:
    assert allows_full_graphs(str(tmp_path)) is False and is_worth_a_note(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert allows_full_graphs(str(tmp_path)) is False
