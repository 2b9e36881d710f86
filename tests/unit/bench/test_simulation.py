"""Simulated runs keep the promises of real runs, and take the time of plain arithmetic where there is one."""

import random
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import pytest

from rlctl.bench.simulation import Costs, Setup, SimulatedMachine, SimulatedRow, SimulatedRun, simulate
from rlctl.config.schema import GrpoConfig
from rlctl.data.tasks import Task
from rlctl.generation.engine import GATHER_S
from rlctl.generation.requests import RequestId, TurnRequest
from rlctl.generation.simulated_engine import DecodeCost, SimulatedEngine
from rlctl.generation.spec import ForcedLengths
from rlctl.preflight.load import load
from rlctl.rollout.types import RolloutStart, Sampling

CPU, PROMPT = SimulatedMachine("cpu"), 5
COSTS = Costs(4000.0, DecodeCost(0.01, 0.0005), update=0.05, refit=0.04, pause=0.01, change=0.1, driver=0.02)
COLOCATED = Setup(1, 1, colocated=True)


@lru_cache
def tiny() -> GrpoConfig:
    config = load("grpo", None, []).config
    assert isinstance(config, GrpoConfig)
    return config


def work(
    prompts: int = 4, rollouts: int = 4, mean: float = 20.0, sigma: float = 0.8, seed: int = 0, at_a_time: int = 256
) -> GrpoConfig:
    config = tiny()
    sizes = {"num_prompts_per_step": prompts, "num_generations_per_prompt": rollouts}
    generation = replace(config.generation, max_new_tokens=48, max_num_seqs=at_a_time, forced_lengths=[mean, sigma])
    # Parts of so few tokens are worth a call that steps are streamed.
    trainer = replace(config.trainer, micro_batch_tokens=64)
    run = replace(config.run, seed=seed)
    return replace(config, grpo=replace(config.grpo, **sizes), generation=generation, trainer=trainer, run=run)


def row(config: GrpoConfig, setup: Setup, costs: Costs = COSTS, steps: int = 8) -> SimulatedRow:
    return simulate(config, setup, costs, CPU, PROMPT, steps)


@pytest.mark.parametrize("seed", range(12))
def test_every_group_trains_once_and_none_is_older_than_the_bound(seed: int) -> None:
    draw = random.Random(seed)
    bound = draw.choice([0, 1, 2, 4])
    setup = Setup(draw.randint(1, 2), draw.randint(1, 3), not bound and draw.random() < 0.5, bound, "full")
    config = work(draw.randint(1, 5), draw.randint(2, 4), seed=seed, at_a_time=draw.choice([3, 256]))
    policy, drains = draw.choice(["windowed_fifo", "in_order", "ready_first"]), draw.random() < 0.3
    rules = replace(
        config.async_,
        policy=policy,
        in_flight_weight_updates=not drains,
        on_bound=draw.choice(["wait", "requeue"]),
    )
    costs = replace(COSTS, reward=draw.choice([0.0, 0.3]))
    run = SimulatedRun(replace(config, async_=rules), setup, costs, CPU, PROMPT, 6)
    trained = []
    for version in range(6):
        for group in run.step().groups:
            trained.append(group.rollouts[0].id.group)
            assert len(group.rollouts) == config.grpo.num_generations_per_prompt
            for one in group.rollouts:
                versions = one.sampled_versions.tolist()
                assert versions == sorted(versions)
                assert 0 <= version - versions[0] <= bound and versions[-1] <= version
                assert not drains or versions[0] == versions[-1]
    assert sorted(trained) == list(range(6 * config.grpo.num_prompts_per_step))


def lengths(config: GrpoConfig, steps: range) -> list[list[int]]:
    """Lengths of the answers of each step's groups."""
    rules, forced = config.grpo, ForcedLengths(*(config.generation.forced_lengths or ()))
    sizes = (rules.num_prompts_per_step, rules.num_generations_per_prompt, 48, 1.0)
    sampling, task = Sampling("train", config.run.seed, *sizes), Task("r", [], "", None)
    groups = [range(sizes[0] * step, sizes[0] * (step + 1)) for step in steps]
    return [
        [forced.draw(start.seed, 48) for number in numbers for start in sampling.starts(task, number)]
        for numbers in groups
    ]


def test_a_colocated_step_takes_the_sum_of_its_parts() -> None:
    config, costs = work(), COSTS
    (found,) = lengths(config, range(1, 2))
    generation = costs.decode.base * max(found) + costs.decode.per_sequence * sum(found)
    tokens = sum(found) + PROMPT * len(found)
    training = costs.update + tokens / costs.training
    expected = generation + training + costs.refit + costs.change + costs.driver
    one = row(config, COLOCATED, steps=1)
    assert one.step == pytest.approx(expected)
    assert one.effective == pytest.approx(tokens / expected)
    assert one.generation == pytest.approx(sum(found) / generation)
    # Time of the change of places and of the refit counts as the trainer's work, as in a run.
    assert one.trainer_idle == pytest.approx((generation + costs.driver) / expected)
    late = row(config, COLOCATED, replace(costs, reward=0.5), steps=1)
    assert late.step == pytest.approx(expected + 0.5)


