"""`rlctl model check`: a model that rounds in bfloat16 is proven. A model with another computation is refused."""

import inspect
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlctl.config.errors import ModelError
from rlctl.evaluation.checked_trainer import CheckedTrainer, checked_trainer
from rlctl.evaluation.evaluation_configs import checked_run
from rlctl.evaluation.model_check import (
    as_transformers,
    check_model,
    checked_sequences,
    engine_findings,
    faintly_as_transformers,
    packed_alone,
)
from rlctl.evaluation.target import find_target
from rlctl.grpo.parity_check import bound_of
from rlctl.launch.worker_specs import engine_spec
from rlctl.refit.sender import SendsWeights
from rlctl.refit.weight_source import Shard
from tests.zoo import VOCAB, make_family
from tests.zoo_table import IMPORTS

# A key of config.json with a value that is a little wrong.
WRONG: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 0.251},
    "gemma2": {"final_logit_softcapping": 5.5},
    "mistral": {"sliding_window": 9},
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 9500.0}},
    "qwen3_moe": {"num_experts_per_tok": 1},
}


def copy_with_keys(folder: Path, keys: dict[str, Any]) -> Path:
    """Copy a folder with other values of keys that its config.json has."""
    copy = shutil.copytree(folder, folder.with_name("other"))
    config = json.loads((copy / "config.json").read_text())
    assert config.keys() >= keys.keys()
    (copy / "config.json").write_text(json.dumps(config | keys))
    return copy


@contextmanager
def open_trainer(dtype: Any, folder: Path, scratch: Path) -> Iterator[CheckedTrainer]:
    run, files, _ = checked_run(find_target(str(folder), scratch), scratch)
    with checked_trainer(replace(run.trainer, dtype=dtype), files.folder, "cpu", scratch) as trainer:
        yield trainer


def layers_of(trainer: CheckedTrainer) -> Any:
    return trainer.rank._policy.lm.model.layers


def modeling_of(trainer: CheckedTrainer) -> Any:
    """Return the module of transformers that the model's class is from."""
    return sys.modules[type(trainer.rank._policy.lm).__module__]


def set_attention(name: str, make_setting: Callable[[Any], Any]) -> Callable[[CheckedTrainer], None]:
    """Return a mutation: another setting of `self_attn`, made of its present one, in every layer that has one."""

    def mutate(trainer: CheckedTrainer) -> None:
        for layer in layers_of(trainer):
            if (present := getattr(layer.self_attn, name)) is not None:
                setattr(layer.self_attn, name, make_setting(present))

    return mutate


def set_rotary(base: float, share: float = 1.0) -> Callable[[CheckedTrainer], None]:
    """Return a mutation: another base, and angles for another share of a head."""

    def mutate(trainer: CheckedTrainer) -> None:
        rotary = trainer.rank._policy.lm.model.rotary_emb
        pairs = round(share * len(rotary.inv_freq))
        rotary.inv_freq = base ** -(torch.arange(pairs, dtype=torch.float32) / pairs)

    return mutate


def set_logits(**fields: Any) -> Callable[[CheckedTrainer], None]:
    """Return a mutation: other facts of the logits."""

    def mutate(trainer: CheckedTrainer) -> None:
        policy = trainer.rank._policy
        kinds = replace(policy.facts.kinds, logits=replace(policy.facts.kinds.logits, **fields))
        policy.facts = replace(policy.facts, kinds=kinds)

    return mutate


def subtract_one_from_norms(trainer: CheckedTrainer) -> None:
    """Make norms scale by their weights instead of one more."""
    with torch.no_grad():
        for name, parameter in trainer.rank._policy.lm.named_parameters():
            if "norm" in name:
                parameter.sub_(1.0)


def drop_normalised_routes(trainer: CheckedTrainer) -> None:
    for layer in layers_of(trainer):
        layer.mlp.gate.norm_topk_prob = False


# Kernels of transformers whose states the trainer restarts at each sequence of a pack.
RESTARTED = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")


def drop_restarts(trainer: CheckedTrainer) -> None:
    """Let states pass on to the next sequence of a pack."""
    modeling = modeling_of(trainer)
    for name in RESTARTED:
        setattr(modeling, name, inspect.unwrap(getattr(modeling, name)))


