"""PEFT's folders are written and read, or refused with a reason, and a run starts from one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.config.errors import ConfigError, ModelError
from rlctl.config.run_weights import base_of, chat_folder, is_adapter, is_model
from rlctl.config.schema import ModelSection
from rlctl.models.adapter_folder import AdapterFile, read_config, read_spec, write_adapter
from rlctl.models.adapters import AdapterSpec
from rlctl.models.hf_folder import WeightFiles
from rlctl.models.merge_adapter import write_merged
from rlctl.models.model_files import ModelFiles
from rlctl.models.model_sizes import config_file
from rlctl.models.weight_headers import digest_of_weights
from rlctl.preflight.load import load
from tests.system.training.scenario import adapters_of
from tests.tiny_models import make_model
from tests.unit.folders import put_in_cache


def section(path: Path) -> ModelSection:
    return ModelSection(str(path), tokenizer=None, random_init=False, max_length=None)


def make_adapter(folder: Path, model: Path, spec: AdapterSpec, std: float = 0.05) -> dict[str, torch.Tensor]:
    """Write an adapter of random numbers, and return its tensors."""
    torch.manual_seed(0)
    values = {tensor.name: torch.randn(tensor.shape) * std for tensor in spec.tensors}
    sizes = ModelFiles.prepare(section(model), folder.parent, 0).facts.sizes
    write_adapter(
        folder,
        spec,
        linears=sizes.linears,
        base=str(model),
        digest=digest_of_weights(model),
        tensors=[(tensor, values[tensor.name]) for tensor in spec.tensors],
    )
    return values


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", "qwen3")


@pytest.fixture
def adapter(model: Path) -> Path:
    make_adapter(model.parent / "adapter", model, adapters_of(model))
    return model.parent / "adapter"


def test_a_folder_is_read_as_it_was_written(model: Path, tmp_path: Path) -> None:
    spec = adapters_of(model, dropout=0.1)
    values = make_adapter(tmp_path / "a", model, spec)
    assert read_spec(tmp_path / "a", ModelFiles.prepare(section(model), tmp_path, 0).facts.sizes.linears) == spec
    file = AdapterFile(tmp_path / "a")
    assert all(torch.equal(file.tensor(name), value) for name, value in values.items())
    assert is_adapter(tmp_path / "a") and is_model(tmp_path / "a") and base_of(tmp_path / "a") == str(model)
    assert not is_adapter(model)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("use_dora", True, "use_dora is true; rlctl has plain LoRA"),
        ("modules_to_save", ["lm_head"], "modules_to_save is"),
        ("init_lora_weights", "pissa", 'init_lora_weights is "pissa"'),
        ("rank_pattern", {"q_proj": 8}, "rank_pattern is"),
        ("bias", "all", 'bias is "all"'),
        ("peft_type", "IA3", 'peft_type is "IA3"; rlctl has LORA alone'),
        ("base_model_name_or_path", None, "base_model_name_or_path names no model"),
        ("r", None, "r is null; allowed: a whole number from 1 to 1,000,000"),
    ],
)
def test_other_kinds_of_adapter_are_refused(adapter: Path, key: str, value: Any, message: str) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ModelError, match=message):
        read_config(adapter)


def test_a_tensor_without_a_place_or_of_another_shape_is_named(adapter: Path, model: Path) -> None:
    linears = ModelFiles.prepare(section(model), model.parent, 0).facts.sizes.linears
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_proj\.lora_A\.weight has no linear layer"):
        other_linears = [linear for linear in linears if not linear.name.endswith("layers.0.self_attn.q_proj")]
        read_spec(adapter, other_linears)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 2}))
    with pytest.raises(ModelError, match=r"has shape \(4, 256\), expected \(2, 256\)"):
        read_spec(adapter, linears)


def test_an_adapter_of_other_weights_is_refused(adapter: Path, model: Path, tmp_path: Path) -> None:
    assert ModelFiles.prepare(section(adapter), tmp_path, 0).folder == str(model)
    make_model(model, "qwen3", scale=0.5)
    with pytest.raises(ModelError, match="was trained on other weights than"):
        ModelFiles.prepare(section(adapter), tmp_path, 0)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["lora.rank=4", "lora.alpha=8"], ""),
        (["lora.rank=8", "lora.alpha=8"], "the adapter of model.path has 4: set lora.rank=4, or start from its base"),
        (["lora.rank=4", "lora.alpha=8", "lora.rslora=true"], "has false: set lora.rslora=false"),
        (["lora.rank=4", "lora.alpha=8", "lora.targets=mlp"], "the adapter of model.path has others, 14 layers by the"),
        (["lora.rank=4", "lora.alpha=8", "model.random_init=true"], "must be false: model.path is an adapter of given"),
    ],
)
def test_a_run_starts_from_an_adapter_of_its_own_kind(adapter: Path, overrides: list[str], expected: str) -> None:
    keys = [f"model.path={adapter}", "model.random_init=false", *overrides]
    if not expected:
        run = load("sft", None, keys)
        assert run.settled.adapters and run.settled.adapters.rank == 4
        return
    with pytest.raises(ConfigError, match=expected):
        load("sft", None, keys)


def test_an_adapter_without_lora_is_merged_and_a_note_says_so(adapter: Path) -> None:
    all_notes = load("sft", None, [f"model.path={adapter}", "model.random_init=false"]).notes
    assert [note for note in all_notes if "adapter" in note] == [
        "model.path is an adapter: without lora every weight of it merged with its base is trained"
    ]


def snapshot_of(hub: Path, name: str) -> Path:
    return hub / f"models--some--{name}/snapshots/0123"


@pytest.fixture
def hub(adapter: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a hub cache without network: some/base, and its adapter some/adapter, without a tokenizer."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    put_in_cache(tmp_path / "hub", "some/base", model)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "some/base"}))
    put_in_cache(tmp_path / "hub", "some/adapter", adapter)
    return tmp_path / "hub"


def test_an_adapter_of_the_hub_is_found_with_its_base(hub: Path, model: Path, tmp_path: Path) -> None:
    base_folder = snapshot_of(hub, "base")
    files = ModelFiles.prepare(section(Path("some/adapter")), tmp_path / "run", 0)
    assert (files.folder, files.base) == (str(base_folder), "some/base")
    assert files.adapter == str(snapshot_of(hub, "adapter"))
    assert files.adapters == adapters_of(model)
    assert config_file("some/adapter") == base_folder / "config.json"
    assert ModelFiles.prepare(section(Path("some/base")), tmp_path / "run", 0).adapter is None


def test_training_every_weight_from_an_adapter_begins_with_the_merged_model(
    hub: Path, adapter: Path, tmp_path: Path
) -> None:
    files = ModelFiles.prepare(section(Path("some/adapter")), tmp_path / "run", 0, merge=True)
    assert files.adapter is None and files.folder == str(tmp_path / "run/init")
    write_merged(Path(files.source), adapter, tmp_path / "expected", "float32")
    merged = WeightFiles(Path(files.folder))
    expected = WeightFiles(tmp_path / "expected")
    assert all(torch.equal(merged.tensor(name), expected.tensor(name)) for name in expected.names())


def test_an_adapters_own_tokenizer_counts_where_its_end_tokens_are_too(hub: Path) -> None:
    base_folder = snapshot_of(hub, "base")
    adapter_folder = snapshot_of(hub, "adapter")
    assert chat_folder("some/base") == "some/base"
    assert chat_folder("some/adapter") == chat_folder(str(adapter_folder)) == str(base_folder)
    for name in ("tokenizer_config.json", "generation_config.json"):
        assert chat_folder("some/adapter") == str(base_folder)
        (adapter_folder / name).write_text("{}")
    assert chat_folder("some/adapter") == str(adapter_folder)


def test_the_config_of_a_run_knows_an_adapter_of_the_hub(hub: Path) -> None:
    keys = ["model.path=some/adapter", "model.random_init=false", "lora.rank=4"]
    assert load("sft", None, [*keys, "lora.alpha=8"]).settled.facts is not None
    with pytest.raises(ConfigError, match=r"the adapter of model\.path has 8: set lora\.alpha=8, or start from"):
        load("sft", None, [*keys, "lora.alpha=16"])
