"""`rlctl model check`: a model that rounds in bfloat16 is proven, one that computes something else is refused."""

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


def changed(folder: Path, keys: dict[str, Any]) -> Path:
    """Copy a folder with other values of keys that its config.json has."""
    other = shutil.copytree(folder, folder.with_name("other"))
    config = json.loads((other / "config.json").read_text())
    assert config.keys() >= keys.keys()
    (other / "config.json").write_text(json.dumps(config | keys))
    return other


@contextmanager
def in_dtype(dtype: Any, folder: Path, scratch: Path) -> Iterator[CheckedTrainer]:
    run, files, _ = checked_run(find_target(str(folder), scratch), scratch)
    with checked_trainer(replace(run.trainer, dtype=dtype), files.folder, "cpu", scratch) as trainer:
        yield trainer


def layers_of(trainer: CheckedTrainer) -> Any:
    return trainer.rank._policy.lm.model.layers


def set_attention(key: str, value: Callable[[Any], Any]) -> Callable[[CheckedTrainer], None]:
    """A value of `self_attn` by its present one, in every layer that has one."""

    def change(trainer: CheckedTrainer) -> None:
        for layer in layers_of(trainer):
            if (present := getattr(layer.self_attn, key)) is not None:
                setattr(layer.self_attn, key, value(present))

    return change


def set_rotary(base: float, share: float = 1.0) -> Callable[[CheckedTrainer], None]:
    """Another base, and angles for another share of a head."""

    def change(trainer: CheckedTrainer) -> None:
        rotary = trainer.rank._policy.lm.model.rotary_emb
        pairs = round(share * len(rotary.inv_freq))
        rotary.inv_freq = base ** -(torch.arange(pairs, dtype=torch.float32) / pairs)

    return change


def set_logits(**values: Any) -> Callable[[CheckedTrainer], None]:
    def change(trainer: CheckedTrainer) -> None:
        policy = trainer.rank._policy
        kinds = replace(policy.facts.kinds, logits=replace(policy.facts.kinds.logits, **values))
        policy.facts = replace(policy.facts, kinds=kinds)

    return change


def without_one(trainer: CheckedTrainer) -> None:
    """Norms scale by their weights instead of one more."""
    with torch.no_grad():
        for name, each in trainer.rank._policy.lm.named_parameters():
            if "norm" in name:
                each.sub_(1.0)


def without_normalised_routes(trainer: CheckedTrainer) -> None:
    for layer in layers_of(trainer):
        layer.mlp.gate.norm_topk_prob = False


def without_restarts(trainer: CheckedTrainer) -> None:
    """States pass on to the next sequence of a pack."""
    home = sys.modules[type(trainer.rank._policy.lm).__module__]
    for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
        setattr(home, name, inspect.unwrap(getattr(home, name)))


GATE, UP = (f"model.layers.1.mlp.experts.0.{side}_proj.weight" for side in ("gate", "up"))


def with_gate_as_up(trainer: CheckedTrainer) -> None:
    """One expert's halves are read the other way round."""
    held = {each.name: each.tensor for each in trainer.rank.shards()}
    gate = held[GATE].clone()
    held[GATE].copy_(held[UP])
    held[UP].copy_(gate)


