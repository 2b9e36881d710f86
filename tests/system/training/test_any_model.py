"""A model that no table names trains by its derived facts: log-probs, update, shards and export, buffers included."""

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


@pytest.mark.parametrize("kind", CASES)
def test_it_trains_as_transformers_computes_it(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_model(tmp_path / "model", kind, more=FAMILIES[kind], scale=2.0)
    source = WeightFiles(folder)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    expected = [plain_log_probs(lm, sequence)[0].detach().numpy() for sequence in DATA]
    with open_trainer(folder, tmp_path) as one:
        for got, want in zip(one.log_probs([DATA])[0], expected, strict=True):
            np.testing.assert_allclose(got[1:], want, atol=2e-5)
        one.export_folder(tmp_path / "out", "float32")
        out = WeightFiles(tmp_path / "out")
        assert sorted(out.names()) == sorted(source.names())
        assert all(torch.equal(out.tensor(name), source.tensor(name)) for name in source.names())
        shards = one.shards()
        RefitPlan.build(one.layout(), [[shard.box for shard in shards]])
        assert all(torch.equal(shard.tensor, source.tensor(shard.name)) for shard in shards)
        assert one.train([DATA], WeightedLoss(), totals(DATA))["train/grad_norm"] > 0


def test_a_state_that_passes_on_to_the_next_sequence_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.falcon_h1 import modeling_falcon_h1 as home

    def leaking(name: str) -> Any:
        plain = inspect.unwrap(getattr(home, name))

        def leak(*args: Any, **keywords: Any) -> Any:
            return plain(*args, **keywords)

        leak.restarts = True
        return leak

    for name in ("causal_conv1d_fn", "mamba2_chunk_scan"):
        monkeypatch.setattr(home, name, leaking(name))
    folder = make_model(tmp_path / "model", "falcon_h1", more=FAMILIES["falcon_h1"], scale=2.0)
    with (
        pytest.raises(ModelError, match="a state passes from one sequence to the next"),
        open_trainer(folder, tmp_path),
    ):
        pass


def rewritten(source: Path, folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """Write a copy of a folder whose tensors are changed."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    save_file({name: change(name, tensor) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return folder


def test_a_parameter_that_transformers_keeps_in_float32_is_computed_in_it(tmp_path: Path) -> None:
    """Gates change by less than bfloat16 has digits for: only float32 sees the difference."""

    def gates(factor: float) -> Callable[[str, torch.Tensor], torch.Tensor]:
        return lambda name, x: x.bfloat16().float() * factor if name.endswith("gate.weight") else x

    made = make_family(tmp_path / "made", "ernie4_5_moe")
    folders = [rewritten(made, tmp_path / str(index), gates(factor)) for index, factor in enumerate((1, 1 + 2**-9.2))]
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(first[name].bfloat16(), second[name].bfloat16()) for name in first)
    found = []
    for folder in folders:
        with open_trainer(folder, tmp_path, dtype="bfloat16", reference=folders[1]) as one:
            found += [np.concatenate(one.log_probs([DATA], role)[0]) for role in ("policy", "reference")]
            kinds = {kind for name, _, kind in one.layout("bfloat16") if name.endswith("gate.weight")}
            assert kinds == {"float32"}
            assert one.train([DATA], WeightedLoss(), totals(DATA))["train/grad_norm"] > 0
    assert np.abs(found[0] - found[2]).max() > 0
    np.testing.assert_array_equal(found[1], found[2])
    np.testing.assert_array_equal(found[3], found[2])


def test_a_float32_parameter_beside_others_in_its_module_needs_a_rank_that_shares_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssPreTrainedModel

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(GptOssPreTrainedModel, "_keep_in_fp32_modules_strict", ["sinks"], raising=False)
    folder = make_model(tmp_path / "model", "gpt_oss", more=FAMILIES["gpt_oss"])
    with open_trainer(folder, tmp_path, dtype="bfloat16") as one:
        one.train([DATA], WeightedLoss(), totals(DATA))
        lm, facts = one._policy.lm, one._facts
    what = r"keeps model.layers.0.self_attn.sinks in float32, beside others .* needed: trainer.dtype=float32"
    nowhere: Any = None
    with pytest.raises(ModelError, match=what):
        shard_float32(lm.model.layers[0], "model.layers.0.", facts, nowhere, MixedPrecisionPolicy(torch.bfloat16))


def test_tensors_that_a_folder_has_in_float32_beside_bfloat16_are_sent_so(tmp_path: Path) -> None:
    made = make_model(tmp_path / "made", "llama")
    exact = "model.norm.weight"
    folder = rewritten(made, tmp_path / "mixed", lambda name, x: x if name == exact else x.bfloat16())
    with open_trainer(folder, tmp_path) as one:
        assert {name for name, _, kind in one.layout("bfloat16") if kind == "float32"} == {exact}
    with open_trainer(made, tmp_path) as one:
        assert {kind for _, _, kind in one.layout("bfloat16")} == {"bfloat16"}


def test_megatron_trains_its_four_and_says_so(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "mistral")
    sizes = derive_facts(folder).sizes
    what = "megatron trains llama, qwen2, qwen3, qwen3_moe, not mistral; use trainer.backend=fsdp"
    checked = {name: replace(CONFIG, backend=name) for name in ("fsdp", "megatron")}
    found = {name: [each.message for each in backend_of(one).check_model(one, sizes)] for name, one in checked.items()}
    assert found == {"fsdp": [], "megatron": [what]}


def test_a_class_that_transformers_learns_of_later_trains_by_its_derived_facts(tmp_path: Path) -> None:
    """It has a parameter, a scale of attention and logits that no file of the product knows."""
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
    assert (facts.causal_lm, facts.kinds.logits.scale) == ("LaterForCausalLM", 0.5)
    assert {round(kind.scale, 6) for kind in facts.kinds.attention} == {0.3}
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    expected = [plain_log_probs(lm, sequence)[0].detach().numpy() for sequence in DATA]
    with open_trainer(folder, tmp_path) as one:
        for got, want in zip(one.log_probs([DATA])[0], expected, strict=True):
            np.testing.assert_allclose(got[1:], want, atol=2e-5)
        assert "model.final_bias" in {name for name, _, _ in one.layout()}
        assert one.train([DATA], WeightedLoss(), totals(DATA))["train/grad_norm"] > 0
