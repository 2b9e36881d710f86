"""After a refit an engine samples as a fresh engine on the same weights, for every architecture. Its log-probs are
those of transformers."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlctl.generation.engine import Engine
from rlctl.generation.vllm.engine import VllmEngine
from rlctl.grpo.logprob_mismatch import mismatch
from rlctl.refit.protocol import Header, SendReport, TransportSpec
from rlctl.refit.refit import EngineEnd, EnginesLost, Refit
from rlctl.refit.refit_plan import RefitPlan
from rlctl.workers.errors import WorkerError
from rlctl.workers.group import Worker, WorkerGroup, WorkerSpec
from tests.system.engines import FolderSource, MakeSource, collect_all, greedy, refit_options, sample, start_engine
from tests.tiny_models import KINDS, Kind, make_model
from tests.turns import turn

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12] * 20]
DEADLINE = 600.0
TEMPERATURE = 0.7
# As a model has that may end with more than one.
STOPS = (1, 30, 41)
# Experts; biases and tied embeddings go through the same regions, which tests/system/test_layout.py compares.
SOME = ("qwen3_moe",)


def log_probs(folder: Path, prompt: list[int], answer: list[int]) -> np.ndarray:
    """Return the log-prob of each answer token, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0] / TEMPERATURE
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return rows[torch.arange(len(answer)), torch.tensor(answer)].numpy()


@pytest.mark.parametrize("kind", [k if k in SOME else pytest.param(k, marks=pytest.mark.long) for k in KINDS])
def test_greedy_after_refit_equals_a_fresh_engine(kind: Kind, ray_here: Path, tmp_path: Path) -> None:
    old, new = make_model(tmp_path / "old", kind, seed=1), make_model(tmp_path / "new", kind, seed=2)
    engines = [start_engine(folder, ray_here, f"{kind}-{folder.name}", STOPS) for folder in (old, new)]
    source = WorkerGroup([WorkerSpec("source", MakeSource(new, FolderSource))], DEADLINE)
    try:
        for each in (source, *engines):
            each.built().wait(DEADLINE)
        before = sample(engines[0], greedy(PROMPTS, 16))
        refit = Refit(source, refit_options("shm", tmp_path / "shm"))
        end = EngineEnd(engines[0], 1)
        refit.open([end])
        report = refit.run([end], version=3)
        assert report.bytes == refit.plan.payload
        after, fresh = (sample(engine, greedy(PROMPTS, 16)) for engine in engines)
        assert not np.array_equal(before.tokens, fresh.tokens)
        assert np.array_equal(after.tokens, fresh.tokens)
        assert np.array_equal(after.log_probs, fresh.log_probs)
        assert set(after.versions.tolist()) == {3}
        # Longer than a block of the cache.
        shared = greedy([[12] * 40], 4)
        remembered = sample(engines[0], shared)
        engines[0].start(Engine.sleep).wait(DEADLINE)
        engines[0].start(VllmEngine.rpc, "rl_forget").wait(DEADLINE)
        engines[0].start(Engine.wake, "weights").wait(DEADLINE)
        # The same version: a kept prefix would be found.
        refit.run([end], version=3)
        engines[0].start(Engine.wake, "kv_cache").wait(DEADLINE)
        awake = sample(engines[0], greedy(PROMPTS, 16))
        assert np.array_equal(awake.tokens, fresh.tokens) and np.array_equal(awake.log_probs, fresh.log_probs)
        assert np.array_equal(sample(engines[0], shared).log_probs, remembered.log_probs)
        requests = [turn(i, n, p, 16, TEMPERATURE, i) for i, p in enumerate(PROMPTS) for n in range(2)]
        sampled = sample(engines[0], requests).unpack()
        rollouts = [(request.prompt_tokens, one) for request, one in zip(requests, sampled)]
        theirs = [one.log_probs for _, one in rollouts]
        ours = [log_probs(new, prompt, one.tokens.tolist()) for prompt, one in rollouts]
        gap = mismatch(theirs, ours, [np.ones(len(row), np.bool_) for row in theirs])
        assert gap.token_mult_prob_error <= 1.001
        assert gap.max_abs_diff < 1e-3
        assert_each_stop_token_ends_an_answer(engines[0])
    finally:
        source.kill()
        for engine in engines:
            engine.kill()


