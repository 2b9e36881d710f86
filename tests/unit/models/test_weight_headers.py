"""Weight files are checked before a start: quantised weights, truncated files and Git LFS pointers are refused."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlctl.config.errors import ModelError
from rlctl.config.schema import ModelSection
from rlctl.models.hf_folder import WeightFiles
from rlctl.models.model_files import ModelFiles
from rlctl.models.weight_headers import check_weights, digest_of_weights
from tests.tiny_models import KINDS, Kind, make_model

DOWN = "model.layers.1.mlp.down_proj.weight"


def section(folder: Path) -> ModelSection:
    return ModelSection(str(folder), tokenizer=None, random_init=False, max_length=None)


def rewrite_weights(folder: Path, change: dict[str, torch.Tensor]) -> Path:
    """Replace or add tensors of a real model without changing its config.json. Return the folder."""
    from safetensors.torch import load_file

    save_file(load_file(folder / "model.safetensors") | change, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_plain_weights_pass(tmp_path: Path, kind: Kind) -> None:
    folder = make_model(tmp_path, kind)
    check_weights(folder)
    assert ModelFiles.prepare(section(folder), tmp_path, 0).max_length == 256


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({DOWN: torch.zeros(128, 256).to(torch.float8_e4m3fn)}, f"{DOWN} is F8_E4M3"),
        ({DOWN: torch.zeros(128, 256).to(torch.float8_e5m2)}, f"{DOWN} is F8_E5M2"),
        ({DOWN: torch.zeros(128, 256, dtype=torch.int8)}, f"{DOWN} is I8"),
        ({DOWN: torch.zeros(16384, 1, dtype=torch.uint8)}, f"{DOWN} is U8"),
        ({f"{DOWN}_scale_inv": torch.ones(1, 2)}, f"{DOWN}_scale_inv belongs to quantised weights"),
        ({f"{DOWN}_scale": torch.ones(1)}, f"{DOWN}_scale belongs to quantised weights"),
        ({"x_blocks": torch.ones(1).byte(), "x_scales": torch.ones(1)}, "x_scales belongs to quantised weights"),
        (
            {"model.layers.0.mlp.up_proj.qweight": torch.ones(1)},
            "model.layers.0.mlp.up_proj.qweight belongs to quantised weights",
        ),
        ({f"{DOWN}.absmax": torch.ones(1)}, f"{DOWN}.absmax belongs to quantised weights"),
        ({f"{DOWN}.quant_state.bitsandbytes__nf4": torch.ones(1)}, f"{DOWN}.quant_state.bitsandbytes__nf4 belongs to"),
    ],
)
def test_quantised_weights_are_named_where_config_json_is_silent(
    tmp_path: Path, change: dict[str, torch.Tensor], expected: str
) -> None:
    folder = rewrite_weights(make_model(tmp_path, "llama"), change)
    for read_weights in (
        lambda: check_weights(folder),
        lambda: WeightFiles(folder),
        lambda: ModelFiles.prepare(section(folder), tmp_path, 0),
    ):
        with pytest.raises(ModelError) as caught:
            read_weights()
        assert f"{folder}/model.safetensors: {expected}" in str(caught.value)
        assert "use the checkpoint that it was quantised from" in str(caught.value)


def test_a_scale_of_no_other_tensor_is_the_models_own(tmp_path: Path) -> None:
    router_scale = {"model.layers.0.router.per_expert_scale": torch.ones(4)}
    check_weights(rewrite_weights(make_model(tmp_path, "llama"), router_scale))


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def write_pointer(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 100\n")


def write_noise(file: Path) -> None:
    file.write_bytes((20).to_bytes(8, "little") + b"[" * 20)


def remove(file: Path) -> None:
    file.unlink()


def write_index_of_nothing(file: Path) -> None:
    file.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": []}))


def rename(file: Path) -> None:
    file.rename(file.with_name("mine.safetensors"))


def rename_to_bin(file: Path) -> None:
    file.rename(file.with_name("pytorch_model.bin"))


def write_index_of_files_elsewhere(file: Path) -> None:
    shutil.copy(file, file.parent.parent / "model.safetensors")
    weight_map = {"a": "../model.safetensors"}
    file.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def damage_header(change: dict[str, Any]) -> Any:
    """Return a function that changes the entry of the first tensor in the header. A value of None removes its key."""

    def damage(file: Path) -> None:
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        name = next(key for key in header if key != "__metadata__")
        changed_entry = {**header[name], **change}
        header[name] = {key: value for key, value in changed_entry.items() if value is not None}
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return damage


def write_index_of_others(file: Path) -> None:
    """Add an index of another file: transformers would read the first file, vLLM that of the index."""
    shutil.copy(file, file.with_name("model-00001-of-00001.safetensors"))
    weight_map = {"a": "model-00001-of-00001.safetensors"}
    file.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_index_of_more(file: Path) -> None:
    file.rename(file.with_name("model-00001-of-00002.safetensors"))
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    file.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (cut_short, "was cut short: "),
        (empty, "is no safetensors file, or was cut short: 0 bytes"),
        (write_pointer, "is a Git LFS pointer, not the weights; get them: git lfs pull"),
        (write_noise, "is no safetensors file: its header cannot be read"),
        (remove, "has no weights: it needs model.safetensors, or its index$"),
        (
            rename,
            "has no weights: mine.safetensors is there, but not named model.safetensors, nor listed in an index",
        ),
        (
            rename_to_bin,
            "pytorch_model.bin is there, but weights are read from safetensors only; .* save_pretrained",
        ),
        (damage_header({"shape": None}), "in its header must have dtype, shape and data_offsets"),
        (damage_header({"dtype": ["F32"]}), "in its header has an unknown dtype; allowed: F64, "),
        (damage_header({"data_offsets": [0, float("inf")]}), "has no data_offsets of whole numbers, at least 0"),
        (damage_header({"data_offsets": [4, 8], "shape": [1]}), "in its header begins at byte 4, where 0 is next"),
        (write_index_of_files_elsewhere, r"lists \.\./model\.safetensors, which is outside its folder"),
        (write_index_of_nothing, "model.safetensors.index.json is no index of weights"),
        (
            write_index_of_more,
            "index.json lists model-00002-of-00002.safetensors: 1 of 2 files are missing; copy or download",
        ),
        (
            write_index_of_others,
            "has model.safetensors, and model.safetensors.index.json lists other files: remove the one",
        ),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, damage: Any, expected: str) -> None:
    folder = make_model(tmp_path, "llama")
    damage(folder / "model.safetensors")
    with pytest.raises(ModelError, match=expected):
        check_weights(folder)


def test_a_folder_whose_name_is_not_utf8_is_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"m\xff")
    folder.mkdir()
    with pytest.raises(ModelError, match="not UTF-8, which safetensors does not open: rename the folder"):
        check_weights(folder)


def test_weights_that_differ_between_the_ends_of_a_file_have_another_digest(tmp_path: Path) -> None:
    # Adding adapters to a base changes its layers, which lie between its embedding and its head.
    tensors = {name: torch.zeros(1 << 19) for name in ("embedding", "layer", "norm")}
    digests = []
    for change in (0, 0, 1):
        tensors["layer"] = torch.full((1 << 19,), float(change))
        save_file(tensors, tmp_path / "model.safetensors")
        digests.append(digest_of_weights(tmp_path))
    assert digests[0] == digests[1] != digests[2]
