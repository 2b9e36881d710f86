"""A model that rlctl does not know by name trains by its derived facts: log-probs, update, shards, export, buffers."""

import inspect
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import MixedPrecisionPolicy

from rlctl.config.errors import ModelError
from rlctl.models.derive import derive_facts
from rlctl.models.hf_folder import WeightFiles
from rlctl.preflight.backend import backend_of
from rlctl.refit.refit_plan import RefitPlan
from rlctl.training.fsdp.model import shard_float32
from tests.system.training.scenario import CONFIG, WeightedLoss, open_trainer, plain_log_probs, sequences, totals
from tests.tiny_models import make_model
from tests.zoo import FAMILIES as ZOO
from tests.zoo import make_family

DATA = sequences(6)
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4},
    "phi3": {},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.1},
    "seed_oss": {"attention_dropout": 0.1, "residual_dropout": 0.1},
    "gemma2": {"sliding_window": 4},
    "phi": {},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 4},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "lm_head_multiplier": 0.5,
    },
    "mixtral": {"num_local_experts": 4},
    # Corrections of its routers are parameters without a gradient.
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 1},
    "glm4_moe": MOE | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}


# `model check` proves the same of a family of the zoo, in test_zoo.py: those are long here.
PROVEN = [kind for kind in FAMILIES if kind in ZOO and ZOO[kind].shows and not ZOO[kind].refused]
CASES = [pytest.param(kind, marks=pytest.mark.long) if kind in PROVEN else kind for kind in FAMILIES]


def compute_with_transformers(folder: Path) -> list[np.ndarray]:
    """Return the log-probs of DATA by transformers alone. No trainer of this process may have patched it yet."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return [plain_log_probs(lm, sequence)[0].detach().numpy() for sequence in DATA]


def assert_log_probs(trainer: Any, expected: list[np.ndarray]) -> None:
    """Assert that the trainer's log-probs of DATA are the expected ones."""
    for row, expected_row in zip(trainer.log_probs([DATA])[0], expected, strict=True):
        np.testing.assert_allclose(row[1:], expected_row, atol=2e-5)


