"""Every tensor on disk has one place in memory, by the folder's own names, or the model is refused by name."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlctl.config.errors import ModelError
from rlctl.models.adapters import AdapterSpec, choose_targets
from rlctl.models.derive import derive_facts, table_of
from rlctl.models.hf_folder import WeightFiles, write_folder
from rlctl.models.meta_model import language_model, skeleton
from rlctl.models.parameter_table import ParameterTable, derive_table
from tests.tiny_models import KINDS, make_model

MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Families with other names on disk than in memory, buffers on disk, fused matrices, or experts that stay stacked.
FAMILIES: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in KINDS},
    "phi3": {},
    "mixtral": {"num_local_experts": 4},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4},
    "glm4_moe": MOE | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64},
    "apertus": {},
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = str(request.param)
    return make_model(tmp_path_factory.mktemp(kind) / "model", kind, layers=2, more=FAMILIES[kind])


@pytest.fixture(scope="module")
def table(folder: Path) -> ParameterTable:
    return table_of(language_model(folder), folder)


@pytest.fixture(scope="module")
def loaded_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Load parameters and buffers as transformers does. Return them by name."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(lm.named_parameters()) | dict(lm.named_buffers())


def test_each_tensor_on_disk_is_the_box_that_transformers_loads_it_into(
    folder: Path, table: ParameterTable, loaded_tensors: dict[str, torch.Tensor]
) -> None:
    files = WeightFiles(folder)
    assert sorted(row.name for row in table.rows) == sorted(files.names())
    for row in table.rows:
        assert torch.equal(row.view(loaded_tensors[str(row.target)]), files.tensor(row.name)), row.name


def test_a_folder_goes_through_memory_and_back_bit_by_bit(folder: Path, table: ParameterTable, tmp_path: Path) -> None:
    files = WeightFiles(folder)
    lm = skeleton(folder, torch.device("cpu"))
    parts = []
    for name, target in (dict(lm.named_parameters()) | dict(lm.named_buffers())).items():
        if not table.holds(name):
            continue
        tensor = torch.full(target.shape, torch.nan)
        files.read_into(table.rows_of(name), tensor)
        assert not tensor.isnan().any(), name
        parts += table.views(name, tensor)
    layout = [(row.name, row.shape, "float32") for row in table.sent_rows]
    write_folder(folder, tmp_path / "out", layout, parts)
    copy = WeightFiles(tmp_path / "out")
    assert sorted(copy.names()) == sorted(files.names())
    assert all(torch.equal(copy.tensor(name), files.tensor(name)) for name in files.names())


def box_of(start: tuple[int, ...], extent: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(start, extent))


def shards_of(tensor: torch.Tensor, ranks: int) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Cut a tensor as FSDP does: return (start, shard) of each rank. A scalar stays whole."""
    if not tensor.ndim:
        return [((), tensor)]
    rows = -(-len(tensor) // ranks)
    further_starts = (0,) * (tensor.ndim - 1)
    return [((first, *further_starts), tensor[first : first + rows]) for first in range(0, len(tensor), rows)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_rows_of_several_ranks_make_up_every_tensor(
    ranks: int, folder: Path, table: ParameterTable, loaded_tensors: dict[str, torch.Tensor]
) -> None:
    files = WeightFiles(folder)
    for row in table.rows:
        rebuilt = torch.full(row.shape, torch.nan)
        for start, shard in shards_of(loaded_tensors[str(row.target)].detach(), ranks):
            part = row.part(shard, start)
            if part:
                begin, view = part
                rebuilt[box_of(begin, view.shape)] = view
        assert torch.equal(rebuilt, files.tensor(row.name)), row.name


def test_a_part_of_a_tensor_has_its_place_in_memory(
    table: ParameterTable, loaded_tensors: dict[str, torch.Tensor]
) -> None:
    for row in table.rows:
        target = loaded_tensors[str(row.target)]
        disk = row.view(target)
        start = tuple(size // 2 for size in disk.shape)
        extent = tuple(size - size // 2 for size in disk.shape)
        target_start, target_extent = row.place(start, extent)
        part = target[box_of(target_start, target_extent)]
        expected = disk[box_of(start, extent)]
        assert torch.equal(part.reshape(expected.shape), expected), row.name


def test_buffers_are_sent_and_not_trained(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "glm4_moe", more=FAMILIES["glm4_moe"])
    table = table_of(language_model(folder), folder)
    buffers = [row for row in table.rows if row.buffer]
    assert len(buffers) == 1
    buffer = buffers[0]
    assert buffer.name == buffer.target == "model.layers.1.mlp.gate.e_score_correction_bias"
    assert buffer.is_sent and not buffer.is_trained
    facts = derive_facts(folder)
    assert facts.buffers == (buffer.name,) and facts.keeps_float32(buffer.name)


def test_below_adapters_their_rows_alone_are_trained_sent_and_saved(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "glm4_moe", more=FAMILIES["glm4_moe"])
    base_table = table_of(language_model(folder), folder)
    targets, _ = choose_targets(derive_facts(folder).sizes.linears, "attention")
    spec = AdapterSpec(rank=2, alpha=4.0, rslora=False, dropout=0.0, targets=targets)
    table = base_table.with_adapters(spec.tensors)
    expected_rows = [(tensor.name, tensor.shape) for tensor in spec.tensors]
    assert [(row.name, row.shape) for row in table.sent_rows] == expected_rows
    assert all(row.is_trained and table.sends(row.name) for row in table.sent_rows)
    # Frozen base weights and buffers are read by their names on disk, and are not sent by refits.
    assert [row.name for row in table.rows if row.frozen] == [row.name for row in base_table.rows]
    assert not table.kept_rows and not table.is_mixed
    assert all(table.holds(str(row.target)) for row in base_table.rows)
    assert not any(table.sends(str(row.target)) for row in base_table.rows)


def change_weights(folder: Path, add: dict[str, torch.Tensor], rename: Any = str, drop: str = "") -> Path:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(drop, None)
    renamed_tensors = {rename(name): tensor for name, tensor in tensors.items()}
    save_file(renamed_tensors | add, folder / "model.safetensors")
    return folder


def test_a_text_model_is_read_under_its_prefix_and_the_rest_is_kept(tmp_path: Path) -> None:
    def add_prefix(name: str) -> str:
        return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name

    add = {"model.visual.blocks.0.attn.qkv.weight": torch.ones(2, 2), "mtp.fc.weight": torch.ones(2)}
    folder = change_weights(make_model(tmp_path / "m", "llama"), add, add_prefix)
    table = table_of(language_model(folder), folder)
    assert table.by_name["model.language_model.norm.weight"].target == "model.norm.weight"
    assert table.by_name["lm_head.weight"].target == "lm_head.weight"
    assert {row.name for row in table.kept_rows} == add.keys() == set(derive_facts(folder).kept)


def test_experts_that_a_folder_has_stacked_are_read_stacked(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "qwen3_moe", layers=1)
    lm = language_model(folder)
    tensors_on_disk = {name: ("float32", tuple(parameter.shape)) for name, parameter in lm.named_parameters()}
    table = derive_table(lm, tensors_on_disk, folder)
    assert {row.name for row in table.rows} == tensors_on_disk.keys()


def test_a_copy_of_a_tied_head_is_left_out(tmp_path: Path) -> None:
    folder = change_weights(make_model(tmp_path / "m", "qwen3"), {"lm_head.weight": torch.ones(64, 128)})
    assert "lm_head.weight" not in table_of(language_model(folder), folder).by_name


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("add", "drop", "message"),
    [
        ({}, NORM, f"has no tensor {NORM}, which transformers' {NORM} is read from"),
        ({NORM: torch.ones(7)}, "", rf"{NORM} has shape \(7,\), the configuration says \(128,\)"),
        ({"model.layers.0.extra": torch.ones(7)}, "", "model.layers.0.extra is no part of transformers' Llama"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, add: dict[str, torch.Tensor], drop: str, message: str
) -> None:
    folder = change_weights(make_model(tmp_path / "m", "llama"), add, drop=drop)
    with pytest.raises(ModelError, match=message):
        derive_facts(folder)


def test_a_conversion_that_computes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading

    folder = make_model(tmp_path / "m", "llama")

    def add_one(lm: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor + 1 for name, tensor in state.items()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", add_one)
    with pytest.raises(ModelError, match=r"transformers computes model\.embed_tokens\.weight when it writes"):
        derive_facts(folder)


def test_the_time_of_a_table_grows_with_its_tensors_and_not_with_their_square(tmp_path: Path) -> None:
    """Qwen3-30B-A3B has 18,867 tensors, whose table took 12 s of each rank's start."""
    keys = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 24, "num_experts": 64, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "moe_intermediate_size": 8, **keys}))
    lm = language_model(tmp_path)

    def measure_seconds(disk: dict[str, tuple[str, tuple[int, ...]]] | None) -> float:
        begin = time.process_time()
        derive_table(lm, disk, tmp_path)
        return time.process_time() - begin

    disk = {row.name: ("bfloat16", row.shape) for row in derive_table(lm, None, tmp_path).rows}
    assert len(disk) > 4000
    with_disk = min(measure_seconds(disk) for _ in range(2))
    without_disk = min(measure_seconds(None) for _ in range(2))
    assert with_disk < 3 * without_disk
