"""One FSDP rank against plain transformers and torch, for every architecture."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlctl.training.interface import MicroBatch
from rlctl.training.update import learning_rate
from tests.compiled import new_graphs
from tests.system.training.scenario import (
    CONFIG,
    OPTIMIZER,
    TOTAL_UPDATES,
    WeightedLoss,
    assert_close,
    assert_compiled_trains_alike,
    open_trainer,
    plain_log_probs,
    plain_loss,
    rows_of,
    sequences,
    share,
    totals,
    train_in_parts,
    weights,
)
from tests.tiny_models import KINDS, PAD, Kind, make_model
from tests.zoo import make_family

DATA = sequences()
LOSS = WeightedLoss()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    return {kind: make_model(tmp_path_factory.mktemp("models") / kind, kind) for kind in KINDS}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load_plain(folder: Path) -> Any:
    """Load a model by transformers alone."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def assert_same(rows: list[np.ndarray], expected_rows: list[np.ndarray]) -> None:
    for row, expected_row in zip(rows, expected_rows, strict=True):
        np.testing.assert_array_equal(row, expected_row)


def gradient_norm(lm: Any) -> float:
    gradients = [parameter.grad for parameter in lm.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).item()


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_equal_transformers_one_sequence_at_a_time(
    kind: Kind, models: dict[Kind, Path], tmp_path: Path
) -> None:
    lm = load_plain(models[kind])
    with open_trainer(models[kind], tmp_path) as trainer, torch.no_grad():
        [first_rows, no_rows, last_rows] = trainer.log_probs([DATA[:5], [], DATA[5:]])
        assert no_rows == []
        for sequence, row in zip(DATA, first_rows + last_rows):
            expected_row = plain_log_probs(lm, sequence)[0]
            assert row.dtype == np.float32 and len(row) == len(sequence) and row[0] == 0
            np.testing.assert_allclose(row[1:], expected_row.numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_three_updates_equal_a_plain_loop_with_adamw(kind: Kind, models: dict[Kind, Path], tmp_path: Path) -> None:
    lm = load_plain(models[kind])
    matrices = [parameter for parameter in lm.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in lm.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(OPTIMIZER.betas[0], OPTIMIZER.betas[1]),
        eps=OPTIMIZER.eps,
    )
    with open_trainer(models[kind], tmp_path) as trainer:
        for update in range(3):
            rate = learning_rate(update, OPTIMIZER, TOTAL_UPDATES)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = plain_loss(lm, DATA)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(lm.parameters(), OPTIMIZER.max_grad_norm)
            optimizer.step()
            metrics = trainer.train(share(DATA, 64), LOSS, totals(DATA))
            assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-5)
            assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
            assert metrics["train/lr"] == rate
        lm.save_pretrained(tmp_path / "plain")
        trainer.export_folder(tmp_path / "exported")
    assert_close(load_plain(tmp_path / "exported").state_dict(), lm.state_dict(), atol=1e-5)