@pytest.mark.parametrize("kind", CASES)
def test_it_trains_as_transformers_computes_it(kind: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", kind, more=FAMILIES[kind], scale=2.0)
    source = WeightFiles(folder)
    expected = compute_with_transformers(folder)
    with open_trainer(folder, tmp_path) as trainer:
        assert_log_probs(trainer, expected)
        trainer.export_folder(tmp_path / "out", "float32")
        out = WeightFiles(tmp_path / "out")
        assert sorted(out.names()) == sorted(source.names())
        assert all(torch.equal(out.tensor(name), source.tensor(name)) for name in source.names())
        shards = trainer.shards()
        RefitPlan.build(trainer.layout(), [[shard.box for shard in shards]])
        assert all(torch.equal(shard.tensor, source.tensor(shard.name)) for shard in shards)
        assert trainer.train([DATA], WeightedLoss(), totals(DATA))["train/grad_norm"] > 0


def test_a_state_that_passes_on_to_the_next_sequence_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.falcon_h1 import modeling_falcon_h1 as modeling

    def make_leaking(name: str) -> Any:
        kernel = inspect.unwrap(getattr(modeling, name))

        def leak(*args: Any, **keywords: Any) -> Any:
            return kernel(*args, **keywords)

        leak.restarts = True
        return leak

    for name in ("causal_conv1d_fn", "mamba2_chunk_scan"):
        monkeypatch.setattr(modeling, name, make_leaking(name))
    folder = make_model(tmp_path / "model", "falcon_h1", more=FAMILIES["falcon_h1"], scale=2.0)
    with (
        pytest.raises(ModelError, match="a state passes from one sequence to the next"),
        open_trainer(folder, tmp_path),
    ):
        pass


def rewrite_folder(source: Path, folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """Write a copy of a model folder whose tensors are changed."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    save_file({name: change(name, tensor) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return folder


def test_a_parameter_that_transformers_keeps_in_float32_is_computed_in_it(tmp_path: Path) -> None:
    """The gates differ by less than bfloat16 can represent, so that only a float32 computation shows the difference."""

    def scale_gates(factor: float) -> Callable[[str, torch.Tensor], torch.Tensor]:
        return lambda name, tensor: tensor.bfloat16().float() * factor if name.endswith("gate.weight") else tensor

    original = make_family(tmp_path / "original", "ernie4_5_moe")
    rounded = rewrite_folder(original, tmp_path / "rounded", scale_gates(1))
    larger = rewrite_folder(original, tmp_path / "larger", scale_gates(1 + 2**-9.2))
    rounded_tensors = load_file(rounded / "model.safetensors")
    larger_tensors = load_file(larger / "model.safetensors")
    for name, tensor in rounded_tensors.items():
        assert torch.equal(tensor.bfloat16(), larger_tensors[name].bfloat16())
    log_probs: dict[tuple[Path, str], np.ndarray] = {}
    for folder in (rounded, larger):
        with open_trainer(folder, tmp_path, dtype="bfloat16", reference=larger) as trainer:
            for role in ("policy", "reference"):
                log_probs[folder, role] = np.concatenate(trainer.log_probs([DATA], role)[0])
            dtypes = {dtype for name, _, dtype in trainer.layout("bfloat16") if name.endswith("gate.weight")}
            assert dtypes == {"float32"}
            assert trainer.train([DATA], WeightedLoss(), totals(DATA))["train/grad_norm"] > 0
    of_larger = log_probs[larger, "policy"]
    assert np.abs(log_probs[rounded, "policy"] - of_larger).max() > 0
    np.testing.assert_array_equal(log_probs[rounded, "reference"], of_larger)
    np.testing.assert_array_equal(log_probs[larger, "reference"], of_larger)


def test_a_float32_parameter_beside_others_in_its_module_needs_a_rank_that_shares_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssPreTrainedModel

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(GptOssPreTrainedModel, "_keep_in_fp32_modules_strict", ["sinks"], raising=False)
    folder = make_model(tmp_path / "model", "gpt_oss", more=FAMILIES["gpt_oss"])
    with open_trainer(folder, tmp_path, dtype="bfloat16") as trainer:
        trainer.train([DATA], WeightedLoss(), totals(DATA))
        layer = trainer._policy.lm.model.layers[0]
        facts = trainer._facts
    message = r"keeps model.layers.0.self_attn.sinks in float32, beside others .* needed: trainer.dtype=float32"
    no_mesh: Any = None
    with pytest.raises(ModelError, match=message):
        shard_float32(layer, "model.layers.0.", facts, no_mesh, MixedPrecisionPolicy(torch.bfloat16))


def test_tensors_that_a_folder_has_in_float32_beside_bfloat16_are_sent_so(tmp_path: Path) -> None:
    float32_folder = make_model(tmp_path / "float32", "llama")
    float32_name = "model.norm.weight"
    mixed_folder = rewrite_folder(
        float32_folder,
        tmp_path / "mixed",
        lambda name, tensor: tensor if name == float32_name else tensor.bfloat16(),
    )
    with open_trainer(mixed_folder, tmp_path) as trainer:
        assert {name for name, _, dtype in trainer.layout("bfloat16") if dtype == "float32"} == {float32_name}
    with open_trainer(float32_folder, tmp_path) as trainer:
        assert {dtype for _, _, dtype in trainer.layout("bfloat16")} == {"bfloat16"}


def test_megatron_trains_its_four_and_says_so(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "mistral")
    sizes = derive_facts(folder).sizes
    fsdp = replace(CONFIG, backend="fsdp")
    assert list(backend_of(fsdp).check_model(fsdp, sizes)) == []
    megatron = replace(CONFIG, backend="megatron")
    messages = [problem.message for problem in backend_of(megatron).check_model(megatron, sizes)]
    assert messages == ["megatron trains llama, qwen2, qwen3, qwen3_moe, not mistral; use trainer.backend=fsdp"]


def test_a_class_that_transformers_learns_of_later_trains_by_its_derived_facts(tmp_path: Path) -> None:
    """The class has a parameter, a scale of attention and a scale of logits that no file of the product knows."""
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    class LaterConfig(LlamaConfig):
        model_type = "later_than_this"
        logit_scale = 0.5

    class LaterForCausalLM(LlamaForCausalLM):
        config_class = LaterConfig

        def __init__(self, config: LaterConfig) -> None:
            super().__init__(config)
            self.model.final_bias = nn.Parameter(torch.zeros(config.hidden_size))
            for layer in self.model.layers:
                layer.self_attn.scaling = 0.3

        def forward(self, *args: Any, **keywords: Any) -> Any:
            output = super().forward(*args, **keywords)
            output.logits = output.logits * self.config.logit_scale
            return output

    AutoConfig.register("later_than_this", LaterConfig)
    AutoModelForCausalLM.register(LaterConfig, LaterForCausalLM)
    folder = make_model(tmp_path / "model", "later_than_this", more={"logit_scale": 0.5}, scale=2.0)
    facts = derive_facts(folder)
    assert (facts.architecture, facts.kinds.logits.scale) == ("LaterForCausalLM", 0.5)
    assert {round(kind.scale, 6) for kind in facts.kinds.attention} == {0.3}
    expected = compute_with_transformers(folder)
    with open_trainer(folder, tmp_path) as trainer:
        assert_log_probs(trainer, expected)
        assert "model.final_bias" in {name for name, _, _ in trainer.layout()}
        assert trainer.train([DATA], WeightedLoss(), totals(DATA))["train/grad_norm"] > 0
