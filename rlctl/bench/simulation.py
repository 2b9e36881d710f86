"""Simulation of GRPO runs on a virtual clock: the run's own buffer, staleness rule, prefetch and dispatcher decide.

The engines (`generation/simulated_engine.py`), the trainer and the refit only let time pass. Trainer ranks share tokens
evenly, and engines do not slow each other down. A row's first steps are not counted, nor are the last ones of an
asynchronous run, as in `rlctl bench grpo`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal, cast

from rlctl.config.schema import GrpoConfig
from rlctl.data.cursor import Cursor, TaskSource
from rlctl.data.tasks import Task
from rlctl.generation.pool import GeneratorPool
from rlctl.generation.simulated_engine import DecodeCost, SimulatedEngine, SimulatedPool, SimulatedWorker
from rlctl.generation.spec import ForcedLengths
from rlctl.grpo.metrics import TRAINER_PHASES, EngineInterval, age_metrics, generator_metrics
from rlctl.models.facts import ModelSizes
from rlctl.preflight.machine import Device, RunMachine
from rlctl.preflight.settled import settle
from rlctl.rollout.buffer import RolloutBuffer
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.players.single_turn import SingleTurnPlayer
from rlctl.rollout.runner import Ended, RolloutRunner
from rlctl.rollout.types import Rollout, RolloutGroup, RolloutStart
from rlctl.telemetry import throughput
from rlctl.telemetry.clock import StepClock
from rlctl.training.trainer_group import worthwhile_tokens
from rlctl.utils.virtual_events import VirtualEvents


@dataclass(frozen=True)
class Costs:
    """Times of a run's parts on one device. Seconds but for `training`."""

    # Tokens/s/device of an update.
    training: float
    # A step of an engine.
    decode: DecodeCost
    # More of an update, however many tokens it has.
    update: float = 0.0
    # A refit, in which the trainer does nothing else; and the part in which engines sample nothing.
    refit: float = 0.0
    pause: float = 0.0
    # Seconds of trainer and engines together to change places on one device, each step.
    change: float = 0.0
    # From an answer to its reward.
    reward: float = 0.0
    # The driver's own of each step.
    driver: float = 0.0


@dataclass(frozen=True)
class Setup:
    """Division of the devices, and the bound and the lookahead of a run on them."""

    trainers: int
    engines: int
    # They share the devices and take turns.
    colocated: bool = False
    # async.max_trajectory_age_steps; 0: synchronous.
    bound: int = 0
    # async.prefetch.
    prefetch: Literal["auto", "full"] = "auto"

    @property
    def devices(self) -> int:
        return max(self.trainers, self.engines) if self.colocated else self.trainers + self.engines

    @property
    def overrides(self) -> list[str]:
        """Settings of a run that is set up so."""
        split = [f"trainer.num_ranks={self.trainers}", f"generation.num_engines={self.engines}"]
        if self.bound:
            bound = [f"async.max_trajectory_age_steps={self.bound}", f"async.prefetch={self.prefetch}"]
            return [*split, "async.enabled=true", *bound]
        return [*split, f"placement.colocated={str(self.colocated).lower()}"]

    def apply(self, config: GrpoConfig, steps: int) -> GrpoConfig:
        """Return the config of such a run with this number of steps."""
        bound, enabled = max(1, self.bound), self.bound > 0
        return replace(
            config,
            grpo=replace(config.grpo, num_steps=steps),
            trainer=replace(config.trainer, num_ranks=self.trainers),
            generation=replace(config.generation, num_engines=self.engines),
            placement=replace(config.placement, colocated=self.colocated),
            async_=replace(config.async_, enabled=enabled, max_trajectory_age_steps=bound, prefetch=self.prefetch),
        )


@dataclass(frozen=True)
class SimulatedMachine:
    """Devices that are simulated, as far as `settle` looks at them."""

    device: Device
    # Sizes of the model; None: not known.
    sizes: ModelSizes | None = None
    # Bytes of a device; None: not known.
    memory: int | None = None


@dataclass(frozen=True)
class SimulatedRow:
    """One setup, means over its counted steps. Rates in tokens/s/device, times in seconds, shares 0 to 1."""

    setup: Setup
    step: float
    effective: float
    # Generated tokens over the time in which engines sampled.
    generation: float
    trainer_idle: float
    generator_idle: float
    # Mean age of the groups that were trained, in steps.
    age: float
    # Sequences that an engine decoded at a time.
    sequences: float
    # Tokens of a step: trained ones, and the generated part.
    trained: float
    generated: float


@dataclass
class SimulatedStep:
    """A step that was made."""

    # Groups in the order in which they were trained.
    groups: list[RolloutGroup] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def trained(self) -> int:
        """Tokens, prompts included."""
        return sum(one.num_tokens for group in self.groups for one in group.rollouts)


