"""Low-rank adapters of the FSDP trainer: equal to PEFT's, the base untouched, saved, resumed, exported."""

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
    sequences,
    share,
    totals,
    weights,
)
from tests.zoo import make_family

DATA, LOSS = sequences(6), WeightedLoss()
UPDATES = 5


def peft_model(model: Path, spec: AdapterSpec, first: dict[str, torch.Tensor]) -> Any:
    """PEFT's model of the same adapters. first: values by our names."""
    peft = pytest.importorskip("peft", reason="PEFT is in the dev extra")
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    names = [each.name for each in spec.targets]
    config = peft.LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=names, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(lm, config)
    found = adapter_parameters(theirs)
    assert found.keys() == first.keys()
    with torch.no_grad():
        for name, value in first.items():
            found[name].copy_(value)
    return theirs


def adapter_parameters(theirs: Any) -> dict[str, torch.nn.Parameter]:
    named = {name.removeprefix("base_model.model."): p for name, p in theirs.named_parameters() if p.requires_grad}
    return {name.replace(".default", ""): p for name, p in named.items()}


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "phi3", "gemma2", "glm4", "granite", "gpt_neox", "qwen2_moe", "bamba"]
)
def test_gradients_and_updates_are_those_of_peft(family: str, tmp_path: Path) -> None:
    model = make_family(tmp_path / family, family)
    spec, loss = adapters_of(model), LOSS
    with open_trainer(model, tmp_path, adapters=spec) as one:
        first = weights(one)
        theirs = peft_model(model, spec, first)
        params = adapter_parameters(theirs)
        betas = OPTIMIZER.betas[0], OPTIMIZER.betas[1]
        optimizer = torch.optim.AdamW(
            params.values(), eps=OPTIMIZER.eps, betas=betas, weight_decay=OPTIMIZER.weight_decay
        )
        for update in range(UPDATES):
            optimizer.zero_grad()
            plain_loss(theirs, DATA).backward()
            one.accumulate(share(DATA, 40), loss)
            count = totals(DATA).tokens
            assert_close(
                {name: p.grad / count for name, p in one._parameters.items()},
                {name: p.grad for name, p in params.items()},
                atol=1e-5,
            )
            one.step(loss, totals(DATA))
            torch.nn.utils.clip_grad_norm_(params.values(), OPTIMIZER.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(update, OPTIMIZER, TOTAL_UPDATES)
            optimizer.step()
            assert_close(weights(one), {name: p.detach() for name, p in params.items()}, atol=1e-5)
        changed = {name for name, value in weights(one).items() if not torch.equal(value, first[name])}
        assert changed == first.keys()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("lora") / "qwen3", "qwen3")


def log_probs(one: Any, role: str = "policy") -> list[Any]:
    return [row for batch in one.log_probs(share(DATA, 64), role) for row in batch]


def assert_same(got: list[Any], expected: list[Any]) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def train(one: Any, data: list[Any] = DATA) -> dict[str, float]:
    metrics: dict[str, float] = one.train(share(data, 64), LOSS, totals(data))
    return metrics


def test_the_reference_is_the_base_and_costs_no_copy(model: Path, tmp_path: Path) -> None:
    with open_trainer(model, tmp_path) as base:
        expected = log_probs(base)
    with open_trainer(model, tmp_path, adapters=adapters_of(model)) as one:
        assert_same(log_probs(one), expected)
        train(one)
        trained = log_probs(one)
        assert max(np.abs(a - b).max() for a, b in zip(trained, expected)) > 1e-3
        assert_same(log_probs(one, "reference"), expected)
        assert_same(log_probs(one), trained)
        assert not one._frozen


def test_a_run_that_starts_from_an_adapter_has_it_as_its_reference(model: Path, tmp_path: Path) -> None:
    spec = adapters_of(model)
    with open_trainer(model, tmp_path, adapters=spec) as one:
        train(one)
        one.export_folder(tmp_path / "first")
        first, expected = weights(one), log_probs(one)
    with open_trainer(model, tmp_path, adapters=spec, adapter=tmp_path / "first", reference=tmp_path / "first") as one:
        assert_close(weights(one), first, atol=0)
        train(one)
        trained = log_probs(one)
        assert_same(log_probs(one, "reference"), expected)
        assert_same(log_probs(one), trained)


