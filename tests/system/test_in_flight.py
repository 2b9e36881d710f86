"""Weights that change while rollouts run: the version and the log-prob of each token are known exactly."""

import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlctl.generation.engine import Engine
from rlctl.generation.requests import Completion, RequestId, TurnRequest
from rlctl.generation.vllm.engine import VllmEngine
from rlctl.generation.vllm.kind import environment, make_vllm_engine
from rlctl.models.hf_folder import WeightFiles
from rlctl.refit.refit import EngineEnd, Refit
from rlctl.workers.group import Worker, WorkerGroup, WorkerSpec
from tests.system.drifting import DriftingSource, drift_weights
from tests.system.engines import MakeSource, refit_options, spec_for
from tests.tiny_models import make_model
from tests.turns import turns

DEADLINE = 600.0
GROUPS = 125
SAMPLES = 8
LENGTH = 40
UPDATES = 20


class Models:
    """A transformers model that can load the weights of any version."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        files = WeightFiles(folder)
        self._first = {name: files.tensor(name).clone() for name in files.names()}
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._version = -1

    def load(self, version: int) -> Any:
        """Return the model with the weights of a version."""
        if version != self._version:
            self._model.load_state_dict(drift_weights(self._first, version), strict=False)
            self._version = version
        return self._model


@torch.no_grad()
def with_kept_keys(models: Models, prompt: list[int], rollout: Completion) -> np.ndarray:
    """Return the log-probs if keys and values are kept: each position has those of the version that computed it."""
    from transformers import DynamicCache

    tokens = prompt + rollout.tokens.tolist()
    cache = DynamicCache()
    parts = []
    start = 0
    for begin, end, version in spans(rollout):
        stop = len(prompt) + end - 1
        model = models.load(version)
        logits = model(torch.tensor([tokens[start:stop]]), past_key_values=cache, use_cache=True).logits[0]
        parts.append(torch.log_softmax(logits[-(end - begin) :], -1))
        start = stop
    rows = torch.cat(parts)
    return rows[torch.arange(len(rows)), torch.tensor(rollout.tokens.tolist())].numpy()


@torch.no_grad()
def with_new_keys(models: Models, prompt: list[int], rollout: Completion) -> np.ndarray:
    """Return the log-probs if every change of weights recomputes all keys and values."""
    tokens = torch.tensor([prompt + rollout.tokens.tolist()])
    parts = []
    for begin, end, version in spans(rollout):
        logits = models.load(version)(tokens).logits[0]
        parts.append(torch.log_softmax(logits[len(prompt) + begin - 1 : len(prompt) + end - 1], -1))
    rows = torch.cat(parts)
    return rows[torch.arange(len(rows)), torch.tensor(rollout.tokens.tolist())].numpy()


def spans(rollout: Completion) -> list[tuple[int, int, int]]:
    edges = [0, *(np.flatnonzero(np.diff(rollout.versions)) + 1).tolist(), len(rollout.versions)]
    return [(begin, end, int(rollout.versions[begin])) for begin, end in pairwise(edges)]


def sample_across_updates(engine: Worker, refit: Refit, requests: list[TurnRequest]) -> dict[RequestId, Completion]:
    """Sample all requests, a few submitted at a time, while the weights change UPDATES times."""
    done = dict[RequestId, Completion]()
    waiting = list(requests)
    version = 0
    began = time.monotonic()
    while len(done) < len(requests) or version < UPDATES:
        room = 24 * SAMPLES - (len(requests) - len(waiting) - len(done))
        if share := waiting[:room]:
            engine.start(Engine.submit, share).wait(DEADLINE)
            waiting = waiting[room:]
        finished = engine.start(Engine.collect, 0.02).wait(DEADLINE)[0]
        done |= zip(finished.ids, finished.columns.unpack(), strict=True)
        # As the work goes on, so do the updates: none is left for the end, when nothing runs.
        if version < UPDATES and len(done) >= (version + 0.2) * len(requests) / (UPDATES + 1):
            version += 1
            refit.run([EngineEnd(engine, 1)], version)
        assert time.monotonic() - began < DEADLINE
    return done


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.long)])
def test_tags_and_log_probs_of_a_thousand_rollouts_across_twenty_updates(
    recompute: bool, ray_here: Path, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "m", "qwen3", seed=1, max_length=128)
    groups = GROUPS if not recompute else GROUPS // 5
    spec = replace(spec_for(folder, 128), recompute_kv_cache=recompute)
    make = partial(make_vllm_engine, spec, "tests.system.engine_workers.CountingWorker")
    engine = Worker(WorkerSpec("engine", make, environment("cpu", []), str(ray_here / "e.log"), 4))
    source = WorkerGroup([WorkerSpec("source", MakeSource(folder, DriftingSource))], DEADLINE)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 64, size=int(random.integers(2, 40))).tolist() for _ in range(groups)]
    requests = []
    for group, prompt in enumerate(prompts):
        requests += turns(group, SAMPLES, prompt, LENGTH, 7 * group)
    try:
        source.built().wait(DEADLINE)
        engine.built().wait(DEADLINE)
        refit = Refit(source, refit_options("shm", tmp_path / "shm", in_flight=True))
        refit.open([EngineEnd(engine, 1)])
        refit.run([EngineEnd(engine, 1)], 0)
        done = sample_across_updates(engine, refit, requests)
        counts = engine.start(VllmEngine.rpc, "rl_counts").wait(DEADLINE)[0][0][1:]
    finally:
        source.kill()
        engine.kill()
    check_tags(done, counts)
    check_log_probs(Models(folder), done, prompts, recompute)


def check_tags(done: dict[RequestId, Completion], counts: list[dict[str, int]]) -> None:
    """Compare each rollout's versions with vLLM's own count at each of the twenty commits."""
    assert len(counts) == UPDATES
    rollouts = {str(name): rollout for name, rollout in done.items()}
    compared = 0
    for version, running in enumerate(counts, 1):
        for name, sampled in running.items():
            assert int((rollouts[name].versions < version).sum()) == sampled
            compared += 0 < sampled < len(rollouts[name].tokens)
    assert compared > len(rollouts) / 8, "too few rollouts were running when weights changed to prove anything"


def check_log_probs(
    models: Models, done: dict[RequestId, Completion], prompts: list[list[int]], recompute: bool
) -> None:
    mixed = [(prompts[name.rollout.group], rollout) for name, rollout in done.items() if len(spans(rollout)) > 1]
    expected = with_new_keys if recompute else with_kept_keys
    for prompt, rollout in mixed[:60]:
        assert np.abs(expected(models, prompt, rollout) - rollout.log_probs).max() < 1e-5
    assert len(mixed) > 60