def test_an_engine_samples_as_one_that_makes_step_after_step() -> None:
    draw, now = random.Random(1), [0.0]
    cost, forced = DecodeCost(0.01, 0.003), ForcedLengths(20.0, 1.0)
    engine = SimulatedEngine(cost, 4, forced, lambda: now[0])
    requests = [TurnRequest(RequestId(start.id), [], 48, 1.0, start.seed) for start in starts(12)]
    arrivals = {0.0: requests[:2], 0.055: requests[2:9], 3.0: requests[9:]}
    # Step after step: (tokens to go, name) of running and waiting requests.
    running, waiting, clock, expected = list[list[int]](), list[list[int]](), 0.0, dict[str, float]()
    todo, number = dict(arrivals), 0
    while todo or running or waiting:
        for moment in [moment for moment in todo if moment <= clock]:
            for request in todo.pop(moment):
                waiting.append([forced.draw(request.seed, 48), number])
                number += 1
        while waiting and len(running) < 4:
            running.append(waiting.pop(0))
        clock = clock + cost.step(len(running)) if running else min(todo)
        for each in running:
            each[0] -= 1
        expected |= {str(requests[name].id): clock for left, name in running if not left}
        running = [each for each in running if each[0]]
    found = dict[str, float]()
    moments = sorted({*arrivals, *(draw.uniform(0, 4) for _ in range(40))})
    while moments or engine.next_event() is not None:
        event = engine.next_event()
        now[0] = min([moment for moment in (event, *moments[:1]) if moment is not None])
        moments = [moment for moment in moments if moment > now[0]]
        engine.submit(arrivals.pop(now[0], []))
        found |= {str(each): now[0] for each in engine.leaving().ids}
    assert found.keys() == expected.keys()
    assert all(-1e-6 <= found[name] - expected[name] <= GATHER_S + 1e-6 for name in expected)


def starts(count: int) -> list[RolloutStart]:
    return Sampling("train", 0, 1, count, 48, 1.0).starts(Task("r", [], "", None), 0)


def balanced(ratio: float) -> tuple[GrpoConfig, Costs]:
    """Work with a trainer's step of `ratio` times an engine's time, and answers of one length."""
    config = work(prompts=6, mean=40.0, sigma=0.01)
    # A step has as many sequence-tokens as it trains answer tokens: its cost is in those alone.
    engine = DecodeCost(0.0, 0.001)
    return config, Costs((40 + PROMPT) / (40 * 0.001 * ratio), engine)


def test_two_sides_that_need_the_same_are_both_always_at_work() -> None:
    config, costs = balanced(1.0)
    found = row(config, Setup(1, 1, bound=3, prefetch="full"), costs, steps=16)
    assert found.trainer_idle < 0.02 and found.generator_idle < 0.02
    ceiling = found.trained / (found.trained / costs.training + found.generated * 0.001)
    assert found.effective == pytest.approx(ceiling, rel=0.02)


def test_one_device_for_each_side_caps_what_two_devices_reach() -> None:
    config, costs = balanced(0.5)
    found = row(config, Setup(1, 1, bound=3, prefetch="full"), costs, steps=16)
    ceiling = found.trained / (found.trained / costs.training + found.generated * 0.001)
    assert found.effective / ceiling == pytest.approx(0.75, abs=0.02)
    assert found.trainer_idle == pytest.approx(0.5, abs=0.03) and found.generator_idle < 0.02
    # Two engines for a trainer: nobody waits.
    found = row(config, Setup(1, 2, bound=3, prefetch="full"), costs, steps=16)
    assert found.effective == pytest.approx(ceiling, rel=0.03)


def test_a_larger_bound_and_faster_parts_are_never_slower() -> None:
    config = work(prompts=4, sigma=1.2)
    steps = [row(config, Setup(1, 1, bound=bound, prefetch="full")).step for bound in range(5)]
    assert all(more <= 1.02 * less for less, more in pairwise(steps))
    assert steps[4] < 0.8 * steps[0]
    setup = Setup(1, 1, bound=2)
    usual = row(config, setup, steps=24).step
    faster = [replace(COSTS, training=8000.0), replace(COSTS, decode=DecodeCost(0.005, 0.0005))]
    assert all(row(config, setup, costs, 24).step <= 1.01 * usual for costs in faster)
    assert row(config, Setup(1, 2, bound=2), steps=24).step <= 1.01 * usual


def test_a_step_is_never_shorter_than_its_share_of_the_longest_answer() -> None:
    config, costs = work(prompts=2, rollouts=8, sigma=1.5), replace(COSTS, training=1e9, update=0.0)
    for bound in (1, 2, 4):
        found = row(config, Setup(1, 1, bound=bound, prefetch="full"), costs, steps=24)
        # Most steps have an answer at the cap.
        assert found.step >= 0.9 * 48 * costs.decode.base / (bound + 1)


def test_a_simulation_is_a_function_of_the_seed() -> None:
    setup = Setup(1, 2, bound=2)
    assert row(work(seed=3), setup) == row(work(seed=3), setup) != row(work(seed=4), setup)
