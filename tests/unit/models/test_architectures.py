"""Every row of the table against transformers, on the row's tiny model; a row is tested by being added."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.models import packed_attention
from rlctl.models.architectures import ARCHITECTURES
from rlctl.models.hf_folder import WeightFiles, fuse, unfuse, write_folder
from rlctl.models.meta_model import layout_of, skeleton
from rlctl.models.model_sizes import ModelSizes, read_sizes
from rlctl.run import fingerprint
from tests.tiny_models import KINDS, Kind, make_model


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp(kind) / "model", kind, layers=3, hidden=96, heads=6, head_dim=32)


@pytest.fixture(scope="module")
def lm(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def test_the_row_names_what_transformers_builds(kind: Kind, lm: Any) -> None:
    row = ARCHITECTURES[kind]
    assert type(lm).__name__ == row.causal_lm
    assert (lm.get_submodule(row.backbone), lm.get_submodule(row.embedding), lm.get_submodule(row.head)) == (
        lm.base_model, lm.get_input_embeddings(), lm.get_output_embeddings()
    )  # fmt: skip
    layers = lm.get_submodule(row.layers)
    assert len(layers) == 3 and lm.get_submodule(row.norm).weight.shape == (96,)
    sparse = [any(".experts." in f".{name}." for name, _ in layer.named_modules()) for layer in layers]
    assert row.sparse_layers(json.loads(lm.config.to_json_string(use_diff=False))) == sparse
    assert any(sparse) == (row.experts is not None)


def test_sizes_are_those_of_transformers(folder: Path, lm: Any) -> None:
    sizes = read_sizes(folder / "config.json")
    assert sizes.parameters == sum(parameter.numel() for parameter in lm.parameters())
    assert (sizes.layers, sizes.heads, sizes.kv_heads, sizes.head_dim) == (3, 6, 2, 32)
    names = {name for name, _ in lm.named_parameters()}
    for name, has in (
        ("q_proj.bias", sizes.qkv_bias),
        ("o_proj.bias", sizes.output_bias),
        ("up_proj.bias", sizes.mlp_bias),
        ("q_norm.weight", sizes.qk_norm),
        ("gate_up_proj", sizes.experts > 0),
    ):
        assert any(each.endswith(name) for each in names) == has, name


def test_what_a_config_leaves_out_is_what_transformers_takes(kind: Kind, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64, "tie_word_embeddings": False}
    row = ARCHITECTURES[kind]
    off = {} if row.window.size is None or row.window.key != "sliding_window" else {"sliding_window": None}
    experts = {row.experts.number[0]: 4} if row.experts else {}
    raw = {"model_type": kind, **sizes, **off, **experts}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    found: ModelSizes = read_sizes(tmp_path / "config.json")
    assert found.parameters == sum(parameter.numel() for parameter in built.parameters())
    if row.experts:
        assert found.experts_per_token == config.num_experts_per_tok


def test_a_folder_goes_through_memory_and_back_bit_by_bit(folder: Path, lm: Any, tmp_path: Path) -> None:
    files = WeightFiles(folder)
    layout = layout_of(skeleton(folder, torch.device("cpu")))
    assert sorted(name for name, _ in layout) == sorted(files.names())
    loaded = {name: torch.empty(parameter.shape) for name, parameter in lm.named_parameters()}
    for name, tensor in loaded.items():
        files.read_into(name, tensor)
        assert torch.equal(tensor, lm.get_parameter(name)), name
    parts = [(part, view) for name, tensor in loaded.items() for part, view in unfuse(name, tensor)]
    write_folder(folder, tmp_path / "out", [(name, shape, "float32") for name, shape in layout], parts)
    copy = WeightFiles(tmp_path / "out")
    assert sorted(copy.names()) == sorted(files.names())
    assert all(torch.equal(copy.tensor(name), files.tensor(name)) for name in files.names())


def test_parts_stand_in_memory_where_fuse_says(folder: Path, lm: Any) -> None:
    experts = read_sizes(folder / "config.json").experts
    for name, parameter in lm.named_parameters():
        for part, view in unfuse(name, parameter):
            whole, shape, start = fuse(part, tuple(view.shape), (0,) * view.ndim, experts)
            assert (whole, shape) == (name, tuple(parameter.shape))
            size = (1,) * (len(start) - view.ndim) + tuple(view.shape)
            box = parameter[tuple(slice(begin, begin + count) for begin, count in zip(start, size))]
            assert torch.equal(box.reshape(view.shape), view), part


def test_a_pack_sees_what_each_of_its_sequences_sees_alone(folder: Path, lm: Any) -> None:
    from transformers import AutoModelForCausalLM

    packed = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=packed_attention.register()
    )
    lengths = [5, 1, 9]
    tokens = torch.randint(3, 64, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    with torch.no_grad():
        got = packed(
            input_ids=tokens[None],
            position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
            use_cache=False,
            cu_seq_lens_q=ends,
            max_length_q=max(lengths),
        ).logits[0]
        alone = torch.cat([lm(input_ids=own[None], use_cache=False).logits[0] for own in tokens.split(lengths)])
    torch.testing.assert_close(got, alone, atol=1e-4, rtol=1e-4)


def test_a_resume_compares_what_the_row_reads(kind: Kind, folder: Path) -> None:
    row, raw = ARCHITECTURES[kind], json.loads((folder / "config.json").read_text())
    read = {flag for flag in (row.qkv_bias, row.output_bias, row.mlp_bias) if isinstance(flag, str)}
    if row.experts:
        read |= {*row.experts.number, row.experts.per_token[0], row.experts.width[0]}
    assert {key for key in read if raw.get(key) is not None} <= fingerprint.sizes_of(folder).keys()