# A family, and a part of its trainer that a wrong derivation would make.
MUTATIONS: dict[str, tuple[str, Callable[[CheckedTrainer], None]]] = {
    "a window of one token more": ("olmo3", set_attention("sliding_window", lambda window: window + 1)),
    "scores scaled by the head's size": ("gemma3_text", set_attention("scaling", lambda _: 32**-0.5)),
    "scores without a cap": ("gemma2", set_attention("attn_logit_softcapping", lambda _: None)),
    "logits without a cap": ("gemma2", set_logits(softcap=None)),
    "logits without a scale": ("cohere", set_logits(scale=1.0)),
    "another rotary base": ("llama", set_rotary(9500.0)),
    "angles for half of their share": ("glm", set_rotary(10000.0, 0.5)),
    "norms without their one": ("gemma", without_one),
    "routes that do not add up to one": ("qwen3_moe", without_normalised_routes),
    "an expert's gate for its up": ("qwen3_moe", with_gate_as_up),
    "states that go on": ("qwen3_next", without_restarts),
}


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", MUTATIONS)
def test_a_trainer_that_is_derived_wrongly_is_refused(
    what: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, mutate = MUTATIONS[what]
    folder = make_family(tmp_path / name, name)
    with in_dtype(dtype, folder, tmp_path) as trainer:
        home = sys.modules[type(trainer.rank._policy.lm).__module__]
        for each in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
            # Put back after the test.
            if hasattr(home, each):
                monkeypatch.setattr(home, each, getattr(home, each))
        sequences = checked_sequences(trainer, VOCAB, 72)[:8]
        right = as_transformers(trainer, str(folder), "cpu", sequences)
        mutate(trainer)
        wrong = as_transformers(trainer, str(folder), "cpu", sequences)
        assert right.holds, right.text
        assert wrong.holds is False and ". Look first, in the trainer, at " in wrong.text, wrong.text
        assert ". Look first" not in right.text
        assert wrong.figures["transformers_diff"] > 20 * right.figures["transformers_diff"]
        if mutate is without_restarts:
            leaked = next(iter(packed_alone(trainer, sequences, tmp_path / "state")))
            assert leaked.holds is False and ". Look first, in the pack, at states in" in leaked.text, leaked.text


@dataclass(frozen=True)
class Renamed:
    """A trainer's end of a refit that has other names for some tensors, and none for others."""

    rank: Any
    names: dict[str, str | None]

    def layout(self, dtype: str | None = None) -> list[tuple[str, tuple[int, ...], str]]:
        return [each for each in self.rank.layout(dtype) if self.names.get(each[0], "") is not None]

    def shards(self) -> list[Shard]:
        renamed = ((each, self.names.get(each.name, each.name)) for each in self.rank.shards())
        return [replace(each, name=name) for each, name in renamed if name is not None]


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
@pytest.mark.parametrize("what", SENT_WRONGLY)
def test_a_trainer_that_sends_wrongly_is_refused(what: str, tmp_path: Path) -> None:
    name, names, refusals = SENT_WRONGLY[what]
    run, files, placement = checked_run(find_target(str(make_family(tmp_path / name, name)), tmp_path), tmp_path)
    spec = replace(engine_spec(run, files, (), placement), version=0, kv_cache_mib=32)
    with checked_trainer(run.trainer, files.folder, "cpu", tmp_path) as trainer:
        trainer.sender = SendsWeights(Renamed(trainer.rank, names), 0, torch.device("cpu"))
        found = list(engine_findings(trainer, spec, VOCAB, tmp_path, True, 1.00001, IMPORTS))
    assert {each.subject for each in found if not each.holds} >= refusals.keys()
    for each in found:
        assert each.holds or re.search(refusals[each.subject], each.text), each


def set_last_epsilon(trainer: CheckedTrainer) -> None:
    trainer.rank._policy.lm.model.norm.variance_epsilon = 1e-5


def test_the_epsilon_of_the_last_norm_alone_is_found(tmp_path: Path) -> None:
    with in_dtype("float32", make_family(tmp_path / "llama", "llama"), tmp_path) as trainer:
        sequences = checked_sequences(trainer, VOCAB, 72)
        right = faintly_as_transformers(trainer, "cpu", sequences, tmp_path)
        assert right.holds, right.text
        set_last_epsilon(trainer)
        wrong = faintly_as_transformers(trainer, "cpu", sequences, tmp_path)
        assert wrong.holds is False and wrong.figures["faint_diff"] > 100 * right.figures["faint_diff"], wrong.text
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
    "what",
    ["the last norm's epsilon", *(pytest.param(each, marks=pytest.mark.long) for each in list(WRONG_ENGINES)[1:])],
)
def test_an_engine_with_a_wrong_epsilon_or_tie_is_refused(what: str, tmp_path: Path) -> None:
    name, keys, change, said = WRONG_ENGINES[what]
    folder = make_family(tmp_path / name, name)
    run, files, placement = checked_run(find_target(str(folder), tmp_path), tmp_path)
    if keys.get("tie_word_embeddings") is False:
        # Saved twice, as some folders have it.
        held = load_file(folder / "model.safetensors")
        head = held["model.embed_tokens.weight"].clone()
        save_file({**held, "lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    engine = changed(folder, keys)
    spec = replace(engine_spec(run, files, (), placement), version=0, kv_cache_mib=32, model_path=str(engine))
    bound = bound_of(run, "cpu", "float32")
    with checked_trainer(run.trainer, files.folder, "cpu", tmp_path) as trainer:
        if change is not None:
            change(trainer)
        found = list(engine_findings(trainer, spec, VOCAB, tmp_path, True, bound, IMPORTS))
    wrong = [each for each in found if each.holds is False and "token_mult_prob_error" in each.figures]
    assert wrong and said in wrong[0].text, found


@pytest.mark.long
@pytest.mark.parametrize("name", ["glm4_moe", "falcon_h1"])
def test_an_engine_that_rounds_a_folder_is_proven_from_its_first_refit(name: str, tmp_path: Path) -> None:
    """vLLM takes the router of glm4_moe and the decays of falcon_h1 in float32, where the folder has them so."""
    folder = make_family(tmp_path / name, name)
    run, files, placement = checked_run(find_target(str(folder), tmp_path), tmp_path)
    settings = replace(run.config, trainer=replace(run.config.trainer, dtype="bfloat16"))
    found = list(check_model(replace(run, config=settings), files, placement, True, tmp_path, IMPORTS))
    assert [each.text for each in found if each.holds is False] == []
    assert len([each for each in found if each.holds]) == 7


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_a_wrong_tie_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlctl.models import derive

    facts_of = derive.load_facts

    def wrong(folder: Path) -> Any:
        facts = facts_of(folder)
        return replace(facts, sizes=replace(facts.sizes, tied=not facts.sizes.tied))

    folder = make_family(tmp_path / name, name)
    monkeypatch.setattr(derive, "load_facts", wrong)
    try:
        with in_dtype("float32", folder, tmp_path) as trainer:
            sequences = checked_sequences(trainer, VOCAB, 72)
            assert as_transformers(trainer, str(folder), "cpu", sequences).holds is False
    except (ModelError, ValueError) as error:
        assert "tie" in str(error), error


@pytest.mark.long
@pytest.mark.parametrize("name", ["mamba", "mamba2", "minimax", "olmo_hybrid", "falcon_h1"])
def test_states_that_round_are_proven_in_float32(name: str, tmp_path: Path) -> None:
    """A decay in bfloat16 was 0.001 (minimax) and 0.012 nats (olmo_hybrid) off transformers' float32."""
    folder = make_family(tmp_path / name, name)
    with in_dtype("bfloat16", folder, tmp_path) as trainer:
        sequences = checked_sequences(trainer, VOCAB, 72)[:8]
        found = [*packed_alone(trainer, sequences, tmp_path / "state")]
        found.append(as_transformers(trainer, str(folder), "cpu", sequences))
    for each in found:
        assert each.holds, each.text
    assert found[0].figures["max_abs_diff"] < 1e-4 and found[2].figures["transformers_diff"] < 1e-4


@pytest.mark.long  # the one below shows both mechanisms
@pytest.mark.parametrize("name", WRONG)
def test_rounding_is_proven_and_a_wrong_key_refused(name: str, tmp_path: Path) -> None:
    folder = make_family(tmp_path / name, name)
    other = changed(folder, WRONG[name])
    with in_dtype("bfloat16", folder, tmp_path) as trainer:
        sequences = checked_sequences(trainer, VOCAB, 72)
        for found in packed_alone(trainer, sequences, tmp_path / "state"):
            assert found.holds, found.text
        right, wrong = (as_transformers(trainer, str(each), "cpu", sequences) for each in (folder, other))
        assert right.holds, right.text
        assert wrong.holds is False and right.figures["transformers_diff"] < 1e-4


def test_a_wrong_key_and_kernels_that_are_wrong_in_bfloat16_alone_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_family(tmp_path / "granite", "granite")
    other = changed(folder, {"attention_multiplier": 0.09})
    with in_dtype("bfloat16", folder, tmp_path) as trainer:
        sequences = checked_sequences(trainer, VOCAB, 24)
        found = [as_transformers(trainer, str(each), "cpu", sequences).holds for each in (folder, other)]
        assert found == [True, False]
        right = trainer.log_probs

        def leaking(sequences: Any, *, packed: bool = True) -> Any:
            """Every token sees the sequence before its own, as a bound of a pack that is lost has it."""
            if not packed:
                return right(sequences, packed=False)
            return np.split(right([np.concatenate(sequences)])[0], np.cumsum([len(each) for each in sequences])[:-1])

        monkeypatch.setattr(trainer, "log_probs", leaking)
        leaked = next(iter(packed_alone(trainer, sequences, tmp_path / "state")))
        assert leaked.holds is False and leaked.figures["max_abs_diff"] < 1e-4