def assert_each_stop_token_ends_an_answer(engine: Worker) -> None:
    requests = [turn(i, n, prompt, 32, 2.0, i) for i, prompt in enumerate(PROMPTS) for n in range(256)]
    answers = sample(engine, requests).unpack()
    assert {int(answer.tokens[-1]) for answer in answers if answer.finish == "stop"} == set(STOPS)
    assert not any(set(answer.tokens[:-1].tolist()) & set(STOPS) for answer in answers)
    assert all(len(answer.tokens) == 32 for answer in answers if answer.finish != "stop")


class FlippingSource(FolderSource):
    """One bit of version 2 changes on its way."""

    def refit_open(self, spec: TransportSpec, plan: RefitPlan) -> None:
        super().refit_open(spec, plan)
        self.folder = Path(spec.folder)

    def refit_send(self, header: Header) -> SendReport:
        if header.version == 4:
            self.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        report = super().refit_send(header)
        if header.version == 2:
            with (self.folder / "slot0").open("r+b") as file:
                file.seek(1000)
                byte = file.read(1)[0]
                file.seek(1000)
                file.write(bytes([byte ^ 4]))
        return report


@pytest.fixture
def shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rlctl-test-") as folder:
        yield Path(folder)


def test_a_changed_byte_never_reaches_the_engine_and_a_clean_refit_heals_it(
    ray_here: Path, tmp_path: Path, shm: Path
) -> None:
    old, new = make_model(tmp_path / "old", seed=1), make_model(tmp_path / "new", seed=2)
    engine = start_engine(old, ray_here, "flipped")
    source = WorkerGroup([WorkerSpec("source", MakeSource(new, FlippingSource))], DEADLINE)
    try:
        source.built().wait(DEADLINE)
        engine.built().wait(DEADLINE)
        before = sample(engine, greedy(PROMPTS, 8))
        refit = Refit(source, refit_options("shm", shm))
        end = EngineEnd(engine, 1)
        refit.open([end])
        with pytest.raises(EnginesLost, match=r"refit_receive on flipped: Untouched: .* arrived changed") as failure:
            refit.run([end], version=2)
        assert failure.value.intact == [0]
        still = sample(engine, greedy(PROMPTS, 8))
        assert np.array_equal(still.tokens, before.tokens)
        refit.run([end], version=3)
        after = sample(engine, greedy(PROMPTS, 8))
        assert set(after.versions.tolist()) == {3}
        assert not np.array_equal(after.tokens, before.tokens)
        with pytest.raises(WorkerError, match="moved to other memory after the refit was opened"):
            refit.run([end], version=4)
    finally:
        engine.kill()
        source.kill()


@pytest.mark.long  # variant of test_in_flight.py
def test_weights_change_while_requests_run(ray_here: Path, tmp_path: Path, shm: Path) -> None:
    old, new = make_model(tmp_path / "old", seed=1), make_model(tmp_path / "new", seed=2)
    engines = [start_engine(folder, ray_here, f"fly-{folder.name}") for folder in (old, new)]
    source = WorkerGroup([WorkerSpec("source", MakeSource(new, FolderSource))], DEADLINE)
    requests = [turn(i, n, prompt, 160, 1.0, i) for i, prompt in enumerate(PROMPTS * 4) for n in range(2)]
    try:
        for each in (source, *engines):
            each.built().wait(DEADLINE)
        refit = Refit(source, refit_options("shm", shm, in_flight=True))
        end = EngineEnd(engines[0], 1)
        refit.open([end])
        engines[0].start(Engine.submit, requests).wait(DEADLINE)
        refit.run([end], version=1)
        report = refit.run([end], version=2)
        assert report.stall >= 0
        rollouts = collect_all(engines[0], requests)
        seen = {tuple(sorted(set(one.versions.tolist()))) for one in rollouts}
        assert any(len(versions) > 1 for versions in seen)
        assert all((np.diff(one.versions) >= 0).all() for one in rollouts)
        after, fresh = (sample(engine, greedy(PROMPTS, 16)) for engine in engines)
        assert np.array_equal(after.tokens, fresh.tokens)
        assert np.array_equal(after.log_probs, fresh.log_probs)
        engines[0].start(Engine.submit, requests).wait(DEADLINE)
        engines[0].start(Engine.abort, [request.id for request in requests]).wait(DEADLINE)
        again = sample(engines[0], greedy(PROMPTS, 16))
        assert np.array_equal(again.tokens, fresh.tokens)
    finally:
        source.kill()
        for engine in engines:
            engine.kill()
