"""Shortened steps sample what vLLM's own steps sample, bit for bit, and treat its cache as they do."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from rlctl.generation import vllm_build
from rlctl.generation.engine import Engine, MakeEngine
from rlctl.generation.requests import Completion, RequestId, TurnRequest
from rlctl.generation.spec import environment
from rlctl.generation.step_outputs import StepOutputs
from rlctl.workers.group import Worker, WorkerSpec
from tests.system.engines import collect_all, spec_for
from tests.system.replayed_steps import WatchedEngine
from tests.tiny_models import make_model
from tests.turns import turn

DEADLINE = 600.0
ROLLOUTS = 48


@dataclass(frozen=True)
class MakeWatched(MakeEngine):
    """Builds an engine whose steps are shortened, or are vLLM's own."""

    shortened: bool

    def __call__(self) -> Engine:
        if not self.shortened:
            vllm_build.PrefixHashes = lambda core: None  # type: ignore[misc, assignment]
            vllm_build.shorten_steps = lambda scheduler, states: StepOutputs(scheduler, states) and None
        return WatchedEngine(self.spec)


@pytest.fixture(scope="module")
def engines(ray_here: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    """An engine with shortened steps and one without, whose caches hold a part of what they sample at a time."""
    folder = make_model(tmp_path_factory.mktemp("m"), max_length=256, seed=1)
    spec = replace(spec_for(folder, 256), stop_token_ids=(1, 5, 9), kv_cache_mib=2, max_num_seqs=32)
    made = [
        Worker(WorkerSpec(name, MakeWatched(spec, shortened), environment("cpu", []), str(ray_here / f"{name}.log"), 4))
        for name, shortened in (("shortened", True), ("plain", False))
    ]
    for engine in made:
        engine.built().wait(DEADLINE)
    yield made
    for engine in made:
        engine.kill()


def conversations(engine: Worker) -> list[Completion]:
    """Sample three turns of each rollout, of lengths that differ. Some are given up while they run."""
    random, answers = np.random.default_rng(0), list[Completion]()
    prompts = [random.integers(3, 64, random.integers(1, 60)).tolist() for _ in range(ROLLOUTS)]
    longest = random.integers(1, 60, (3, ROLLOUTS)).tolist()
    for number in range(3):
        asked: list[TurnRequest] = []
        for place, prompt in enumerate(prompts):
            one = turn(place, 0, prompt, longest[number][place], float(place % 4 > 0), 100 * number + place)
            asked.append(replace(one, id=RequestId(one.id.rollout, number)))
        kept = [each for place, each in enumerate(asked) if place % 8]
        engine.start(Engine.submit, asked).wait(DEADLINE)
        engine.start(Engine.abort, [each.id for each in asked[::8]]).wait(DEADLINE)
        found = dict(zip((each.id for each in kept), collect_all(engine, kept), strict=True))
        answers += found.values()
        for place, each in enumerate(asked):
            said = found[each.id].tokens.tolist() if each.id in found else []
            # Some histories are rewritten, in the middle or from the first token on.
            kept_from = {1: 1, 2: len(prompts[place]) // 2}.get(place % 12, 0)
            prompts[place] = prompts[place][kept_from:] + said + [3 + place]
    return answers


@pytest.mark.slow
def test_a_shortened_step_samples_what_vllms_own_samples(engines: list[Worker]) -> None:
    ours, plain = (conversations(engine) for engine in engines)
    assert {"stop", "length"} == {each.finish for each in ours}
    for one, other in zip(ours, plain, strict=True):
        assert (one.tokens.tolist(), one.finish) == (other.tokens.tolist(), other.finish)
        assert np.array_equal(one.log_probs, other.log_probs)
    (shortened,), (own,) = (engine.start(WatchedEngine.blocks).wait(DEADLINE) for engine in engines)
    assert shortened == own and own["found"] > 500


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_a_shortened_step_schedules_ends_and_caches_as_vllms_own(engines: list[Worker], ahead: bool) -> None:
    # No model runs: the schedulers that GPUs have are there on a CPU too.
    for seed in range(3):
        (ours,), (plain,) = (
            engines[0].start(WatchedEngine.replay, ahead, shortened, seed).wait(DEADLINE) for shortened in (True, False)
        )
        assert ours["preemptions"] == plain["preemptions"] > 0
        for number, (one, other) in enumerate(zip(ours["steps"], plain["steps"], strict=True)):
            assert one == other, f"step {number}"
