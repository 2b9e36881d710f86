"""One FSDP rank against plain transformers and torch, for every architecture."""

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlctl.training.interface import LossOutput, MicroBatch, TokenBatch, Totals
from rlctl.training.micro_batching import TrainingSample
from rlctl.training.update import learning_rate
from tests.compiled import new_graphs
from tests.system.training.scenario import (
    CONFIG,
    OPTIMIZER,
    TOTAL_UPDATES,
    WeightedLoss,
    assert_close,
    assert_compiled_trains_alike,
    assert_refused,
    open_trainer,
    plain_log_probs,
    plain_loss,
    refused,
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


def plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_equal_transformers_one_sequence_at_a_time(
    kind: Kind, models: dict[Kind, Path], tmp_path: Path
) -> None:
    lm = plain(models[kind])
    with open_trainer(models[kind], tmp_path) as one, torch.no_grad():
        [first, nothing, rest] = one.log_probs([DATA[:5], [], DATA[5:]])
        assert nothing == []
        for sequence, got in zip(DATA, first + rest):
            expected = plain_log_probs(lm, sequence)[0]
            assert got.dtype == np.float32 and len(got) == len(sequence) and got[0] == 0
            np.testing.assert_allclose(got[1:], expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_three_updates_equal_a_plain_loop_with_adamw(kind: Kind, models: dict[Kind, Path], tmp_path: Path) -> None:
    lm = plain(models[kind])
    matrices = [p for p in lm.parameters() if p.ndim > 1]
    others = [p for p in lm.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(OPTIMIZER.betas[0], OPTIMIZER.betas[1]),
        eps=OPTIMIZER.eps,
    )
    with open_trainer(models[kind], tmp_path) as one:
        for update in range(3):
            lr = learning_rate(update, OPTIMIZER, TOTAL_UPDATES)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = plain_loss(lm, DATA)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(lm.parameters(), OPTIMIZER.max_grad_norm)
            optimizer.step()
            metrics = one.train(share(DATA, 64), LOSS, totals(DATA))
            assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-5)
            assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
            assert metrics["train/lr"] == lr
        lm.save_pretrained(tmp_path / "plain")
        one.export_folder(tmp_path / "ours")
    assert_close(plain(tmp_path / "ours").state_dict(), lm.state_dict(), atol=1e-5)


def test_an_update_in_parts_is_the_update(models: dict[Kind, Path], tmp_path: Path) -> None:
    with open_trainer(models["qwen3"], tmp_path) as whole:
        expected = [whole.train(share(DATA, 64), LOSS, totals(DATA)) for _ in range(2)]
        exported = weights(whole)
    with open_trainer(models["qwen3"], tmp_path) as one:
        for metrics in expected:
            assert_close(train_in_parts(one, DATA, 64), metrics, atol=1e-6)
        assert_close(weights(one), exported, atol=1e-6)


def test_discarded_parts_leave_nothing_behind(models: dict[Kind, Path], tmp_path: Path) -> None:
    with open_trainer(models["qwen3"], tmp_path) as whole:
        expected = whole.train(share(DATA, 64), LOSS, totals(DATA)), weights(whole)
    with open_trainer(models["qwen3"], tmp_path) as one:
        one.accumulate(share(DATA[:4], 64), LOSS)
        one.discard()
        assert one.train(share(DATA, 64), LOSS, totals(DATA)) == expected[0]
        assert_close(weights(one), expected[1], atol=0)


@dataclass(frozen=True)
class FailingLoss(WeightedLoss):
    def __call__(self, batch: TokenBatch) -> LossOutput:
        if 7 in batch.columns["advantage"]:
            raise KeyError("seven")
        return super().__call__(batch)


def test_an_update_that_fails_halfway_leaves_nothing_behind(models: dict[Kind, Path], tmp_path: Path) -> None:
    bad = replace(DATA[0], columns={"advantage": np.full_like(DATA[0].columns["advantage"], 7)})
    with open_trainer(models["qwen3"], tmp_path) as whole:
        expected = whole.train([DATA], LOSS, totals(DATA))
    with open_trainer(models["qwen3"], tmp_path) as one:
        with pytest.raises(KeyError, match="seven"):
            one.train([DATA[1:], [bad]], FailingLoss(), totals(DATA))
        assert one.train([DATA], LOSS, totals(DATA)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_folder_loads_bit_by_bit_and_layout_lists_it(
    kind: Kind, models: dict[Kind, Path], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    with open_trainer(models[kind], tmp_path) as one:
        one.export_folder(tmp_path / "out")
        exported = [(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in one.export()]
        assert one.layout() == exported
        halves = [(name, tuple(t.shape), "bfloat16") for name, t in one.export("bfloat16") if t.dtype.itemsize == 2]
        assert one.layout("bfloat16") == halves
    source, copy = plain(models[kind]), plain(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(source.state_dict().values(), copy.state_dict().values()))
    tied = source.config.tie_word_embeddings
    assert ("lm_head.weight" in {name for name, _, _ in exported}) == (not tied)
    text = "1+2=3 ab"
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (models[kind], tmp_path / "out")]
    assert tokenizers[0].encode(text) == tokenizers[1].encode(text)
    assert copy.generation_config.eos_token_id == source.generation_config.eos_token_id


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads_train_alike(kind: Kind, tied: bool, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", kind, tied=tied)
    lm = plain(model)
    plain_loss(lm, DATA).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in lm.parameters() if p.grad is not None])
    with open_trainer(model, tmp_path) as one:
        metrics = one.train(share(DATA, 1000), LOSS, totals(DATA))
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_packing_order_and_empty_micro_batches_change_nothing(
    kind: Kind, models: dict[Kind, Path], tmp_path: Path
) -> None:
    packings = [share(DATA, 20), share(DATA, 45), [DATA[::-1]], [[], DATA[:4], [], DATA[4:], []]]
    results = []
    for packing in packings:
        with open_trainer(models[kind], tmp_path) as one:
            metrics = one.train(packing, LOSS, totals(DATA))
            results.append((metrics, weights(one)))
    for metrics, after in results[1:]:
        print({k: (metrics[k], metrics[k] - results[0][0][k]) for k in metrics})
        assert_close(metrics, results[0][0], atol=1e-6)
        assert_close(after, results[0][1], atol=1e-6)


def test_a_warm_up_changes_no_bit(models: dict[Kind, Path], tmp_path: Path) -> None:
    """Before the first update and, as after a resume, before a later one."""
    results = []
    for warm in (False, True):
        found: list[Any] = []
        with open_trainer(models["qwen3"], tmp_path) as one:
            for number in range(2):
                before = torch.get_rng_state()
                if warm:
                    one.warm_up(share(DATA[:5], 20), LOSS)
                assert torch.equal(torch.get_rng_state(), before)
                one.save(tmp_path / f"state-{warm}-{number}")
                found += [weights(one), one.train(share(DATA, 45), LOSS, totals(DATA))]
            results.append([*found, weights(one)])
    for plain, warmed in zip(*results):
        assert plain.keys() == warmed.keys()
        assert all(torch.equal(torch.as_tensor(plain[name]), torch.as_tensor(warmed[name])) for name in plain)
    for number in range(2):
        folders = [tmp_path / f"state-{warm}-{number}" for warm in (False, True)]
        cold, warmed = (load_file(next(folder.glob("*.safetensors"))) for folder in folders)
        assert {name: tensor.numpy().tobytes() for name, tensor in cold.items()} == {
            name: tensor.numpy().tobytes() for name, tensor in warmed.items()
        }


def test_activation_checkpointing_changes_nothing(models: dict[Kind, Path], tmp_path: Path) -> None:
    results = []
    for on in (False, True):
        with open_trainer(models["qwen3"], tmp_path, activation_checkpointing=on) as one:
            one.train(share(DATA, 64), LOSS, totals(DATA))
            results.append(weights(one))
    assert_close(results[0], results[1], atol=0)


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
    """Either cost a step of a run 10 s, whenever it came."""

    def graphs(micro_batches: list[MicroBatch]) -> int:
        data = [sequence for batch in micro_batches for sequence in batch]
        return new_graphs(lambda: one.train(micro_batches, LOSS, totals(data)))

    pair = [DATA[2], DATA[5]]
    assert totals(pair).tokens == CONFIG.logprob_chunk_tokens + 1
    torch.compiler.reset()
    with open_trainer(models["qwen3"], tmp_path, compile=True) as one:
        # On a CPU, attention to sequences of one length has another layout.
        assert graphs([*share(DATA, 64), [DATA[0]]]) > 0
        assert [graphs(share(DATA, most)) for most in (20, 45)] == [0, 0]
        assert graphs([*share(DATA, 64), []]) == 0
        assert graphs([pair]) == 0


def test_the_same_run_twice_gives_the_same_bits(models: dict[Kind, Path], tmp_path: Path) -> None:
    results = []
    for _ in range(2):
        with open_trainer(models["qwen3_moe"], tmp_path) as one:
            metrics = [one.train(share(DATA, 64), LOSS, totals(DATA)) for _ in range(2)]
            results.append((metrics, weights(one)))
    assert results[0][0] == results[1][0]
    assert_close(results[0][1], results[1][1], atol=0)


def test_saved_and_loaded_training_continues_bit_by_bit(models: dict[Kind, Path], tmp_path: Path) -> None:
    with open_trainer(models["qwen2"], tmp_path) as one:
        for _ in range(2):
            one.train(share(DATA, 64), LOSS, totals(DATA))
        one.save(tmp_path / "state")
        expected = [one.train(share(DATA, 64), LOSS, totals(DATA)) for _ in range(2)], weights(one)
    assert not [file.name for file in (tmp_path / "state").iterdir() if file.suffix != ".safetensors"]
    with open_trainer(models["qwen2"], tmp_path) as one:
        one.train(share(DATA, 64), LOSS, totals(DATA))
        one.load(tmp_path / "state")
        assert [one.train(share(DATA, 64), LOSS, totals(DATA)) for _ in range(2)] == expected[0]
        assert_close(weights(one), expected[1], atol=0)


def test_loading_restores_the_random_state(models: dict[Kind, Path], tmp_path: Path) -> None:
    with open_trainer(models["qwen3"], tmp_path) as one:
        one.save(tmp_path / "state")
        expected = torch.rand(3)
        one.load(tmp_path / "state")
        assert torch.equal(torch.rand(3), expected)


def test_loading_from_an_empty_folder_says_so(models: dict[Kind, Path], tmp_path: Path) -> None:
    with (
        open_trainer(models["qwen3"], tmp_path) as one,
        pytest.raises(FileNotFoundError, match="holds no trainer state"),
    ):
        one.load(tmp_path)


def test_the_reference_stays_at_version_0_and_leaves_the_policy_alone(models: dict[Kind, Path], tmp_path: Path) -> None:
    with open_trainer(models["qwen3"], tmp_path) as one:
        at_start = one.log_probs([DATA])[0]
        one.train(share(DATA, 64), LOSS, totals(DATA))
        trained, before = one.log_probs([DATA])[0], weights(one)
        reference = one.log_probs([DATA], "reference")[0]
        assert all(np.array_equal(a, b) for a, b in zip(reference, at_start))
        assert_close(weights(one), before, atol=0)
        again = one.log_probs([DATA])[0]
        assert all(np.array_equal(a, b) for a, b in zip(again, trained))
        assert not np.allclose(trained[0], at_start[0])


def test_a_role_has_the_weights_of_its_own_folder(models: dict[Kind, Path], tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", "qwen3", seed=7)
    with open_trainer(other, tmp_path) as one:
        expected = one.log_probs([DATA])[0]
    with open_trainer(models["qwen3"], tmp_path, reference=other) as one:
        own, found = one.log_probs([DATA])[0], one.log_probs([DATA], "reference")[0]
        assert all(np.array_equal(a, b) for a, b in zip(found, expected))
        assert not np.allclose(own[0], expected[0])
        with pytest.raises(ValueError, match=r"^the trainer has no teacher: its roles are policy, reference$"):
            one.log_probs([DATA], "teacher")


def test_evaluating_gives_the_losses_metrics_and_changes_nothing(models: dict[Kind, Path], tmp_path: Path) -> None:
    with open_trainer(models["llama"], tmp_path) as one:
        before = weights(one)
        seen = one.evaluate(share(DATA, 40), LOSS)
        assert_close(weights(one), before, atol=0)
        trained = one.train(share(DATA, 40), LOSS, totals(DATA))
        assert seen == {name: trained[name] for name in ("train/loss", "train/share", "train/max_entropy")}


def test_a_pad_token_inside_a_sequence_trains_like_any_other(tmp_path: Path) -> None:
    """torch withholds the input gradient of an embedding's padding index, and pad is often the end token."""
    model = make_model(tmp_path / "model", "llama")
    data = [replace(DATA[0], tokens=np.where(np.arange(len(DATA[0])) % 2, DATA[0].tokens, PAD).astype(np.int32))]
    lm = plain(model)
    lm.model.embed_tokens.padding_idx = None
    plain_loss(lm, data).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in lm.parameters() if p.grad is not None])
    with open_trainer(model, tmp_path) as one:
        metrics = one.train([data], LOSS, totals(data))
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@dataclass(frozen=True)
class ExplodingLoss(WeightedLoss):
    def __call__(self, batch: TokenBatch) -> LossOutput:
        return LossOutput(batch.log_probs.sum() * float("inf"))


@pytest.mark.parametrize(("backend", "first"), [("fsdp", r"model\.embed_t"), ("megatron", r"embedding\.word")])
def test_a_gradient_that_is_not_finite_stops_the_update(
    backend: str, first: str, models: dict[Kind, Path], tmp_path: Path
) -> None:
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    with open_trainer(models["qwen3"], tmp_path, backend=backend) as one:
        before = weights(one)
        with pytest.raises(FloatingPointError, match=rf"loss is -inf and the gradient norm is nan \(first in {first}"):
            one.train([DATA], ExplodingLoss(), totals(DATA))
        assert_close(weights(one), before, atol=0)
        one.train([DATA], LOSS, totals(DATA))


def test_a_loss_that_is_not_finite_stops_it_though_the_gradient_is(models: dict[Kind, Path], tmp_path: Path) -> None:
    with open_trainer(models["qwen3"], tmp_path) as one:
        assert_refused(refused(one, DATA, 64))
        one.train([DATA], LOSS, totals(DATA))


def test_an_all_masked_micro_batch_is_no_surprise(models: dict[Kind, Path], tmp_path: Path) -> None:
    silent = [TrainingSample(s.tokens, np.zeros_like(s.mask), s.columns) for s in DATA[:3]]
    with open_trainer(models["qwen3"], tmp_path) as one:
        with_silent = one.train([silent, DATA], LOSS, totals(DATA))
        # The share alone counts sequences without a token.
        with_silent["train/share"] *= (len(silent) + len(DATA)) / len(DATA)
    with open_trainer(models["qwen3"], tmp_path) as one:
        assert one.train([DATA], LOSS, totals(DATA)) == pytest.approx(with_silent, abs=1e-6)


@pytest.mark.parametrize(
    ("backend", "family"), [("fsdp", "gpt_oss"), ("fsdp", "cohere"), ("megatron", "qwen2"), ("megatron", "qwen3_moe")]
)
def test_decay_reaches_matrices_that_are_neither_norms_nor_biases(backend: str, family: str, tmp_path: Path) -> None:
    """Decay is apart from the gradient: it changes a step by lr * weight_decay of the weights.

    Experts of gpt_oss have matrices of biases, queries and keys of cohere have matrices of norms. Megatron itself
    applies its factors only through its own scheduler.
    """
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    keys = {"use_qk_norm": True} if family == "cohere" else {}
    folder = make_family(tmp_path / family, family, **keys)
    made = []
    for decay in (0.0, OPTIMIZER.weight_decay):
        optimizer = replace(OPTIMIZER, weight_decay=decay)
        with open_trainer(folder, tmp_path, backend=backend, optimizer=optimizer) as one:
            before = weights(one)
            one.train([DATA], WeightedLoss(), totals(DATA))
            made.append(weights(one))
    plain = ("bias", "norm.weight", "sinks")
    assert not keys or before["model.layers.0.self_attn.q_norm.weight"].ndim == 2
    for name, after in made[1].items():
        decayed = torch.zeros_like(after)
        if not name.endswith(plain):
            decayed = OPTIMIZER.lr * OPTIMIZER.weight_decay * before[name]
        torch.testing.assert_close(made[0][name] - after, decayed, atol=1e-7, rtol=0, msg=name)


def test_a_model_whose_facts_cannot_be_derived_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    refused = pytest.raises(ValueError, match=r"transformers .* has no causal language model of it")
    with refused, open_trainer(tmp_path, tmp_path):
        pass


def test_info_counts_the_weights_a_token_meets(models: dict[Kind, Path], tmp_path: Path) -> None:
    counted = {}
    for kind in ("llama", "qwen3", "qwen3_moe"):
        with open_trainer(models[kind], tmp_path) as one:
            counted[kind] = one.info(), {name: t.numel() for name, t in one.export()}
            assert one.memory()["host_rss"] > 1e8
    for info, sizes in counted.values():
        assert info["parameters"] == sum(sizes.values())
        assert (info["dtype"], info["device"]) == ("float32", "cpu")
    embedding = 64 * 128
    for kind, idle in (("llama", embedding), ("qwen3", 0)):
        assert counted[kind][0]["active_parameters"] == (sum(counted[kind][1].values()) - idle)
    info, sizes = counted["qwen3_moe"]
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert info["active_parameters"] == (sum(sizes.values()) - embedding - experts // 2)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_an_update_of_nothing_makes_no_step(backend: str, models: dict[Kind, Path], tmp_path: Path) -> None:
    """Without micro-batches, and where no token counts: without a gradient AdamW would still decay the weights."""
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    silent = [replace(s, mask=np.zeros_like(s.mask)) for s in DATA]
    with open_trainer(models["qwen3"], tmp_path, backend=backend) as one:
        before = weights(one)
        assert one.train([], LOSS, Totals(0, 0, 0)) == one.train([silent], LOSS, totals(silent)) == {}
        assert_close(weights(one), before, atol=0)
        assert one.train([DATA], LOSS, totals(DATA))["train/lr"] == learning_rate(0, OPTIMIZER, TOTAL_UPDATES)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_gradient_of_exactly_zero_makes_no_step(backend: str, models: dict[Kind, Path], tmp_path: Path) -> None:
    """Momentum and decay would move the weights. Schedule and curve are those without it, after a resume too."""
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    flat = [replace(s, columns={"advantage": np.zeros_like(s.columns["advantage"])}) for s in DATA]
    curves = []
    for way in ("plain", "flat", "resumed"):
        with open_trainer(models["qwen3"], tmp_path, backend=backend) as one:
            one.train(share(DATA, 64), LOSS, totals(DATA))
            if way != "plain":
                before = weights(one)
                found = one.train(share(flat, 64), WeightedLoss(entropy=0.0), totals(flat))
                assert found["train/grad_norm"] == found["train/loss"] == 0 and "train/lr" not in found
                assert_close(weights(one), before, atol=0)
            one.save(tmp_path / way)
            if way != "resumed":
                curves.append((one.train(share(DATA, 64), LOSS, totals(DATA)), weights(one)))
    with open_trainer(models["qwen3"], tmp_path, backend=backend) as one:
        one.load(tmp_path / "resumed")
        curves.append((one.train(share(DATA, 64), LOSS, totals(DATA)), weights(one)))
    assert curves[0][0] == curves[1][0] == curves[2][0]
    for _, after in curves[1:]:
        assert_close(after, curves[0][1], atol=0)


def test_bfloat16_computes_close_to_float32_and_keeps_float32_masters(models: dict[Kind, Path], tmp_path: Path) -> None:
    results = []
    for dtype in ("float32", "bfloat16"):
        with open_trainer(models["qwen3"], tmp_path, dtype=dtype) as one:
            values = np.concatenate(list(itertools.chain(*one.log_probs([DATA]))))
            metrics = one.train([DATA], LOSS, totals(DATA))
            assert {kind for _, _, kind in one.layout()} == {"float32"}
            results.append((values, metrics))
    assert np.abs(results[0][0] - results[1][0]).mean() < 0.1
    assert results[0][1]["train/grad_norm"] == pytest.approx(results[1][1]["train/grad_norm"], rel=0.1)
