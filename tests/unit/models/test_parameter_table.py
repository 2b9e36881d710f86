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
from rlctl.models.meta_model import causal_lm, skeleton
from rlctl.models.parameter_table import ParameterTable, derive_table
from tests.tiny_models import KINDS, make_model

MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Names on disk that differ from those in memory, buffers on disk, fused matrices, experts that stay stacked.
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
    return table_of(causal_lm(folder), folder)


@pytest.fixture(scope="module")
def held(folder: Path) -> dict[str, torch.Tensor]:
    """Parameters and buffers as transformers loads them."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(lm.named_parameters()) | dict(lm.named_buffers())


def test_each_tensor_on_disk_is_the_box_that_transformers_loads_it_into(
    folder: Path, table: ParameterTable, held: dict[str, torch.Tensor]
) -> None:
    files = WeightFiles(folder)
    assert sorted(row.name for row in table.rows) == sorted(files.names())
    for row in table.rows:
        assert torch.equal(row.view(held[str(row.target)]), files.tensor(row.name)), row.name


def test_a_folder_goes_through_memory_and_back_bit_by_bit(folder: Path, table: ParameterTable, tmp_path: Path) -> None:
    files, lm = WeightFiles(folder), skeleton(folder, torch.device("cpu"))
    targets = {name: each for name, each in (*lm.named_parameters(), *lm.named_buffers()) if table.holds(name)}
    loaded = {name: torch.full(each.shape, torch.nan) for name, each in targets.items()}
    for name, tensor in loaded.items():
        files.read_into(table.rows_of(name), tensor)
        assert not tensor.isnan().any(), name
    parts = [part for name, tensor in loaded.items() for part in table.views(name, tensor)]
    write_folder(folder, tmp_path / "out", [(row.name, row.shape, "float32") for row in table.sent_rows], parts)
    copy = WeightFiles(tmp_path / "out")
    assert sorted(copy.names()) == sorted(files.names())
    assert all(torch.equal(copy.tensor(name), files.tensor(name)) for name in files.names())


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_rows_of_several_ranks_make_up_every_tensor(
    ranks: int, folder: Path, table: ParameterTable, held: dict[str, torch.Tensor]
) -> None:
    files, made = WeightFiles(folder), {row.name: torch.full(row.shape, torch.nan) for row in table.rows}
    for row in table.rows:
        whole = held[str(row.target)].detach()
        each = -(-len(whole) // ranks) if whole.ndim else 1
        for first in range(0, len(whole), each) if whole.ndim else [0]:
            start = (first, *(0,) * (whole.ndim - 1)) if whole.ndim else ()
            part = row.part(whole[first : first + each] if whole.ndim else whole, start)
            if part:
                start, view = part
                made[row.name][tuple(slice(at, at + size) for at, size in zip(start, view.shape))] = view
    assert all(torch.equal(made[name], files.tensor(name)) for name in made)


def test_a_part_of_a_tensor_has_its_place_in_memory(table: ParameterTable, held: dict[str, torch.Tensor]) -> None:
    for row in table.rows:
        target = held[str(row.target)]
        disk = row.view(target)
        start, extent = tuple(size // 2 for size in disk.shape), tuple(size - size // 2 for size in disk.shape)
        begin, size = row.place(start, extent)
        box = target[tuple(slice(at, at + count) for at, count in zip(begin, size))]
        expected = disk[tuple(slice(at, at + count) for at, count in zip(start, extent))]
        assert torch.equal(box.reshape(expected.shape), expected), row.name


def test_buffers_are_sent_and_not_trained(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "glm4_moe", more=FAMILIES["glm4_moe"])
    table = table_of(causal_lm(folder), folder)
    (buffer,) = (row for row in table.rows if row.buffer)
    assert buffer.name == buffer.target == "model.layers.1.mlp.gate.e_score_correction_bias"
    assert buffer.is_sent and not buffer.is_trained
    facts = derive_facts(folder)
    assert facts.buffers == (buffer.name,) and facts.keeps_float32(buffer.name)


def test_below_adapters_their_rows_alone_are_trained_sent_and_saved(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "glm4_moe", more=FAMILIES["glm4_moe"])
    own = table_of(causal_lm(folder), folder)
    targets, _ = choose_targets(derive_facts(folder).sizes.linears, "attention")
    spec = AdapterSpec(2, 4.0, False, 0.0, targets)
    table = own.below(spec.tensors)
    assert [(row.name, row.shape) for row in table.sent_rows] == [(each.name, each.shape) for each in spec.tensors]
    assert all(row.is_trained and table.sends(row.name) for row in table.sent_rows)
    # The base, its buffers too, is read by its names on disk, and goes nowhere.
    assert [row.name for row in table.rows if row.frozen] == [row.name for row in own.rows]
    assert not table.kept_rows and not table.is_mixed
    assert all(table.holds(str(row.target)) and not table.sends(str(row.target)) for row in own.rows)


def changed(folder: Path, add: dict[str, torch.Tensor], rename: Any = str, drop: str = "") -> Path:
    tensors = load_file(folder / "model.safetensors")
    kept = {rename(name): tensor for name, tensor in tensors.items() if name != drop}
    save_file(kept | add, folder / "model.safetensors")
    return folder


def test_a_text_model_is_read_under_its_prefix_and_the_rest_is_kept(tmp_path: Path) -> None:
    def wrapped(name: str) -> str:
        return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name

    add = {"model.visual.blocks.0.attn.qkv.weight": torch.ones(2, 2), "mtp.fc.weight": torch.ones(2)}
    folder = changed(make_model(tmp_path / "m", "llama"), add, wrapped)
    table = table_of(causal_lm(folder), folder)
    assert table.by_name["model.language_model.norm.weight"].target == "model.norm.weight"
    assert table.by_name["lm_head.weight"].target == "lm_head.weight"
    assert {row.name for row in table.kept_rows} == add.keys() == set(derive_facts(folder).kept)


def test_experts_that_a_folder_has_stacked_are_read_stacked(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "qwen3_moe", layers=1)
    lm = causal_lm(folder)
    named = {name: tuple(each.shape) for name, each in lm.named_parameters()}
    table = derive_table(lm, {name: ("float32", shape) for name, shape in named.items()}, folder)
    assert {row.name for row in table.rows} == named.keys()


def test_a_copy_of_a_tied_head_is_left_out(tmp_path: Path) -> None:
    folder = changed(make_model(tmp_path / "m", "qwen3"), {"lm_head.weight": torch.ones(64, 128)})
    assert "lm_head.weight" not in table_of(causal_lm(folder), folder).by_name


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("add", "drop", "said"),
    [
        ({}, NORM, f"has no tensor {NORM}, which transformers' {NORM} is read from"),
        ({NORM: torch.ones(7)}, "", rf"{NORM} has shape \(7,\), the configuration says \(128,\)"),
        ({"model.layers.0.extra": torch.ones(7)}, "", "model.layers.0.extra is no part of transformers' Llama"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, add: dict[str, torch.Tensor], drop: str, said: str
) -> None:
    folder = changed(make_model(tmp_path / "m", "llama"), add, drop=drop)
    with pytest.raises(ModelError, match=said):
        derive_facts(folder)


def test_a_conversion_that_computes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading

    folder = make_model(tmp_path / "m", "llama")
    monkeypatch.setattr(
        core_model_loading, "revert_weight_conversion", lambda lm, state: {n: t + 1 for n, t in state.items()}
    )
    with pytest.raises(ModelError, match=r"transformers computes model\.embed_tokens\.weight when it writes"):
        derive_facts(folder)


def test_the_time_of_a_table_grows_with_its_tensors_and_not_with_their_square(tmp_path: Path) -> None:
    """Qwen3-30B-A3B has 18,867 tensors, whose table took 12 s of each rank's start."""
    keys = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 24, "num_experts": 64, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "moe_intermediate_size": 8, **keys}))
    lm = causal_lm(tmp_path)

    def seconds(disk: dict[str, tuple[str, tuple[int, ...]]] | None) -> float:
        begin = time.process_time()
        derive_table(lm, disk, tmp_path)
        return time.process_time() - begin

    names = {row.name: ("bfloat16", row.shape) for row in derive_table(lm, None, tmp_path).rows}
    assert len(names) > 4000
    assert min(seconds(names) for _ in range(2)) < 3 * min(seconds(None) for _ in range(2))
