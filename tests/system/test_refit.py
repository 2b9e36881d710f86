"""After a refit an engine samples as a fresh engine on the same weights, for every architecture. Its log-probs are
those of transformers."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlctl.generation.engine import Engine
from rlctl.generation.requests import TurnRequest
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
# Stop tokens of a model that has several.
STOPS = (1, 30, 41)
# Experts are shown at once. Biases and tied embeddings go through the same regions, which
# tests/system/test_layout.py compares.
CASES = [kind if kind == "qwen3_moe" else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS]


def log_probs(folder: Path, prompt: list[int], answer: list[int]) -> np.ndarray:
    """Return the log-prob of each answer token, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0] / TEMPERATURE
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return rows[torch.arange(len(answer)), torch.tensor(answer)].numpy()


def make_requests(prompts: list[list[int]], count: int, max_tokens: int, temperature: float) -> list[TurnRequest]:
    """Make `count` requests of each prompt."""
    requests = []
    for group, prompt in enumerate(prompts):
        for index in range(count):
            requests.append(turn(group, index, prompt, max_tokens, temperature, group))
    return requests


@pytest.mark.parametrize("kind", CASES)
def test_greedy_after_refit_equals_a_fresh_engine(kind: Kind, ray_here: Path, tmp_path: Path) -> None:
    old = make_model(tmp_path / "old", kind, seed=1)
    new = make_model(tmp_path / "new", kind, seed=2)
    engine = start_engine(old, ray_here, f"{kind}-old", STOPS)
    fresh_engine = start_engine(new, ray_here, f"{kind}-new", STOPS)
    source = WorkerGroup([WorkerSpec("source", MakeSource(new, FolderSource))], DEADLINE)
    try:
        for worker in (source, engine, fresh_engine):
            worker.built().wait(DEADLINE)
        before = sample(engine, greedy(PROMPTS, 16))
        refit = Refit(source, refit_options("shm", tmp_path / "shm"))
        end = EngineEnd(engine, 1)
        refit.open([end])
        report = refit.run([end], version=3)
        assert report.bytes == refit.plan.payload
        after = sample(engine, greedy(PROMPTS, 16))
        fresh = sample(fresh_engine, greedy(PROMPTS, 16))
        assert not np.array_equal(before.tokens, fresh.tokens)
        assert np.array_equal(after.tokens, fresh.tokens)
        assert np.array_equal(after.log_probs, fresh.log_probs)
        assert set(after.versions.tolist()) == {3}
        # Longer than a block of the cache.
        long_requests = greedy([[12] * 40], 4)
        remembered = sample(engine, long_requests)
        engine.start(Engine.sleep).wait(DEADLINE)
        engine.start(VllmEngine.rpc, "rl_forget").wait(DEADLINE)
        engine.start(Engine.wake, "weights").wait(DEADLINE)
        # The same version: a kept prefix would be found.
        refit.run([end], version=3)
        engine.start(Engine.wake, "kv_cache").wait(DEADLINE)
        awake = sample(engine, greedy(PROMPTS, 16))
        assert np.array_equal(awake.tokens, fresh.tokens) and np.array_equal(awake.log_probs, fresh.log_probs)
        assert np.array_equal(sample(engine, long_requests).log_probs, remembered.log_probs)
        assert_log_probs_are_those_of_transformers(engine, new)
        assert_each_stop_token_ends_an_answer(engine)
    finally:
        source.kill()
        engine.kill()
        fresh_engine.kill()


def assert_log_probs_are_those_of_transformers(engine: Worker, folder: Path) -> None:
    requests = make_requests(PROMPTS, 2, 16, TEMPERATURE)
    answers = sample(engine, requests).unpack()
    engine_rows = [answer.log_probs for answer in answers]
    expected_rows = []
    for request, answer in zip(requests, answers):
        expected_rows.append(log_probs(folder, request.prompt_tokens, answer.tokens.tolist()))
    gap = mismatch(engine_rows, expected_rows, [np.ones(len(row), np.bool_) for row in engine_rows])
    assert gap.token_mult_prob_error <= 1.001
    assert gap.max_abs_diff < 1e-3


def assert_each_stop_token_ends_an_answer(engine: Worker) -> None:
    answers = sample(engine, make_requests(PROMPTS, 256, 32, 2.0)).unpack()
    assert {int(answer.tokens[-1]) for answer in answers if answer.finish == "stop"} == set(STOPS)
    assert not any(set(answer.tokens[:-1].tolist()) & set(STOPS) for answer in answers)
    assert all(len(answer.tokens) == 32 for answer in answers if answer.finish != "stop")


class FlippingSource(FolderSource):
    """Stand-in for a trainer rank: flips one bit of version 2 while sending it."""

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
    old = make_model(tmp_path / "old", seed=1)
    new = make_model(tmp_path / "new", seed=2)
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
        after_failure = sample(engine, greedy(PROMPTS, 8))
        assert np.array_equal(after_failure.tokens, before.tokens)
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
    old = make_model(tmp_path / "old", seed=1)
    new = make_model(tmp_path / "new", seed=2)
    engine = start_engine(old, ray_here, "fly-old")
    fresh_engine = start_engine(new, ray_here, "fly-new")
    source = WorkerGroup([WorkerSpec("source", MakeSource(new, FolderSource))], DEADLINE)
    requests = make_requests(PROMPTS * 4, 2, 160, 1.0)
    try:
        for worker in (source, engine, fresh_engine):
            worker.built().wait(DEADLINE)
        refit = Refit(source, refit_options("shm", shm, in_flight=True))
        end = EngineEnd(engine, 1)
        refit.open([end])
        engine.start(Engine.submit, requests).wait(DEADLINE)
        refit.run([end], version=1)
        report = refit.run([end], version=2)
        assert report.stall >= 0
        answers = collect_all(engine, requests)
        assert any(len(set(answer.versions.tolist())) > 1 for answer in answers)
        assert all((np.diff(answer.versions) >= 0).all() for answer in answers)
        after = sample(engine, greedy(PROMPTS, 16))
        fresh = sample(fresh_engine, greedy(PROMPTS, 16))
        assert np.array_equal(after.tokens, fresh.tokens)
        assert np.array_equal(after.log_probs, fresh.log_probs)
        engine.start(Engine.submit, requests).wait(DEADLINE)
        engine.start(Engine.abort, [request.id for request in requests]).wait(DEADLINE)
        after_abort = sample(engine, greedy(PROMPTS, 16))
        assert np.array_equal(after_abort.tokens, fresh.tokens)
    finally:
        source.kill()
        engine.kill()
        fresh_engine.kill()
