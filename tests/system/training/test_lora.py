"""LoRA in the FSDP trainer equals PEFT, leaves the base weights unchanged, and is saved, resumed and exported."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlctl.models.adapters import AdapterSpec
from rlctl.training.lora import FirstAdapters
from rlctl.training.update import learning_rate
from tests.system.training.scenario import (
    OPTIMIZER,
    TOTAL_UPDATES,
    WeightedLoss,
    adapters_of,
    assert_close,
    open_trainer,
    plain_log_probs,
    plain_loss,
    rows_of,
    sequences,
    share,
    totals,
    weights,
)
from tests.zoo import make_family

DATA = sequences(6)
LOSS = WeightedLoss()
UPDATES = 5


def peft_model(model: Path, spec: AdapterSpec, first: dict[str, torch.Tensor]) -> Any:
    """Build PEFT's model with the adapters of `spec`. first: initial values by rlctl's names."""
    peft = pytest.importorskip("peft", reason="PEFT is in the dev extra")
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    names = [target.name for target in spec.targets]
    config = peft.LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=names, task_type="CAUSAL_LM")
    adapted_lm = peft.get_peft_model(lm, config)
    parameters = adapter_parameters(adapted_lm)
    assert parameters.keys() == first.keys()
    with torch.no_grad():
        for name, tensor in first.items():
            parameters[name].copy_(tensor)
    return adapted_lm


def adapter_parameters(adapted_lm: Any) -> dict[str, torch.nn.Parameter]:
    """Return the adapters of PEFT's model by rlctl's names."""
    parameters = {}
    for name, parameter in adapted_lm.named_parameters():
        if parameter.requires_grad:
            parameters[name.removeprefix("base_model.model.").replace(".default", "")] = parameter
    return parameters


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "phi3", "gemma2", "glm4", "granite", "gpt_neox", "qwen2_moe", "bamba"]
)
def test_gradients_and_updates_are_those_of_peft(family: str, tmp_path: Path) -> None:
    model = make_family(tmp_path / family, family)
    spec = adapters_of(model)
    with open_trainer(model, tmp_path, adapters=spec) as trainer:
        first = weights(trainer)
        adapted_lm = peft_model(model, spec, first)
        parameters = adapter_parameters(adapted_lm)
        optimizer = torch.optim.AdamW(
            parameters.values(),
            eps=OPTIMIZER.eps,
            betas=(OPTIMIZER.betas[0], OPTIMIZER.betas[1]),
            weight_decay=OPTIMIZER.weight_decay,
        )
        for update in range(UPDATES):
            optimizer.zero_grad()
            plain_loss(adapted_lm, DATA).backward()
            trainer.accumulate(share(DATA, 40), LOSS)
            count = totals(DATA).tokens
            assert_close(
                {name: parameter.grad / count for name, parameter in trainer._parameters.items()},
                {name: parameter.grad for name, parameter in parameters.items()},
                atol=1e-5,
            )
            trainer.step(LOSS, totals(DATA))
            torch.nn.utils.clip_grad_norm_(parameters.values(), OPTIMIZER.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(update, OPTIMIZER, TOTAL_UPDATES)
            optimizer.step()
            expected = {name: parameter.detach() for name, parameter in parameters.items()}
            assert_close(weights(trainer), expected, atol=1e-5)
        changed = {name for name, tensor in weights(trainer).items() if not torch.equal(tensor, first[name])}
        assert changed == first.keys()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("lora") / "qwen3", "qwen3")


def log_probs(trainer: Any, role: str = "policy") -> list[Any]:
    return rows_of(trainer.log_probs(share(DATA, 64), role))


def assert_same(rows: list[Any], expected_rows: list[Any]) -> None:
    for row, expected_row in zip(rows, expected_rows, strict=True):
        np.testing.assert_array_equal(row, expected_row)


def train(trainer: Any) -> dict[str, float]:
    metrics: dict[str, float] = trainer.train(share(DATA, 64), LOSS, totals(DATA))
    return metrics


def test_the_reference_is_the_base_and_costs_no_copy(model: Path, tmp_path: Path) -> None:
    with open_trainer(model, tmp_path) as base:
        expected = log_probs(base)
    with open_trainer(model, tmp_path, adapters=adapters_of(model)) as trainer:
        assert_same(log_probs(trainer), expected)
        train(trainer)
        trained = log_probs(trainer)
        assert max(np.abs(row - base_row).max() for row, base_row in zip(trained, expected)) > 1e-3
        assert_same(log_probs(trainer, "reference"), expected)
        assert_same(log_probs(trainer), trained)
        assert not trainer._swapped._frozen


def test_a_run_that_starts_from_an_adapter_has_it_as_its_reference(model: Path, tmp_path: Path) -> None:
    spec = adapters_of(model)
    with open_trainer(model, tmp_path, adapters=spec) as trainer:
        train(trainer)
        trainer.export_folder(tmp_path / "first")
        first_weights = weights(trainer)
        first_log_probs = log_probs(trainer)
    first_folder = tmp_path / "first"
    with open_trainer(model, tmp_path, adapters=spec, adapter=first_folder, reference=first_folder) as trainer:
        assert_close(weights(trainer), first_weights, atol=0)
        train(trainer)
        trained = log_probs(trainer)
        assert_same(log_probs(trainer, "reference"), first_log_probs)
        assert_same(log_probs(trainer), trained)


def test_the_base_keeps_every_bit_and_has_neither_gradient_nor_moments(model: Path, tmp_path: Path) -> None:
    spec = adapters_of(model)
    with open_trainer(model, tmp_path, adapters=spec) as trainer:
        parameters = trainer._policy.lm.named_parameters()
        frozen = {name: parameter for name, parameter in parameters if not parameter.requires_grad}
        before = {name: parameter.detach().clone() for name, parameter in frozen.items()}
        trainer.accumulate(share(DATA, 64), LOSS)
        assert all(parameter.grad is None for parameter in frozen.values())
        trainer.step(LOSS, totals(DATA))
        assert_close(frozen, before, atol=0)
        assert len(trainer._optimizer.state) == len(spec.tensors) == 2 * len(spec.targets)
        expected_layout = [(tensor.name, tensor.shape) for tensor in spec.tensors]
        assert [(name, shape) for name, shape, _ in trainer.layout()] == expected_layout


def test_a_frozen_base_has_the_compute_dtype_and_adapters_float32(model: Path, tmp_path: Path) -> None:
    with open_trainer(model, tmp_path, adapters=adapters_of(model), dtype="bfloat16") as trainer:
        dtypes = {parameter.requires_grad: parameter.dtype for parameter in trainer._policy.lm.parameters()}
        assert dtypes == {False: torch.bfloat16, True: torch.float32}
        assert {dtype for _, _, dtype in trainer.layout("bfloat16")} == {"bfloat16"}
        before = log_probs(trainer)
        train(trainer)
        after = log_probs(trainer)
        # Log-probs are computed as in engines: frozen weights and adapters are rounded, then multiplied.
        assert max(np.abs(row_before - row_after).max() for row_before, row_after in zip(before, after)) > 1e-3


def test_saved_and_loaded_training_continues_bit_by_bit(model: Path, tmp_path: Path) -> None:
    spec = adapters_of(model, dropout=0.2)
    with open_trainer(model, tmp_path, adapters=spec) as trainer:
        train(trainer)
        trainer.save(tmp_path / "state")
        expected_metrics = [train(trainer), train(trainer)]
        expected_weights = weights(trainer)
    assert sum(file.stat().st_size for file in (tmp_path / "state").iterdir()) < 16 * spec.parameters
    with open_trainer(model, tmp_path, adapters=spec) as trainer:
        trainer.load(tmp_path / "state")
        assert [train(trainer), train(trainer)] == expected_metrics
        assert_close(weights(trainer), expected_weights, atol=0)


def test_an_export_written_while_training_goes_on_has_the_adapters_of_its_moment(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    spec = adapters_of(model)
    with open_trainer(model, tmp_path, adapters=spec) as trainer:
        train(trainer)
        saved_log_probs = log_probs(trainer)
        saved_weights = weights(trainer)
        save_start = trainer.begin_save(tmp_path / "state", tmp_path / "hf", None, beside_training=True)
        assert not save_start.wait_cause
        # The thread may write before this update or after it.
        train(trainer)
        assert trainer.saving.wait_for_files(None)
        assert any(not torch.equal(tensor, saved_weights[name]) for name, tensor in weights(trainer).items())
        trainer.load(tmp_path / "state")
        assert_same(log_probs(trainer), saved_log_probs)
    tensors = load_file(tmp_path / "hf" / "adapter_model.safetensors")
    written_weights = {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}
    assert_close(written_weights, saved_weights, atol=0)
    peft = pytest.importorskip("peft", reason="PEFT is in the dev extra")
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    adapted_lm = peft.PeftModel.from_pretrained(lm, tmp_path / "hf").eval()
    for sequence, row in zip(DATA, saved_log_probs, strict=True):
        expected_row = plain_log_probs(adapted_lm, sequence)[0].detach().numpy()
        np.testing.assert_allclose(row[1:], expected_row, atol=1e-5)


def test_dropout_is_of_training_alone(model: Path, tmp_path: Path) -> None:
    rows = []
    evaluations = []
    losses = []
    for dropout in (0.0, 0.5):
        with open_trainer(model, tmp_path, adapters=adapters_of(model, dropout=dropout)) as trainer:
            with torch.no_grad():
                for name, parameter in trainer._parameters.items():
                    parameter.fill_(0.02 if ".lora_B." in name else 0.03)
            rows.append(log_probs(trainer))
            evaluations.append(trainer.evaluate(share(DATA, 64), LOSS))
            losses.append(train(trainer)["train/loss"])
    assert_same(rows[0], rows[1])
    assert evaluations[0] == evaluations[1]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("option", ["activation_checkpointing", pytest.param("compile", marks=pytest.mark.long)])
def test_recomputed_and_compiled_layers_train_alike(option: str, model: Path, tmp_path: Path) -> None:
    metrics = []
    trained_weights = []
    rows = []
    # A layer that is computed again drops the same inputs. Compiled ones draw others.
    spec = adapters_of(model, dropout=0.0 if option == "compile" else 0.2)
    for is_on in (False, True):
        with open_trainer(model, tmp_path, adapters=spec, **{option: is_on}) as trainer:
            metrics.append([train(trainer), train(trainer)])
            trained_weights.append(weights(trainer))
            rows.append([*log_probs(trainer), *log_probs(trainer, "reference")])
    for plain_metrics, option_metrics in zip(*metrics):
        assert_close(option_metrics, plain_metrics, atol=1e-5)
    assert_close(trained_weights[1], trained_weights[0], atol=1e-5)
    for plain_row, option_row in zip(*rows):
        np.testing.assert_allclose(plain_row, option_row, atol=1e-5)


def test_a_layer_that_reads_its_weight_past_the_adapter_is_named(model: Path, tmp_path: Path) -> None:
    with open_trainer(model, tmp_path, adapters=adapters_of(model)) as trainer:
        bypassed = trainer._lm.model.layers[2].self_attn.o_proj
        bypassed.forward = lambda hidden: torch.nn.functional.linear(hidden, bypassed.weight)
        with pytest.raises(RuntimeError, match=r"left 1 of 28 adapters .*2\.self_attn\.o_proj\.lora_B.* without"):
            train(trainer)


def test_the_first_step_that_needs_attention_must_move_every_adapter(tmp_path: Path) -> None:
    """The second token of a row attends to one token only, so its loss does not depend on queries and keys."""
    model = make_family(tmp_path / "model", "gemma2")
    second_tokens = [replace(sample, mask=np.arange(len(sample)) == 1) for sample in DATA]
    with open_trainer(model, tmp_path, adapters=adapters_of(model)) as trainer:
        before = weights(trainer)
        trainer.train([second_tokens], LOSS, totals(second_tokens))
        after = {name: tensor for name, tensor in weights(trainer).items() if "lora_B" in name}
        unmoved = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
        assert unmoved == {name for name in after if "q_proj" in name or "k_proj" in name}
        bypassed = trainer._lm.model.layers[2].self_attn.q_proj
        bypassed.forward = lambda hidden: torch.nn.functional.linear(hidden, bypassed.weight)
        with pytest.raises(RuntimeError, match=r"left 1 of 28 adapters .*2\.self_attn\.q_proj\.lora_B.* without"):
            trainer.train([DATA], LOSS, totals(DATA))


def test_a_rate_that_moves_nothing_is_named_at_the_first_step_alone(model: Path, tmp_path: Path) -> None:
    spec = adapters_of(model)
    tiny = replace(OPTIMIZER, lr=1e-46, warmup_steps=0)
    refusal = pytest.raises(RuntimeError, match=r"left 28 of 28 adapters .*q_proj\.lora_B.*the rate 1e-46 is too small")
    with open_trainer(model, tmp_path, adapters=spec, optimizer=tiny) as trainer, refusal:
        train(trainer)
    with open_trainer(model, tmp_path, adapters=spec) as trainer:
        train(trainer)
        trainer.save(tmp_path / "moved")
    # A resumed run may end at a rate of next to nothing; a rate of 0 is the user's wish.
    for rate, is_resumed in ((1e-46, True), (0.0, False)):
        with open_trainer(model, tmp_path, adapters=spec, optimizer=replace(tiny, lr=rate)) as trainer:
            if is_resumed:
                trainer.load(tmp_path / "moved")
            before = weights(trainer)
            train(trainer)
            assert_close(weights(trainer), before, atol=0)


def test_ranks_and_names_draw_the_same_and_another_seed_others(model: Path, tmp_path: Path) -> None:
    spec = adapters_of(model)
    name = spec.tensors[0].name
    shape = torch.Size(spec.tensors[0].shape)
    drawn = FirstAdapters(spec, None, 0).value(name, shape)
    assert torch.equal(drawn, FirstAdapters(spec, None, 0).value(name, shape))
    assert not torch.equal(drawn, FirstAdapters(spec, None, 1).value(name, shape))
    # Uniform within 1 / sqrt(inputs), as in PEFT.
    bound = shape[1] ** -0.5
    assert 0.95 * bound < drawn.abs().max() <= bound
    assert not FirstAdapters(spec, None, 0).value(spec.tensors[1].name, torch.Size(spec.tensors[1].shape)).any()
