"""Prefix caches: a hit changes no bit on a CPU, and no turn reads keys of other weights unless configured."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rlctl.generation.engine import Engine
from rlctl.generation.requests import Completion, RequestId, RolloutId, TurnRequest, turn_seed
from rlctl.generation.vllm.kind import environment, make_vllm_engine
from rlctl.refit.refit import EngineEnd, Refit
from rlctl.workers.group import Worker, WorkerGroup, WorkerSpec
from tests.system.engines import FolderSource, MakeSource, collect_all, refit_options, sample, spec_for
from tests.tiny_models import make_model

DEADLINE = 600.0
BLOCK = 32


def engine_on(folder: Path, logs: Path, name: str, *, cache: bool = True, reset: bool = True) -> Worker:
    spec = replace(spec_for(folder, 256), prefix_caching=cache, reset_prefix_cache=reset)
    return Worker(
        WorkerSpec(name, partial(make_vllm_engine, spec), environment("cpu", []), str(logs / f"{name}.log"), 4)
    )


def request(number: int, turn: int, prompt: list[int], longest: int = 24) -> TurnRequest:
    rollout = RolloutId("train", f"t{number}", number, 0)
    return TurnRequest(RequestId(rollout, turn), prompt, longest, float(number % 4 > 0), turn_seed(number, turn))


def same(one: list[Completion], other: list[Completion]) -> bool:
    return all(
        np.array_equal(a.tokens, b.tokens) and np.array_equal(a.log_probs, b.log_probs)
        for a, b in zip(one, other, strict=True)
    )


def cached(engine: Worker) -> tuple[int, int]:
    """Prompt tokens found in the engine's cache so far, and all prompt tokens."""
    (told,) = engine.start(Engine.collect, 0.0).wait(DEADLINE)
    return told.stats.cached_tokens, told.stats.prompt_tokens


@pytest.mark.long  # a fact about vLLM, to be looked at when its version changes
def test_a_prefix_hit_changes_no_bit(ray_here: Path, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", max_length=256, seed=1)
    with_cache, without = (engine_on(folder, ray_here, f"cache-{on}", cache=on) for on in (True, False))
    random = np.random.default_rng(0)
    # Half of the prompts end at the edge of a block, or one token away.
    edges = [BLOCK * random.integers(1, 3) + random.integers(-1, 2) for _ in range(24)]
    lengths = [*edges, *random.integers(1, 90, 24)]
    prompts = [random.integers(3, 64, length).tolist() for length in lengths]
    try:
        for engine in (with_cache, without):
            engine.built().wait(DEADLINE)
        for turn in range(4):
            wanted = [request(number, turn, prompt) for number, prompt in enumerate(prompts)]
            plain = sample(without, wanted).unpack()
            shuffled = random.permutation(len(wanted)).tolist()
            found = sample(with_cache, [wanted[place] for place in shuffled]).unpack()
            assert same([plain[place] for place in shuffled], found)
            said = [random.integers(3, 64, random.integers(1, 16)).tolist() for _ in prompts]
            prompts = [p + one.tokens.tolist() + more for p, one, more in zip(prompts, plain, said, strict=True)]
        hits, whole = cached(with_cache)
        assert hits > 0.6 * whole and cached(without) == (0, 0)
    finally:
        with_cache.kill()
        without.kill()


def test_a_turn_after_a_refit_reads_no_keys_of_older_weights_unless_configured(ray_here: Path, tmp_path: Path) -> None:
    old, new = (make_model(tmp_path / name, max_length=256, seed=seed) for name, seed in (("old", 1), ("new", 2)))
    resets, keeps = engine_on(old, ray_here, "resets"), engine_on(new, ray_here, "keeps", reset=False)
    sources = {
        folder: WorkerGroup([WorkerSpec("source", MakeSource(folder, FolderSource))], DEADLINE) for folder in (old, new)
    }
    random = np.random.default_rng(0)
    asked = [
        request(number, 1, random.integers(3, 64, length).tolist()) for number, length in enumerate((150, 97, 64, 33))
    ]

    def ask(engine: Worker) -> list[Completion]:
        return sample(engine, asked).unpack()

    def refit(engine: Worker, folder: Path, version: int) -> None:
        one = Refit(sources[folder], refit_options("shm", tmp_path / f"{folder.name}{version}", in_flight=True))
        one.open([EngineEnd(engine, 1)])
        one.run([EngineEnd(engine, 1)], version)

    try:
        for each in (*sources.values(), resets, keeps):
            each.built().wait(DEADLINE)
        by_new, by_old = ask(keeps), ask(resets)
        assert not same(by_new, by_old)
        # Within a version every computed prefix is found.
        assert same(ask(resets), by_old) and cached(resets)[0] > 0.4 * cached(resets)[1]
        # The turn before is being sampled while the weights change.
        first = request(9, 0, random.integers(3, 64, 100).tolist(), 120)
        resets.start(Engine.submit, [first]).wait(DEADLINE)
        refit(resets, new, 1)
        resets.start(Engine.submit, asked).wait(DEADLINE)
        said, *found = collect_all(resets, [first, *asked])
        assert same(found, by_new)
        follows = [request(9, 1, first.prompt_tokens + said.tokens.tolist() + [5, 6])]
        assert same(sample(resets, follows).unpack(), sample(keeps, follows).unpack())
        refit(keeps, old, 1)
        assert not same(ask(keeps), by_old)
    finally:
        for worker in (resets, keeps, *sources.values()):
            worker.kill()