def test_the_base_keeps_every_bit_and_has_neither_gradient_nor_moments(model: Path, tmp_path: Path) -> None:
    spec = adapters_of(model)
    with open_trainer(model, tmp_path, adapters=spec) as one:
        frozen = {name: p for name, p in one._policy.lm.named_parameters() if not p.requires_grad}
        before = {name: p.detach().clone() for name, p in frozen.items()}
        one.accumulate(share(DATA, 64), LOSS)
        assert all(p.grad is None for p in frozen.values())
        one.step(LOSS, totals(DATA))
        assert_close(frozen, before, atol=0)
        assert len(one._optimizer.state) == len(spec.tensors) == 2 * len(spec.targets)
        assert [(name, shape) for name, shape, _ in one.layout()] == [(each.name, each.shape) for each in spec.tensors]


def test_a_frozen_base_has_the_compute_dtype_and_adapters_float32(model: Path, tmp_path: Path) -> None:
    with open_trainer(model, tmp_path, adapters=adapters_of(model), dtype="bfloat16") as one:
        kinds = {p.requires_grad: p.dtype for p in one._policy.lm.parameters()}
        assert kinds == {False: torch.bfloat16, True: torch.float32}
        assert {kind for _, _, kind in one.layout("bfloat16")} == {"bfloat16"}
        half = log_probs(one)
        train(one)
        # By the same path as engines: frozen weights and adapters rounded, then multiplied.
        assert max(np.abs(a - b).max() for a, b in zip(half, log_probs(one))) > 1e-3


def test_saved_and_loaded_training_continues_bit_by_bit(model: Path, tmp_path: Path) -> None:
    spec = adapters_of(model, dropout=0.2)
    with open_trainer(model, tmp_path, adapters=spec) as one:
        train(one)
        one.save(tmp_path / "state")
        expected = [train(one), train(one)]
        after = weights(one)
    assert sum(file.stat().st_size for file in (tmp_path / "state").iterdir()) < 16 * spec.parameters
    with open_trainer(model, tmp_path, adapters=spec) as one:
        one.load(tmp_path / "state")
        assert [train(one), train(one)] == expected
        assert_close(weights(one), after, atol=0)