def test_an_update_in_parts_is_the_update(models: dict[Kind, Path], tmp_path: Path) -> None:
    with open_trainer(models["qwen3"], tmp_path) as trainer:
        expected_metrics = [trainer.train(share(DATA, 64), LOSS, totals(DATA)) for _ in range(2)]
        expected_weights = weights(trainer)
    with open_trainer(models["qwen3"], tmp_path) as trainer:
        for metrics in expected_metrics:
            assert_close(train_in_parts(trainer, DATA, 64), metrics, atol=1e-6)
        assert_close(weights(trainer), expected_weights, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_folder_loads_bit_by_bit_and_layout_lists_it(
    kind: Kind, models: dict[Kind, Path], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    with open_trainer(models[kind], tmp_path) as trainer:
        trainer.export_folder(tmp_path / "out")
        layout = trainer.layout()
        assert layout == [
            (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in trainer.export()
        ]
        halves = [(name, tensor) for name, tensor in trainer.export("bfloat16") if tensor.dtype.itemsize == 2]
        assert trainer.layout("bfloat16") == [(name, tuple(tensor.shape), "bfloat16") for name, tensor in halves]
    source = load_plain(models[kind])
    copy = load_plain(tmp_path / "out")
    tensor_pairs = zip(source.state_dict().values(), copy.state_dict().values())
    assert all(torch.equal(source_tensor, copied_tensor) for source_tensor, copied_tensor in tensor_pairs)
    has_own_head = not source.config.tie_word_embeddings
    assert ("lm_head.weight" in {name for name, _, _ in layout}) == has_own_head
    text = "1+2=3 ab"
    source_tokenizer = AutoTokenizer.from_pretrained(models[kind])
    copied_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert source_tokenizer.encode(text) == copied_tokenizer.encode(text)
    assert copy.generation_config.eos_token_id == source.generation_config.eos_token_id


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads_train_alike(kind: Kind, tied: bool, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", kind, tied=tied)
    lm = load_plain(model)
    plain_loss(lm, DATA).backward()
    with open_trainer(model, tmp_path) as trainer:
        metrics = trainer.train(share(DATA, 1000), LOSS, totals(DATA))
    assert metrics["train/grad_norm"] == pytest.approx(gradient_norm(lm), rel=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_packing_order_and_empty_micro_batches_change_nothing(
    kind: Kind, models: dict[Kind, Path], tmp_path: Path
) -> None:
    packings = [share(DATA, 20), share(DATA, 45), [DATA[::-1]], [[], DATA[:4], [], DATA[4:], []]]
    results = []
    for packing in packings:
        with open_trainer(models[kind], tmp_path) as trainer:
            metrics = trainer.train(packing, LOSS, totals(DATA))
            results.append((metrics, weights(trainer)))
    expected_metrics, expected_weights = results[0]
    for metrics, trained_weights in results[1:]:
        assert_close(metrics, expected_metrics, atol=1e-6)
        assert_close(trained_weights, expected_weights, atol=1e-6)


def test_a_warm_up_changes_no_bit(models: dict[Kind, Path], tmp_path: Path) -> None:
    """Warm up before the first update and before a later one, as after a resume."""
    # By whether the trainer is warmed up: weights and metrics, weights and metrics, weights.
    records: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    saved: dict[bool, list[dict[str, bytes]]] = {False: [], True: []}
    for is_warmed in (False, True):
        with open_trainer(models["qwen3"], tmp_path) as trainer:
            for number in range(2):
                random_state = torch.get_rng_state()
                if is_warmed:
                    trainer.warm_up(share(DATA[:5], 20), LOSS)
                assert torch.equal(torch.get_rng_state(), random_state)
                state_folder = tmp_path / f"state-{is_warmed}-{number}"
                trainer.save(state_folder)
                tensors = load_file(next(state_folder.glob("*.safetensors")))
                saved[is_warmed].append({name: tensor.numpy().tobytes() for name, tensor in tensors.items()})
                records[is_warmed].append(weights(trainer))
                records[is_warmed].append(trainer.train(share(DATA, 45), LOSS, totals(DATA)))
            records[is_warmed].append(weights(trainer))
    for warmed_record, cold_record in zip(records[True], records[False], strict=True):
        assert_close(warmed_record, cold_record, atol=0)
    assert saved[True] == saved[False]


def test_activation_checkpointing_changes_nothing(models: dict[Kind, Path], tmp_path: Path) -> None:
    trained_weights = []
    for checkpointing in (False, True):
        with open_trainer(models["qwen3"], tmp_path, activation_checkpointing=checkpointing) as trainer:
            trainer.train(share(DATA, 64), LOSS, totals(DATA))
            trained_weights.append(weights(trainer))
    assert_close(trained_weights[0], trained_weights[1], atol=0)


@pytest.mark.long  # compiles for minutes
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_and_loss_train_alike(models: dict[Kind, Path], tmp_path: Path, checkpointing: bool) -> None:
    assert_compiled_trains_alike(models["qwen3"], tmp_path, DATA, activation_checkpointing=checkpointing)


@pytest.mark.long  # compiles for minutes
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_nothing_is_compiled_anew_for_a_rank_without_work_or_a_chunk_of_one_row(
    models: dict[Kind, Path], tmp_path: Path
) -> None:
    """For either reason a second compilation once cost a step of a run 10 s."""

    def count_new_graphs(micro_batches: list[MicroBatch]) -> int:
        counts = totals(rows_of(micro_batches))
        return new_graphs(lambda: trainer.train(micro_batches, LOSS, counts))

    pair = [DATA[2], DATA[5]]
    assert totals(pair).tokens == CONFIG.logprob_chunk_tokens + 1
    torch.compiler.reset()
    with open_trainer(models["qwen3"], tmp_path, compile=True) as trainer:
        # On a CPU, attention to sequences of one length has another layout.
        assert count_new_graphs([*share(DATA, 64), [DATA[0]]]) > 0
        assert [count_new_graphs(share(DATA, max_tokens)) for max_tokens in (20, 45)] == [0, 0]
        assert count_new_graphs([*share(DATA, 64), []]) == 0
        assert count_new_graphs([pair]) == 0


def test_the_same_run_twice_gives_the_same_bits(models: dict[Kind, Path], tmp_path: Path) -> None:
    metrics = []
    trained_weights = []
    for _ in range(2):
        with open_trainer(models["qwen3_moe"], tmp_path) as trainer:
            metrics.append([trainer.train(share(DATA, 64), LOSS, totals(DATA)) for _ in range(2)])
            trained_weights.append(weights(trainer))
    assert metrics[0] == metrics[1]
    assert_close(trained_weights[0], trained_weights[1], atol=0)


def test_saved_and_loaded_training_continues_bit_by_bit(models: dict[Kind, Path], tmp_path: Path) -> None:
    with open_trainer(models["qwen2"], tmp_path) as trainer:
        for _ in range(2):
            trainer.train(share(DATA, 64), LOSS, totals(DATA))
        trainer.save(tmp_path / "state")
        expected_metrics = [trainer.train(share(DATA, 64), LOSS, totals(DATA)) for _ in range(2)]
        expected_weights = weights(trainer)
    assert not [file.name for file in (tmp_path / "state").iterdir() if file.suffix != ".safetensors"]
    with open_trainer(models["qwen2"], tmp_path) as trainer:
        trainer.train(share(DATA, 64), LOSS, totals(DATA))
        trainer.load(tmp_path / "state")
        assert [trainer.train(share(DATA, 64), LOSS, totals(DATA)) for _ in range(2)] == expected_metrics
        assert_close(weights(trainer), expected_weights, atol=0)


def test_loading_restores_the_random_state(models: dict[Kind, Path], tmp_path: Path) -> None:
    with open_trainer(models["qwen3"], tmp_path) as trainer:
        trainer.save(tmp_path / "state")
        expected = torch.rand(3)
        trainer.load(tmp_path / "state")
        assert torch.equal(torch.rand(3), expected)


def test_loading_from_an_empty_folder_says_so(models: dict[Kind, Path], tmp_path: Path) -> None:
    with (
        open_trainer(models["qwen3"], tmp_path) as trainer,
        pytest.raises(FileNotFoundError, match="holds no trainer state"),
    ):
        trainer.load(tmp_path)


def test_the_reference_stays_at_version_0_and_leaves_the_policy_alone(models: dict[Kind, Path], tmp_path: Path) -> None:
    with open_trainer(models["qwen3"], tmp_path) as trainer:
        first_rows = trainer.log_probs([DATA])[0]
        trainer.train(share(DATA, 64), LOSS, totals(DATA))
        trained_rows = trainer.log_probs([DATA])[0]
        trained_weights = weights(trainer)
        assert_same(trainer.log_probs([DATA], "reference")[0], first_rows)
        assert_close(weights(trainer), trained_weights, atol=0)
        assert_same(trainer.log_probs([DATA])[0], trained_rows)
        assert not np.allclose(trained_rows[0], first_rows[0])


def test_a_role_has_the_weights_of_its_own_folder(models: dict[Kind, Path], tmp_path: Path) -> None:
    reference = make_model(tmp_path / "reference", "qwen3", seed=7)
    with open_trainer(reference, tmp_path) as trainer:
        expected_rows = trainer.log_probs([DATA])[0]
    with open_trainer(models["qwen3"], tmp_path, reference=reference) as trainer:
        policy_rows = trainer.log_probs([DATA])[0]
        assert_same(trainer.log_probs([DATA], "reference")[0], expected_rows)
        assert not np.allclose(policy_rows[0], expected_rows[0])
        with pytest.raises(ValueError, match=r"^the trainer has no teacher: its roles are policy, reference$"):
            trainer.log_probs([DATA], "teacher")


def test_evaluating_gives_the_losses_metrics_and_changes_nothing(models: dict[Kind, Path], tmp_path: Path) -> None:
    with open_trainer(models["llama"], tmp_path) as trainer:
        before = weights(trainer)
        evaluated = trainer.evaluate(share(DATA, 40), LOSS)
        assert_close(weights(trainer), before, atol=0)
        trained = trainer.train(share(DATA, 40), LOSS, totals(DATA))
        assert evaluated == {name: trained[name] for name in ("train/loss", "train/share", "train/max_entropy")}


def test_a_pad_token_inside_a_sequence_trains_like_any_other(tmp_path: Path) -> None:
    """torch gives the row of an embedding's padding index no gradient, and the pad token is often the end token."""
    model = make_model(tmp_path / "model", "llama")
    tokens = np.where(np.arange(len(DATA[0])) % 2, DATA[0].tokens, PAD).astype(np.int32)
    samples = [replace(DATA[0], tokens=tokens)]
    lm = load_plain(model)
    lm.model.embed_tokens.padding_idx = None
    plain_loss(lm, samples).backward()
    with open_trainer(model, tmp_path) as trainer:
        metrics = trainer.train([samples], LOSS, totals(samples))
    assert metrics["train/grad_norm"] == pytest.approx(gradient_norm(lm), rel=1e-4)


def test_an_all_masked_micro_batch_is_no_surprise(models: dict[Kind, Path], tmp_path: Path) -> None:
    silent = [replace(sample, mask=np.zeros_like(sample.mask)) for sample in DATA[:3]]
    with open_trainer(models["qwen3"], tmp_path) as trainer:
        with_silent = trainer.train([silent, DATA], LOSS, totals(DATA))
        # The share alone counts sequences without a token.
        with_silent["train/share"] *= (len(silent) + len(DATA)) / len(DATA)
    with open_trainer(models["qwen3"], tmp_path) as trainer:
        assert trainer.train([DATA], LOSS, totals(DATA)) == pytest.approx(with_silent, abs=1e-6)


@pytest.mark.parametrize(
    ("backend", "family"), [("fsdp", "gpt_oss"), ("fsdp", "cohere"), ("megatron", "qwen2"), ("megatron", "qwen3_moe")]
)
def test_decay_reaches_matrices_that_are_neither_norms_nor_biases(backend: str, family: str, tmp_path: Path) -> None:
    """Measure decay apart from the gradient: a step changes decayed weights by lr * weight_decay of their values.

    Experts of gpt_oss have matrices of biases, queries and keys of cohere have matrices of norms. Megatron itself
    applies its factors only through its own scheduler.
    """
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    keys = {"use_qk_norm": True} if family == "cohere" else {}
    folder = make_family(tmp_path / family, family, **keys)
    trained_weights = []
    for decay in (0.0, OPTIMIZER.weight_decay):
        optimizer = replace(OPTIMIZER, weight_decay=decay)
        with open_trainer(folder, tmp_path, backend=backend, optimizer=optimizer) as trainer:
            before = weights(trainer)
            trainer.train([DATA], WeightedLoss(), totals(DATA))
            trained_weights.append(weights(trainer))
    assert not keys or before["model.layers.0.self_attn.q_norm.weight"].ndim == 2
    without_decay, with_decay = trained_weights
    for name, tensor in with_decay.items():
        expected = torch.zeros_like(tensor)
        if not name.endswith(("bias", "norm.weight", "sinks")):
            expected = OPTIMIZER.lr * OPTIMIZER.weight_decay * before[name]
        torch.testing.assert_close(without_decay[name] - tensor, expected, atol=1e-7, rtol=0, msg=name)


def test_a_model_whose_facts_cannot_be_derived_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    refusal = pytest.raises(ValueError, match=r"transformers .* has no causal language model of it")
    with refusal, open_trainer(tmp_path, tmp_path):
        pass


def test_info_counts_the_weights_a_token_meets(models: dict[Kind, Path], tmp_path: Path) -> None:
    active_parameters: dict[Kind, int] = {}
    sizes: dict[Kind, dict[str, int]] = {}
    for kind in ("llama", "qwen3", "qwen3_moe"):
        with open_trainer(models[kind], tmp_path) as trainer:
            facts = trainer.info()
            sizes[kind] = {name: tensor.numel() for name, tensor in trainer.export()}
            assert trainer.memory()["host_rss"] > 1e8
        assert facts["parameters"] == sum(sizes[kind].values())
        assert (facts["dtype"], facts["device"]) == ("float32", "cpu")
        active_parameters[kind] = facts["active_parameters"]
    embedding = 64 * 128
    assert active_parameters["llama"] == sum(sizes["llama"].values()) - embedding
    # The head of qwen3 is its embedding: a token meets all weights.
    assert active_parameters["qwen3"] == sum(sizes["qwen3"].values())
    experts = sum(size for name, size in sizes["qwen3_moe"].items() if ".experts." in name)
    assert active_parameters["qwen3_moe"] == sum(sizes["qwen3_moe"].values()) - embedding - experts // 2


def test_bfloat16_computes_close_to_float32_and_keeps_float32_masters(models: dict[Kind, Path], tmp_path: Path) -> None:
    log_probs = []
    norms = []
    for dtype in ("float32", "bfloat16"):
        with open_trainer(models["qwen3"], tmp_path, dtype=dtype) as trainer:
            log_probs.append(np.concatenate(rows_of(trainer.log_probs([DATA]))))
            norms.append(trainer.train([DATA], LOSS, totals(DATA))["train/grad_norm"])
            assert {master_dtype for _, _, master_dtype in trainer.layout()} == {"float32"}
    assert np.abs(log_probs[0] - log_probs[1]).mean() < 0.1
    assert norms[0] == pytest.approx(norms[1], rel=0.1)