def simulate(
    config: GrpoConfig, setup: Setup, costs: Costs, machine: SimulatedMachine, prompt: int, steps: int
) -> SimulatedRow:
    """Return the figures of `steps` counted steps of a run.

    config: with `generation.forced_lengths`. prompt: tokens of each prompt.
    """
    first, last = (2 + setup.bound, setup.bound) if setup.bound else (1, 0)
    with closing(SimulatedRun(config, setup, costs, machine, prompt, first + steps + last)) as run:
        counted = [run.step() for _ in range(first + steps)][first:]
    wall = sum(step.times["time/step"] for step in counted)

    def mean(name: str) -> float:
        return sum(step.metrics.get(name, 0.0) * step.times["time/step"] for step in counted) / wall

    trained = sum(step.trained for step in counted)
    prompts = prompt * sum(len(group.rollouts) for step in counted for group in step.groups)
    return SimulatedRow(
        setup=setup,
        step=wall / steps,
        effective=trained / wall / setup.devices,
        generation=mean("throughput/generation"),
        trainer_idle=sum(
            throughput.idle_share(step.times, TRAINER_PHASES) * step.times["time/step"] for step in counted
        )
        / wall,
        generator_idle=mean("idle/generator"),
        age=fmean(step.metrics["age/mean"] for step in counted),
        sequences=mean("generator/sequences"),
        trained=trained / steps,
        generated=(trained - prompts) / steps,
    )


class SimulatedRun:
    """A run of the loop in `grpo/loop.py`, on a virtual clock."""

    def __init__(
        self, config: GrpoConfig, setup: Setup, costs: Costs, machine: SimulatedMachine, prompt: int, steps: int
    ) -> None:
        settled = settle(setup.apply(config, steps), RunMachine(machine.device, machine.memory), machine.sizes)
        own, given = settled.config, settled.config.generation.forced_lengths
        assert given
        self._settled, self.config, self._setup, self._costs = settled, own, setup, costs
        self._streams = settled.streams_training
        self._drains = own.async_.enabled and not own.async_.in_flight_weight_updates
        self.version = 0
        self._events = VirtualEvents()
        lengths, most = ForcedLengths(*given), settled.generation.max_num_seqs
        self._engines = [
            SimulatedEngine(costs.decode, most, lengths, self._events.now) for _ in range(own.generation.num_engines)
        ]
        workers = [SimulatedWorker(f"engine-{index}", engine) for index, engine in enumerate(self._engines)]
        self._pool = SimulatedPool(workers, most)
        self._dispatcher = RolloutDispatcher(cast(GeneratorPool, self._pool), own.run, _nothing, self._events)
        rows = [Task(f"r{index}", [0] * prompt, "", None) for index in range(64 * own.grpo.num_prompts_per_step)]
        self._buffer = RolloutBuffer(
            own,
            TaskSource(rows, Cursor(len(rows), own.run.seed, own.data.shuffle)),
            self._dispatcher,
            _LateRunner(self._dispatcher, costs.reward),
            list,
            _nothing,
        )

    def step(self) -> SimulatedStep:
        """Make a step as `GrpoLoop.step` does."""
        self._stats, self._times, step = self._dispatcher.stats(), StepClock(self._events.now), SimulatedStep()
        self._events.let_pass(self._costs.driver)
        self._buffer.admit(self.version)
        worthwhile = worthwhile_tokens(self._settled.trainer)
        while self._streams and (part := self._buffer.take_part(self.version, worthwhile, self._waiting)):
            self._train(part, step)
        self._train(self._buffer.take(self.version, self._waiting), step)
        with self._times.phase("train"):
            self._events.let_pass(self._costs.update)
        if self._drains:
            self._buffer.drain(self._waiting)
        with self._times.phase("refit"):
            self._events.let_pass(self._costs.refit - self._costs.pause + self._costs.change * self._setup.colocated)
            self._pool.sync(self.version + 1, self._costs.pause)
            self._events.let_pass(self._costs.pause)
            self._buffer.advance(self.version + 1)
        self._record(step)
        self.version += 1
        return step

    def close(self) -> None:
        """End the rollouts that no step will train."""
        self._events.close()

    def _train(self, groups: list[RolloutGroup], step: SimulatedStep) -> None:
        tokens = sum(one.num_tokens for group in groups for one in group.rollouts)
        with self._times.phase("train"):
            self._events.let_pass(tokens / (self._costs.training * self._setup.trainers))
        step.groups += groups

    def _record(self, step: SimulatedStep) -> None:
        step.times = self._times.finish()
        interval = EngineInterval(self._stats, self._dispatcher.stats(), self._setup.engines)
        bound = self.config.async_.max_age
        step.metrics = generator_metrics(interval) | age_metrics(step.groups, self.version, {}, bound)

    def _waiting(self, why: str) -> AbstractContextManager[None]:
        return self._times.phase(f"idle_{why}")


class _LateRunner(RolloutRunner):
    """Runner of rollouts with a reward, so that the buffer's scoring takes no time."""

    def __init__(self, dispatcher: RolloutDispatcher, reward: float) -> None:
        super().__init__(SingleTurnPlayer(), dispatcher)
        self._reward = reward

    def begin(self, starts: Sequence[RolloutStart], ended: Ended, *, ahead: bool = False) -> None:
        def late(rollout: Rollout) -> None:
            self.events.loop.call_later(self._reward, ended, rollout)

        super().begin(starts, late, ahead=ahead)


def _nothing(kind: str, **fields: Any) -> None:
    pass