def test_an_export_written_while_training_goes_on_has_the_adapters_of_its_moment(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    spec = adapters_of(model)
    with open_trainer(model, tmp_path, adapters=spec) as one:
        train(one)
        expected, saved = log_probs(one), weights(one)
        begun = one.begin_save(tmp_path / "state", tmp_path / "hf", None, beside_training=True)
        assert not begun.wait_cause
        # The thread may write before this update or after it.
        train(one)
        assert one.saving.wait_for_files(None)
        assert any(not torch.equal(after, saved[name]) for name, after in weights(one).items())
        one.load(tmp_path / "state")
        assert_same(log_probs(one), expected)
    file = load_file(tmp_path / "hf" / "adapter_model.safetensors")
    written = {name.removeprefix("base_model.model."): each for name, each in file.items()}
    assert written.keys() == saved.keys()
    assert all(torch.equal(each, saved[name]) for name, each in written.items())
    peft = pytest.importorskip("peft", reason="PEFT is in the dev extra")
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(lm, tmp_path / "hf").eval()
    for sequence, ours in zip(DATA, expected, strict=True):
        np.testing.assert_allclose(ours[1:], plain_log_probs(theirs, sequence)[0].detach().numpy(), atol=1e-5)


def test_dropout_is_of_training_alone(model: Path, tmp_path: Path) -> None:
    results = []
    for dropout in (0.0, 0.5):
        with open_trainer(model, tmp_path, adapters=adapters_of(model, dropout=dropout)) as one:
            with torch.no_grad():
                for name, p in one._parameters.items():
                    p.fill_(0.02 if ".lora_B." in name else 0.03)
            results.append((log_probs(one), one.evaluate(share(DATA, 64), LOSS), train(one)))
    assert_same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert results[0][2]["train/loss"] != results[1][2]["train/loss"]


@pytest.mark.parametrize("option", ["activation_checkpointing", pytest.param("compile", marks=pytest.mark.long)])
def test_recomputed_and_compiled_layers_train_alike(option: str, model: Path, tmp_path: Path) -> None:
    found = []
    # A layer that is computed again drops the same inputs. Compiled ones draw others.
    spec = adapters_of(model, dropout=0.0 if option == "compile" else 0.2)
    for on in (False, True):
        with open_trainer(model, tmp_path, adapters=spec, **{option: on}) as one:
            metrics = [train(one), train(one)]
            found.append((metrics, weights(one), log_probs(one), log_probs(one, "reference")))
    for one, other in zip(found[0][0], found[1][0]):
        assert_close(other, one, atol=1e-5)
    assert_close(found[1][1], found[0][1], atol=1e-5)
    for rows, others in zip(found[0][2:], found[1][2:]):
        for a, b in zip(rows, others):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_layer_that_reads_its_weight_past_the_adapter_is_named(model: Path, tmp_path: Path) -> None:
    with open_trainer(model, tmp_path, adapters=adapters_of(model)) as one:
        bypassed = one._lm.model.layers[2].self_attn.o_proj
        bypassed.forward = lambda x: torch.nn.functional.linear(x, bypassed.weight)
        with pytest.raises(RuntimeError, match=r"left 1 of 28 adapters .*2\.self_attn\.o_proj\.lora_B.* without"):
            train(one)


def test_the_first_step_that_needs_attention_must_move_every_adapter(tmp_path: Path) -> None:
    """The loss of a row's second token does not depend on queries and keys: one token has all weight."""
    model = make_family(tmp_path / "model", "gemma2")
    second = [replace(each, mask=np.arange(len(each)) == 1) for each in DATA]
    with open_trainer(model, tmp_path, adapters=adapters_of(model)) as one:
        first = weights(one)
        one.train([second], LOSS, totals(second))
        moved = {name: not torch.equal(value, first[name]) for name, value in weights(one).items() if "lora_B" in name}
        assert {name for name in moved if not moved[name]} == {
            each for each in moved if "q_proj" in each or "k_proj" in each
        }
        bypassed = one._lm.model.layers[2].self_attn.q_proj
        bypassed.forward = lambda x: torch.nn.functional.linear(x, bypassed.weight)
        with pytest.raises(RuntimeError, match=r"left 1 of 28 adapters .*2\.self_attn\.q_proj\.lora_B.* without"):
            one.train([DATA], LOSS, totals(DATA))


def test_a_rate_that_moves_nothing_is_named_at_the_first_step_alone(model: Path, tmp_path: Path) -> None:
    spec, tiny = adapters_of(model), replace(OPTIMIZER, lr=1e-46, warmup_steps=0)
    said = r"left 28 of 28 adapters .*q_proj\.lora_B.*the rate 1e-46 is too small"
    with open_trainer(model, tmp_path, adapters=spec, optimizer=tiny) as one, pytest.raises(RuntimeError, match=said):
        train(one)
    with open_trainer(model, tmp_path, adapters=spec) as one:
        train(one)
        one.save(tmp_path / "moved")
    # A resumed run may end at next to nothing; a rate of 0 is one's own wish.
    for lr, load in ((1e-46, True), (0.0, False)):
        with open_trainer(model, tmp_path, adapters=spec, optimizer=replace(tiny, lr=lr)) as one:
            if load:
                one.load(tmp_path / "moved")
            before = weights(one)
            train(one)
            assert_close(weights(one), before, atol=0)


def test_ranks_and_names_draw_the_same_and_another_seed_others(model: Path, tmp_path: Path) -> None:
    spec = adapters_of(model)
    name, shape = spec.tensors[0].name, torch.Size(spec.tensors[0].shape)
    drawn = FirstAdapters(spec, None, 0).value(name, shape)
    assert torch.equal(drawn, FirstAdapters(spec, None, 0).value(name, shape))
    assert not torch.equal(drawn, FirstAdapters(spec, None, 1).value(name, shape))
    # Uniform within 1 / sqrt(inputs), as in PEFT.
    bound = shape[1] ** -0.5
    assert 0.95 * bound < drawn.abs().max() <= bound
    assert not FirstAdapters(spec, None, 0).value(spec.tensors[1].name, torch.Size(spec.tensors[1].shape)).any()
