"""Prefix caches: on a CPU a hit changes no bit, and no turn reads keys of older weights unless this is configured."""

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


def start_engine(folder: Path, logs: Path, name: str, *, cache: bool = True, reset: bool = True) -> Worker:
    spec = replace(spec_for(folder, 256), prefix_caching=cache, reset_prefix_cache=reset)
    make_engine = partial(make_vllm_engine, spec)
    log = str(logs / f"{name}.log")
    return Worker(WorkerSpec(name, make_engine, environment("cpu", []), log=log, threads=4))


def make_request(number: int, turn: int, prompt: list[int], max_tokens: int = 24) -> TurnRequest:
    """Return a request of rollout `number`. Requests of every fourth rollout are greedy."""
    rollout = RolloutId("train", f"t{number}", number, 0)
    return TurnRequest(
        id=RequestId(rollout, turn),
        prompt_tokens=prompt,
        max_new_tokens=max_tokens,
        temperature=0.0 if number % 4 == 0 else 1.0,
        seed=turn_seed(number, turn),
    )


def are_equal(answers: list[Completion], expected_answers: list[Completion]) -> bool:
    """Return True if tokens and log-probs are the same to the last bit."""
    for answer, expected in zip(answers, expected_answers, strict=True):
        if not np.array_equal(answer.tokens, expected.tokens):
            return False
        if not np.array_equal(answer.log_probs, expected.log_probs):
            return False
    return True


def count_cached(engine: Worker) -> tuple[int, int]:
    """Return how many prompt tokens the engine has found in its cache so far, and how many it got in total."""
    (finished,) = engine.start(Engine.collect, 0.0).wait(DEADLINE)
    return finished.stats.cached_tokens, finished.stats.prompt_tokens


@pytest.mark.long  # a fact about vLLM, to be looked at when its version changes
def test_a_prefix_hit_changes_no_bit(ray_here: Path, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", max_length=256, seed=1)
    with_cache = start_engine(folder, ray_here, "cache-True", cache=True)
    without_cache = start_engine(folder, ray_here, "cache-False", cache=False)
    random = np.random.default_rng(0)
    # Half of the prompts end at the edge of a block, or one token away.
    edges = [BLOCK * random.integers(1, 3) + random.integers(-1, 2) for _ in range(24)]
    lengths = [*edges, *random.integers(1, 90, 24)]
    prompts = [random.integers(3, 64, length).tolist() for length in lengths]
    try:
        for engine in (with_cache, without_cache):
            engine.built().wait(DEADLINE)
        for turn in range(4):
            requests = [make_request(number, turn, prompt) for number, prompt in enumerate(prompts)]
            answers = sample(without_cache, requests).unpack()
            order = random.permutation(len(requests)).tolist()
            cached_answers = sample(with_cache, [requests[number] for number in order]).unpack()
            assert are_equal(cached_answers, [answers[number] for number in order])
            replies = [random.integers(3, 64, random.integers(1, 16)).tolist() for _ in prompts]
            turns = zip(prompts, answers, replies, strict=True)
            prompts = [prompt + answer.tokens.tolist() + reply for prompt, answer, reply in turns]
        cached_tokens, prompt_tokens = count_cached(with_cache)
        assert cached_tokens > 0.6 * prompt_tokens and count_cached(without_cache) == (0, 0)
    finally:
        with_cache.kill()
        without_cache.kill()


def test_a_turn_after_a_refit_reads_no_keys_of_older_weights_unless_configured(ray_here: Path, tmp_path: Path) -> None:
    old = make_model(tmp_path / "old", max_length=256, seed=1)
    new = make_model(tmp_path / "new", max_length=256, seed=2)
    resetting = start_engine(old, ray_here, "resets")
    keeping = start_engine(new, ray_here, "keeps", reset=False)
    old_source = WorkerGroup([WorkerSpec("source", MakeSource(old, FolderSource))], DEADLINE)
    new_source = WorkerGroup([WorkerSpec("source", MakeSource(new, FolderSource))], DEADLINE)
    random = np.random.default_rng(0)
    requests = []
    for number, length in enumerate((150, 97, 64, 33)):
        requests.append(make_request(number, 1, random.integers(3, 64, length).tolist()))

    def answer(engine: Worker) -> list[Completion]:
        return sample(engine, requests).unpack()

    def refit_engine(engine: Worker, source: WorkerGroup, folder: Path) -> None:
        refit = Refit(source, refit_options("shm", folder, in_flight=True))
        refit.open([EngineEnd(engine, 1)])
        refit.run([EngineEnd(engine, 1)], 1)

    try:
        for worker in (old_source, new_source, resetting, keeping):
            worker.built().wait(DEADLINE)
        by_new = answer(keeping)
        by_old = answer(resetting)
        assert not are_equal(by_new, by_old)
        # Within a version every computed prefix is found.
        assert are_equal(answer(resetting), by_old)
        cached_tokens, prompt_tokens = count_cached(resetting)
        assert cached_tokens > 0.4 * prompt_tokens
        # The turn before is being sampled while the weights change.
        first_turn = make_request(9, 0, random.integers(3, 64, 100).tolist(), 120)
        resetting.start(Engine.submit, [first_turn]).wait(DEADLINE)
        refit_engine(resetting, new_source, tmp_path / "new1")
        resetting.start(Engine.submit, requests).wait(DEADLINE)
        first_answer, *answers = collect_all(resetting, [first_turn, *requests])
        assert are_equal(answers, by_new)
        history = first_turn.prompt_tokens + first_answer.tokens.tolist() + [5, 6]
        second_turn = make_request(9, 1, history)
        assert are_equal(sample(resetting, [second_turn]).unpack(), sample(keeping, [second_turn]).unpack())
        refit_engine(keeping, old_source, tmp_path / "old1")
        assert not are_equal(answer(keeping), by_old)
    finally:
        for worker in (resetting, keeping, old_source, new_source):
            worker.kill()