GATE = "model.layers.1.mlp.experts.0.gate_proj.weight"
UP = "model.layers.1.mlp.experts.0.up_proj.weight"


def swap_gate_and_up(trainer: CheckedTrainer) -> None:
    """Swap the halves of one expert."""
    tensors = {shard.name: shard.tensor for shard in trainer.rank.shards()}
    gate = tensors[GATE].clone()
    tensors[GATE].copy_(tensors[UP])
    tensors[UP].copy_(gate)


# A family, and a part of its trainer that a wrong derivation would make.
MUTATIONS: dict[str, tuple[str, Callable[[CheckedTrainer], None]]] = {
    "a window of one token more": ("olmo3", set_attention("sliding_window", lambda window: window + 1)),
    "scores scaled by the head's size": ("gemma3_text", set_attention("scaling", lambda _: 32**-0.5)),
    "scores without a cap": ("gemma2", set_attention("attn_logit_softcapping", lambda _: None)),
    "logits without a cap": ("gemma2", set_logits(softcap=None)),
    "logits without a scale": ("cohere", set_logits(scale=1.0)),
    "another rotary base": ("llama", set_rotary(9500.0)),
    "angles for half of their share": ("glm", set_rotary(10000.0, 0.5)),
    "norms without their one": ("gemma", subtract_one_from_norms),
    "routes that do not add up to one": ("qwen3_moe", drop_normalised_routes),
    "an expert's gate for its up": ("qwen3_moe", swap_gate_and_up),
    "states that go on": ("qwen3_next", drop_restarts),
}


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_trainer_that_is_derived_wrongly_is_refused(
    mutation: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, mutate = MUTATIONS[mutation]
    folder = make_family(tmp_path / family, family)
    with open_trainer(dtype, folder, tmp_path) as trainer:
        modeling = modeling_of(trainer)
        for kernel_name in RESTARTED:
            # `monkeypatch` puts the kernel back after the test.
            if hasattr(modeling, kernel_name):
                monkeypatch.setattr(modeling, kernel_name, getattr(modeling, kernel_name))
        sequences = checked_sequences(trainer, VOCAB, 72)[:8]
        right_finding = as_transformers(trainer, str(folder), "cpu", sequences)
        mutate(trainer)
        wrong_finding = as_transformers(trainer, str(folder), "cpu", sequences)
        assert right_finding.holds, right_finding.text
        assert wrong_finding.holds is False and ". Look first, in the trainer, at " in wrong_finding.text, (
            wrong_finding.text
        )
        assert ". Look first" not in right_finding.text
        assert wrong_finding.figures["transformers_diff"] > 20 * right_finding.figures["transformers_diff"]
        if mutate is drop_restarts:
            leaked_finding = next(iter(packed_alone(trainer, sequences, tmp_path / "state")))
            assert leaked_finding.holds is False and ". Look first, in the pack, at states in" in leaked_finding.text, (
                leaked_finding.text
            )


@dataclass(frozen=True)
class RenamingRank:
    """A trainer's end of a refit that has other names for some tensors, and leaves out others."""

    rank: Any
    # None: the tensor is left out.
    names: dict[str, str | None]

    def layout(self, dtype: str | None = None) -> list[tuple[str, tuple[int, ...], str]]:
        return [tensor for tensor in self.rank.layout(dtype) if self.names.get(tensor[0], "") is not None]

    def shards(self) -> list[Shard]:
        shards = []
        for shard in self.rank.shards():
            name = self.names.get(shard.name, shard.name)
            if name is not None:
                shards.append(replace(shard, name=name))
        return shards


BUFFER = "model.layers.1.mlp.gate.e_score_correction_bias"
# A family, other names in its refits, and words of the refusals.
SENT_WRONGLY: dict[str, tuple[str, dict[str, str | None], dict[str, str]]] = {
    "a buffer is left out": (
        "glm4_moe",
        {BUFFER: None},
        {
            "": r"after an update and a .* refit.*\. Look first, in a refit, for both agreed from disk, at 4 experts$",
            "served = sent": f"^{BUFFER} of the model's 89 tensors not sent",
        },
    ),
    "an expert's gate is sent as its up": (
        "qwen3_moe",
        {GATE: UP, UP: GATE},
        {
            "": r"after an update and a .* refit.*\. Look first, in a refit, .*, at 4 experts$",
            "served = sent": "but not model.layers.1.mlp.experts",
            "export": " beyond: ",
        },
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", SENT_WRONGLY)
def test_a_trainer_that_sends_wrongly_is_refused(mistake: str, tmp_path: Path) -> None:
    family, names, refusals = SENT_WRONGLY[mistake]
    folder = make_family(tmp_path / family, family)
    run, files, placement = checked_run(find_target(str(folder), tmp_path), tmp_path)
    spec = replace(engine_spec(run, files, (), placement), version=0, kv_cache_mib=32)
    with checked_trainer(run.trainer, files.folder, "cpu", tmp_path) as trainer:
        trainer.sender = SendsWeights(RenamingRank(trainer.rank, names), 0, torch.device("cpu"))
        findings = list(engine_findings(trainer, spec, VOCAB, tmp_path, True, 1.00001, IMPORTS))
    failures = [finding for finding in findings if not finding.holds]
    assert {failure.subject for failure in failures} >= refusals.keys()
    for failure in failures:
        assert re.search(refusals[failure.subject], failure.text), failure


def set_last_epsilon(trainer: CheckedTrainer) -> None:
    trainer.rank._policy.lm.model.norm.variance_epsilon = 1e-5


def test_the_epsilon_of_the_last_norm_alone_is_found(tmp_path: Path) -> None:
    with open_trainer("float32", make_family(tmp_path / "llama", "llama"), tmp_path) as trainer:
        sequences = checked_sequences(trainer, VOCAB, 72)
        right_finding = faintly_as_transformers(trainer, "cpu", sequences, tmp_path)
        assert right_finding.holds, right_finding.text
        set_last_epsilon(trainer)
        wrong_finding = faintly_as_transformers(trainer, "cpu", sequences, tmp_path)
        assert (
            wrong_finding.holds is False
            and wrong_finding.figures["faint_diff"] > 100 * right_finding.figures["faint_diff"]
        ), wrong_finding.text
        # The first weights are back.
        assert as_transformers(trainer, str(tmp_path / "llama"), "cpu", sequences).figures["transformers_diff"] < 1e-4


# A family, keys of the engine's config.json, a change of the trainer, and words of the first finding that fails.
WRONG_ENGINES: dict[str, tuple[str, dict[str, Any], Callable[[CheckedTrainer], None] | None, str]] = {
    "the last norm's epsilon": ("llama", {}, set_last_epsilon, "with weights so small"),
    "the epsilon of every norm": ("qwen3", {"rms_norm_eps": 1e-5}, None, ""),
    "a tie": ("qwen3", {"tie_word_embeddings": False}, None, "after an update and a"),
}


# One start of an engine shows the kind; the others are long.
@pytest.mark.parametrize(
    "mistake",
    [
        "the last norm's epsilon",
        pytest.param("the epsilon of every norm", marks=pytest.mark.long),
        pytest.param("a tie", marks=pytest.mark.long),
    ],
)
def test_an_engine_with_a_wrong_epsilon_or_tie_is_refused(mistake: str, tmp_path: Path) -> None:
    family, keys, mutate, message = WRONG_ENGINES[mistake]
    folder = make_family(tmp_path / family, family)
    run, files, placement = checked_run(find_target(str(folder), tmp_path), tmp_path)
    if keys.get("tie_word_embeddings") is False:
        # The embedding is saved twice, as in some folders.
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    engine_folder = copy_with_keys(folder, keys)
    spec = replace(engine_spec(run, files, (), placement), version=0, kv_cache_mib=32, model_path=str(engine_folder))
    bound = bound_of(run, "cpu", "float32")
    with checked_trainer(run.trainer, files.folder, "cpu", tmp_path) as trainer:
        if mutate is not None:
            mutate(trainer)
        findings = list(engine_findings(trainer, spec, VOCAB, tmp_path, True, bound, IMPORTS))
    failures = [finding for finding in findings if finding.holds is False]
    gaps = [failure for failure in failures if "token_mult_prob_error" in failure.figures]
    assert gaps and message in gaps[0].text, findings


@pytest.mark.long
@pytest.mark.parametrize("name", ["glm4_moe", "falcon_h1"])
def test_an_engine_that_rounds_a_folder_is_proven_from_its_first_refit(name: str, tmp_path: Path) -> None:
    """vLLM takes the router of glm4_moe and the decays of falcon_h1 in float32, where the folder has them so."""
    folder = make_family(tmp_path / name, name)
    run, files, placement = checked_run(find_target(str(folder), tmp_path), tmp_path)
    settings = replace(run.config, trainer=replace(run.config.trainer, dtype="bfloat16"))
    findings = list(check_model(replace(run, config=settings), files, placement, True, tmp_path, IMPORTS))
    assert [finding.text for finding in findings if finding.holds is False] == []
    assert len([finding for finding in findings if finding.holds]) == 7


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_a_wrong_tie_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlctl.models import derive

    load_facts = derive.load_facts

    def load_wrong_facts(folder: Path) -> Any:
        facts = load_facts(folder)
        return replace(facts, sizes=replace(facts.sizes, tied=not facts.sizes.tied))

    folder = make_family(tmp_path / name, name)
    monkeypatch.setattr(derive, "load_facts", load_wrong_facts)
    try:
        with open_trainer("float32", folder, tmp_path) as trainer:
            sequences = checked_sequences(trainer, VOCAB, 72)
            assert as_transformers(trainer, str(folder), "cpu", sequences).holds is False
    except (ModelError, ValueError) as error:
        assert "tie" in str(error), error


@pytest.mark.long
@pytest.mark.parametrize("name", ["mamba", "mamba2", "minimax", "olmo_hybrid", "falcon_h1"])
def test_states_that_round_are_proven_in_float32(name: str, tmp_path: Path) -> None:
    """A decay in bfloat16 was 0.001 (minimax) and 0.012 nats (olmo_hybrid) off transformers' float32."""
    folder = make_family(tmp_path / name, name)
    with open_trainer("bfloat16", folder, tmp_path) as trainer:
        sequences = checked_sequences(trainer, VOCAB, 72)[:8]
        log_probs, gradients = packed_alone(trainer, sequences, tmp_path / "state")
        transformers = as_transformers(trainer, str(folder), "cpu", sequences)
    for finding in (log_probs, gradients, transformers):
        assert finding.holds, finding.text
    assert log_probs.figures["max_abs_diff"] < 1e-4
    assert transformers.figures["transformers_diff"] < 1e-4


@pytest.mark.long  # the one below shows both mechanisms
@pytest.mark.parametrize("name", WRONG)
def test_rounding_is_proven_and_a_wrong_key_refused(name: str, tmp_path: Path) -> None:
    folder = make_family(tmp_path / name, name)
    wrong_folder = copy_with_keys(folder, WRONG[name])
    with open_trainer("bfloat16", folder, tmp_path) as trainer:
        sequences = checked_sequences(trainer, VOCAB, 72)
        for finding in packed_alone(trainer, sequences, tmp_path / "state"):
            assert finding.holds, finding.text
        right_finding = as_transformers(trainer, str(folder), "cpu", sequences)
        wrong_finding = as_transformers(trainer, str(wrong_folder), "cpu", sequences)
        assert right_finding.holds, right_finding.text
        assert wrong_finding.holds is False and right_finding.figures["transformers_diff"] < 1e-4


def test_a_wrong_key_and_kernels_that_are_wrong_in_bfloat16_alone_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_family(tmp_path / "granite", "granite")
    wrong_folder = copy_with_keys(folder, {"attention_multiplier": 0.09})
    with open_trainer("bfloat16", folder, tmp_path) as trainer:
        sequences = checked_sequences(trainer, VOCAB, 24)
        assert as_transformers(trainer, str(folder), "cpu", sequences).holds is True
        assert as_transformers(trainer, str(wrong_folder), "cpu", sequences).holds is False
        right_log_probs = trainer.log_probs

        def leaking_log_probs(sequences: Any, *, packed: bool = True) -> Any:
            """Let every token see the sequence before its own, as if the pack had lost its bounds."""
            if not packed:
                return right_log_probs(sequences, packed=False)
            ends = np.cumsum([len(sequence) for sequence in sequences])
            return np.split(right_log_probs([np.concatenate(sequences)])[0], ends[:-1])

        monkeypatch.setattr(trainer, "log_probs", leaking_log_probs)
        leaked_finding = next(iter(packed_alone(trainer, sequences, tmp_path / "state")))
        assert leaked_finding.holds is False and leaked_finding.figures["max_abs_diff"] < 1e-4
