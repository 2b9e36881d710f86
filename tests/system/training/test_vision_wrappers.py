"""The text model of a vision-language folder trains, with the published names. An export copies all other tensors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from rlctl.evaluation import transformers_model
from rlctl.models.adapter_folder import read_spec
from rlctl.models.derive import derive_facts
from rlctl.models.hf_folder import WeightFiles
from rlctl.preflight.engines.vllm import ENGINE
from tests.system.training.scenario import WeightedLoss, adapters_of, open_trainer, plain_log_probs, sequences, totals
from tests.tiny_models import EOS, PAD, make_tokenizer

DATA = sequences(6)
TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "pad_token_id": PAD, "eos_token_id": EOS,
    "bos_token_id": None,
}  # fmt: skip
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 14}
DELTA = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2}
DELTA |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "partial_rotary_factor": 0.5}
# model_type -> text, vision and other keys, and the prefixes of text and of other tensors as they are published.
WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str, tuple[str, ...]]] = {
    "gemma3": (
        TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        VISION | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
        {"mm_tokens_per_image": 4, "image_token_index": 60, "boi_token_index": 61, "eoi_token_index": 62},
        "language_model.model.",
        ("vision_tower.", "multi_modal_projector."),
    ),
    "qwen3_5": (
        TEXT | DELTA,
        VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16},
        {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
        | {"tie_word_embeddings": True},
        "model.language_model.",
        ("model.visual.",),
    ),
    # The vision-language model holds a causal LM, not a decoder.
    "llama4": (
        TEXT | {"model_type": "llama4_text", "intermediate_size_mlp": 128, "num_local_experts": 2},
        VISION
        | {"intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
        | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        {},
        "language_model.",
        ("vision_model.", "multi_modal_projector."),
    ),
}


def make_wrapper(folder: Path, kind: str) -> Path:
    """Write a random vision-language model with float32 weights."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text, vision, keys, *_ = WRAPPERS[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, **keys)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    make_tokenizer(folder, TEXT["vocab_size"])
    return folder


def load_wrapper(folder: Path) -> Any:
    """Load the vision-language model of a folder by transformers alone."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def assert_computed_by(model: Any, rows: list[np.ndarray]) -> None:
    """Assert that `rows` equal the log-probs of DATA that a transformers model computes."""
    with torch.no_grad():
        for row, sequence in zip(rows, DATA, strict=True):
            np.testing.assert_allclose(row[1:], plain_log_probs(model, sequence)[0].numpy(), atol=2e-5)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_text_trains_as_the_whole_computes_it_and_an_export_keeps_the_rest(kind: str, tmp_path: Path) -> None:
    *_, text_prefix, other_prefixes = WRAPPERS[kind]
    folder = make_wrapper(tmp_path / "model", kind)
    (folder / "preprocessor_config.json").write_text("{}")
    source = WeightFiles(folder)
    other_names = {name for name in source.names() if name.startswith(other_prefixes)}
    text_names = set(source.names()) - other_names
    assert set(derive_facts(folder).kept) == other_names
    assert all(name.startswith(text_prefix) for name in text_names)
    with open_trainer(folder, tmp_path) as trainer:
        assert_computed_by(load_wrapper(folder), trainer.log_probs([DATA])[0])
        # `rlctl model check` compares with the same model.
        text_model = transformers_model.plain_model(str(folder), "cpu")
        assert_computed_by(text_model, trainer.log_probs([DATA])[0])
        assert {name for name, _, _ in trainer.layout()} == text_names
        assert trainer.train([DATA], WeightedLoss(), totals(DATA))["train/grad_norm"] > 0
        # A checkpoint must not need the model folder any more, which another run may delete.
        aside = folder.rename(tmp_path / "aside")
        trainer.export_folder(tmp_path / "out", "float32")
        aside.rename(folder)
        trained_rows = trainer.log_probs([DATA])[0]
    # Without this file no engine loads the vision-language model.
    assert (tmp_path / "out/preprocessor_config.json").is_file()
    exported = WeightFiles(tmp_path / "out")
    assert sorted(exported.names()) == sorted(source.names())
    assert all(torch.equal(exported.tensor(name), source.tensor(name)) for name in other_names)
    assert not all(torch.equal(exported.tensor(name), source.tensor(name)) for name in source.names())
    assert_computed_by(load_wrapper(tmp_path / "out"), trained_rows)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_an_adapter_of_the_text_has_the_names_of_the_whole(kind: str, tmp_path: Path) -> None:
    # PEFT takes an adapter whose names it does not find for one of zeros, with a warning.
    folder = make_wrapper(tmp_path / "model", kind)
    spec = adapters_of(folder)
    adapter_folder = tmp_path / "out"
    with open_trainer(folder, tmp_path, adapters=spec) as trainer:
        for _ in range(3):
            trainer.train([DATA], WeightedLoss(), totals(DATA))
        aside = folder.rename(tmp_path / "aside")
        trainer.export_folder(adapter_folder)
        aside.rename(folder)
        trained_rows = trainer.log_probs([DATA])[0]
    wrapper = load_wrapper(folder)
    targets = json.loads((adapter_folder / "adapter_config.json").read_text())["target_modules"]
    with safe_open(adapter_folder / "adapter_model.safetensors", framework="pt") as file:
        names = file.keys()
        tensors = {name.removeprefix("base_model.model."): file.get_tensor(name) for name in names}
    assert {name.rpartition(".lora_")[0] for name in tensors} == set(targets)
    with torch.no_grad():
        for target in targets:
            product = tensors[f"{target}.lora_B.weight"] @ tensors[f"{target}.lora_A.weight"]
            wrapper.get_submodule(target).weight += spec.scale * product
    assert_computed_by(wrapper, trained_rows)
    assert read_spec(adapter_folder, derive_facts(folder).sizes.linears) == spec
    with open_trainer(folder, tmp_path, adapters=spec, adapter=adapter_folder) as trainer:
        for row, trained_row in zip(trainer.log_probs([DATA])[0], trained_rows, strict=True):
            np.testing.assert_allclose(row, trained_row, atol=1e-6)


def test_an_engine_on_a_cpu_refuses_the_whole_in_one_line(tmp_path: Path) -> None:
    folder = make_wrapper(tmp_path / "model", "gemma3")
    refusal = ENGINE.find_refusal("cpu", str(folder), derive_facts(folder).sizes)
    assert refusal and "Gemma3ForConditionalGeneration has a part for images" in refusal and "\n" not in refusal
    assert ENGINE.find_refusal("cuda", str(folder), derive_facts(folder).sizes) is None
