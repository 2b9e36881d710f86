"""`rlctl bench generation`: engines' tokens a second, in one turn and in several turns of the same total.

No trainer runs, so weights do not change. Engines, dispatcher, players and environment processes are a run's own; all
rows share the same engines. Prompts are new in every round, so that caches hold a rollout's own turns and its group's
prompt, and no more.
"""

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice
from itertools import count as numbers_from
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from rlctl.bench.frame import Bench, Cells, Line, Results, ResultTable, Say, until_interrupted
from rlctl.bench.runs import in_process
from rlctl.bench.slow_partner import ANSWER
from rlctl.bench.workload import (
    PROMPT_WORDS,
    grpo_run,
    longest,
    make_random_model,
    model_problems,
    random_words,
    shape_folder,
)
from rlctl.config.errors import Problem
from rlctl.dashboard.formats import count
from rlctl.data.tasks import Task
from rlctl.generation.requests import Completion, RolloutId, TurnRequest
from rlctl.models.model_sizes import read_sizes
from rlctl.preflight.machine import RunMachine, device_of
from rlctl.preflight.memory import refit_bytes, token_bytes
from rlctl.preflight.settled import SettledGrpo, settle
from rlctl.rollout.runner import Engines
from rlctl.rollout.types import Sampling
from rlctl.utils.devices import count_gpus
from rlctl.utils.event_loop import EventLoop

if TYPE_CHECKING:
    from rlctl.data.chat import Chat
    from rlctl.generation.engine import EngineStats
    from rlctl.rollout.dispatcher import RolloutDispatcher
    from rlctl.rollout.runner import RolloutRunner

# A word marks who speaks, one ends a turn: as short as a template can be.
_TEMPLATE = (
    "{% for m in messages %}{{ 'w4' if m.role == 'assistant' else 'w3' }} {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}w4 {% endif %}"
)
# Tokens between two turns: the message, the marks of both, the end of both, and one to spare.
_BETWEEN = len(ANSWER.split()) + 5
# Forced lengths are drawn, and cut at a turn's tokens: they are drawn from a range this much longer.
_FAR = 1000
# Tokens of a turn before anything is counted, for kernels that are compiled when they are first used.
_WARM_UP = 4
# Bytes of the copy that tells the device's bandwidth.
_COPIED = 1 << 30
_COPIED_CPU = 1 << 28
_COPIES = 10
_GENERATION_LEGEND = (
    "turns: how many, and the mean tokens of one; tok/s: sampled tokens a second and device, median of the rounds; x "
    "first: over the first row's; prefix: share of the prompts' tokens, of all turns, that caches held; at once: "
    "sequences in an engine's step; step: ms of one; floor: ms in which the device can read the weights and those "
    "sequences' keys and values, at the speed of a copy within its memory; idle: share of the time in which an engine "
    "made no step; driver: CPU time of this process over the time"
)


@dataclass(frozen=True)
class GenerationBench(Bench):
    """Rollouts of equally many sampled tokens, a row for each number of turns."""

    model: str
    prompts: int
    generations: int  # rollouts of a prompt
    tokens: int  # sampled in a rollout
    turns: tuple[int, ...]
    spread: float  # of the lengths of a rollout's turns, see `TurnLengths`
    pause: float  # seconds of the environment between two turns
    rounds: int
    extra: list[str]  # overrides of the GRPO config

    def check(self) -> list[Problem]:
        problems = model_problems(self.model)
        if problems:
            return problems
        for turns in self.turns:
            if self.tokens % turns:
                reason = f"{turns}: --tokens {self.tokens} does not divide into as many turns"
                problems.append(Problem("--turns", "", reason))
        limit = longest(self.model)
        if self._length > limit:
            lengths = f"{self._length} with prompt and answers, and the model's longest sequence is {limit}"
            problems.append(Problem("--tokens", "", f"{self.tokens}: {lengths}"))
        for override in self.extra:
            key = override.partition("=")[0]
            if not key.startswith(("generation.", "environment.", "run.", "placement.", "lora")):
                reason = f"{key}: keys of generation, environment, placement, lora and run are what can change"
                problems.append(Problem("--set", "", reason))
        return problems

    @property
    def _length(self) -> int:
        """Tokens of a whole rollout at its longest."""
        return PROMPT_WORDS + 3 + self.tokens + max(self.turns, default=1) * _BETWEEN

    def measure(self, folder: Path, say: Say) -> "GenerationResults":
        from rlctl.data.load_data import load_chat
        from rlctl.launch.engines import engines
        from rlctl.launch.sampling import make_runner
        from rlctl.models.model_files import ModelFiles
        from rlctl.preflight.placement import PlacementError
        from rlctl.rollout.episode_setup import environment_pool, set_up

        shape = shape_folder(self.model, folder)
        logs = folder / "logs"
        warnings = list[str]()
        # Mistakes are reported before weights are made, which takes minutes.
        written = self._write_config(shape, folder)
        say(f"random weights in the shape of {self.model}")
        make_random_model(shape, folder)
        config = written.config
        config = replace(config, model=replace(config.model, path=str(folder / "model"), random_init=False))
        settled = settle(config, RunMachine(device_of(count_gpus())), read_sizes(shape / "config.json"))
        files = ModelFiles.find(config.model, folder, 0)
        chat = load_chat(config, str(shape))
        prompts = _prompts(chat)

        def emit(kind: str, **facts: Any) -> None:
            if kind in ("warning", "error"):
                warnings.append(str(facts.get("what", facts)))

        logs.mkdir()
        say("the speed of a copy within the device's memory")
        speed = in_process(copy_speed, count_gpus() > 0)
        say("engines")
        try:
            # Environments before Ray, which has threads: their processes are forked.
            with environment_pool(config, logs, emit) as environments, ExitStack() as stack:
                setup = set_up(config, environments, chat, next(prompts))
                dispatcher = stack.enter_context(engines(settled, files, (), 0, logs, emit, environments.events))
                rows = []
                for turns in self.turns:
                    settled_row = _with_max_turns(settled, turns)
                    lengths = TurnLengths(dispatcher, turns, self.spread, self.tokens)
                    pool = environments if turns > 1 else None
                    runner = make_runner(settled_row, chat, lengths, pool, setup, trains=False)
                    rows.append(Played(lengths, runner))
                    stack.callback(runner.close)
                rounds, interrupted = until_interrupted(self._measure_rounds(dispatcher, rows, prompts, say))
        except PlacementError as error:
            raise RuntimeError(str(error)) from error
        generation = config.generation
        result_rows = []
        for played in rows:
            rounds_of_row = [played_round for played_round in rounds if played_round.played is played]
            if rounds_of_row:
                result_rows.append(_generation_row(played, rounds_of_row, speed, bench=self, settled=settled))
        return GenerationResults(
            model=self.model,
            tokens=self.tokens,
            spread=self.spread,
            devices=generation.num_engines * generation.tensor_parallel_size,
            speed=speed,
            rows=result_rows,
            warnings=warnings,
            interrupted=interrupted,
        )

    def _write_config(self, shape: Path, folder: Path) -> SettledGrpo:
        """Write data and a template; return the config of engines that serve all rows. Raises ConfigError."""
        (folder / "train.jsonl").write_text('{"prompt": "w3", "answer": ""}\n')
        (folder / "chat.jinja").write_text(_TEMPLATE)
        settings = (
            f"model.path={shape}",
            "model.random_init=true",
            f"data.train.path={folder / 'train.jsonl'}",
            "data.train.prompt_key=prompt",
            f"data.chat_template={folder / 'chat.jinja'}",
            "rewards=[]",
            f"grpo.num_prompts_per_step={self.prompts}",
            f"grpo.num_generations_per_prompt={self.generations}",
            f"generation.max_new_tokens={self.tokens // max(self.turns)}",
            # No turn ends before its tokens are sampled, for any end token of a user's model.
            f"generation.forced_lengths=[{_FAR * self.tokens},0.001]",
            "environment.name=rlctl.bench.slow_partner:SlowPartner",
            f"environment.args.seconds={self.pause}",
            f"environment.max_turns={max(self.turns)}",
            f"environment.max_length={self._length}",
        )
        return grpo_run(settings, self.extra)

    def _measure_rounds(
        self,
        dispatcher: "RolloutDispatcher",
        rows: "Sequence[Played]",
        prompts: Iterator[Task],
        say: Say,
    ) -> "Iterator[Round]":
        """Yield the rounds, all rows in each, so that a device getting slower slows all rows."""
        # The first rollouts trigger the compilation in the engines.
        say("warm-up")
        for played in rows:
            self._play_round(dispatcher, played, prompts, version=0, length=min(_WARM_UP, self.tokens // played.turns))
        for number in range(self.rounds):
            for played in rows:
                say(f"{count(played.turns, 'turn')}: round {number + 1} of {self.rounds}")
                length = self.tokens // played.turns
                yield self._play_round(dispatcher, played, prompts, version=1 + number, length=length)

    def _play_round(
        self,
        dispatcher: "RolloutDispatcher",
        played: "Played",
        prompts: Iterator[Task],
        version: int,
        length: int,
    ) -> "Round":
        """Sample once. version: tells the rounds' seeds apart. length: tokens of a mean turn. Raises RuntimeError."""
        turns = played.turns
        played.lengths.tokens = turns * length
        sampling = Sampling(
            purpose="train",
            # Rows sample with different seeds.
            run_seed=turns,
            groups_per_step=self.prompts,
            num_rollouts=self.generations,
            max_new_tokens=length,
            temperature=1.0,
        )
        tasks = list(islice(prompts, self.prompts))
        before = dispatcher.stats()
        cpu = time.process_time()
        begin = time.perf_counter()
        groups = dispatcher.sample(played.runner, sampling, tasks, version)
        seconds = time.perf_counter() - begin
        cpu = time.process_time() - cpu
        rollouts = list(chain.from_iterable(group.rollouts for group in groups))
        if any(rollout.num_sampled != turns * length for rollout in rollouts):
            episodes = [rollout.episode for rollout in rollouts if rollout.episode]
            failure = next((episode.failure for episode in episodes if episode.failure), None)
            raise RuntimeError(f"a rollout ended before its {turns * length} tokens: {failure or 'no reason given'}")
        return Round(
            played=played,
            seconds=seconds,
            cpu=cpu,
            tokens=turns * length * len(rollouts),
            place=float(np.mean([np.flatnonzero(rollout.sampled).mean() for rollout in rollouts])),
            before=before,
            after=dispatcher.stats(),
        )


@dataclass
class TurnLengths:
    """Engines that draw each turn's length, in place of the requested one, see `Engines`."""

    engines: Engines
    turns: int
    # Lengths are in the ratio of log-normal numbers, whose logarithm has this standard deviation. 0: all are equal.
    spread: float
    # Tokens of all turns of a rollout.
    tokens: int

    @property
    def events(self) -> EventLoop:
        return self.engines.events

    async def sample_turn(self, request: TurnRequest, *, ahead: bool = False, turns_follow: bool = False) -> Completion:
        return await self.engines.sample_turn(self._cut_request(request), ahead=ahead, turns_follow=turns_follow)

    def finish(self, rollouts: Iterable[RolloutId]) -> None:
        self.engines.finish(rollouts)

    def _cut_request(self, request: TurnRequest) -> TurnRequest:
        lengths = turn_lengths(request.id.rollout, self.turns, self.tokens, self.spread)
        return replace(request, max_new_tokens=lengths[request.id.turn])


@lru_cache(maxsize=8192)
def turn_lengths(rollout: RolloutId, turns: int, tokens: int, spread: float) -> tuple[int, ...]:
    """Return the tokens of each turn of a rollout: at least 1, their sum is `tokens`, the same in each call."""
    weights = np.random.default_rng([rollout.group, rollout.index]).lognormal(0, spread, turns)
    # Each turn has one token. The others are shared out; their running sum is rounded, so that none is lost.
    ends = np.rint(np.cumsum(weights) / weights.sum() * (tokens - turns)).astype(int)
    return tuple((1 + np.diff(ends, prepend=0)).tolist())


@dataclass(frozen=True, eq=False)
class Played:
    """Rollouts of a row."""

    lengths: TurnLengths
    runner: "RolloutRunner"

    @property
    def turns(self) -> int:
        """Turns of a rollout."""
        return self.lengths.turns


@dataclass(frozen=True)
class Round:
    """One round of a row."""

    played: Played
    seconds: float
    cpu: float  # seconds of this process
    tokens: int  # sampled
    place: float  # mean tokens before a sampled one
    before: "list[EngineStats]"
    after: "list[EngineStats]"

    def gain(self, name: str) -> float:
        """Return how much a total of all engines grew."""
        return float(sum(getattr(end, name) - getattr(start, name) for start, end in zip(self.before, self.after)))


@dataclass(frozen=True)
class GenerationRow:
    """Rollouts of a number of turns."""

    turns: int
    rollouts: int  # of a round
    tokens: int  # sampled in a mean turn
    seconds: list[float]  # of each round
    rate: float  # tokens/s and device, median of the rounds
    prefix: float  # share of the prompts' tokens that caches held
    at_once: float  # sequences in an engine's step, mean
    step: float  # seconds of one
    floor: float  # seconds in which the device can read a step's data
    idle: float  # share of the time in which an engine made no step, mean
    driver: float  # CPU seconds of this process a second


def _generation_row(
    played: Played, rounds: list[Round], speed: float, bench: GenerationBench, settled: SettledGrpo
) -> GenerationRow:
    """Return the figures of a row. speed: bytes/s that a device reads."""
    generation = settled.config.generation
    sizes = settled.facts
    seconds = [played_round.seconds for played_round in rounds]
    assert sizes
    engines = generation.num_engines
    turns = played.turns

    def total(name: str) -> float:
        return sum(played_round.gain(name) for played_round in rounds)

    at_once = total("tokens") / total("steps")
    place = median(played_round.place for played_round in rounds)
    rate = median(played_round.tokens / played_round.seconds for played_round in rounds)
    weights = refit_bytes(sizes, settled.generation_dtype) / generation.tensor_parallel_size
    per_token = token_bytes(sizes, settled.generation_dtype, generation.tensor_parallel_size)
    return GenerationRow(
        turns=turns,
        rollouts=bench.prompts * bench.generations,
        tokens=bench.tokens // turns,
        seconds=seconds,
        rate=rate / (engines * generation.tensor_parallel_size),
        # Without a cache nothing is counted.
        prefix=total("cached_tokens") / max(1.0, total("prompt_tokens")),
        at_once=at_once,
        step=total("busy") / total("steps"),
        floor=(weights + at_once * place * per_token) / speed,
        idle=1 - total("busy") / (engines * sum(seconds)),
        driver=sum(played_round.cpu for played_round in rounds) / sum(seconds),
    )


def copy_speed(gpu: bool) -> float:
    """Return the bytes/s that this machine's first device reads, half the bytes moved by a copy within its memory."""
    import torch

    device = "cuda:0" if gpu else "cpu"
    size = _COPIED if gpu else _COPIED_CPU
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(_COPIES):
        begin = time.perf_counter()
        target.copy_(source)
        if gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return 2 * size / best


def _prompts(chat: "Chat") -> Iterator[Task]:
    """Yield tasks without end, all different but by chance."""
    rng = random.Random(0)
    for number in numbers_from():
        text = random_words(rng, PROMPT_WORDS)
        messages = [{"role": "user", "content": text}]
        prompt = chat.prompt(messages)
        yield Task(f"r{number}", prompt.tokens, prompt.text, None, {"prompt": text}, messages=messages)


def _with_max_turns(settled: SettledGrpo, turns: int) -> SettledGrpo:
    environment = replace(settled.config.environment, max_turns=turns)
    return replace(settled, config=replace(settled.config, environment=environment))


@dataclass(frozen=True)
class GenerationResults(Results):
    """Rows of all numbers of turns."""

    model: str
    tokens: int  # sampled in a rollout
    spread: float  # of the lengths of its turns
    devices: int
    speed: float  # bytes/s that a device reads
    rows: list[GenerationRow]
    warnings: list[str]  # complaints of engines and environments
    interrupted: bool = False

    def derived_figures(self, row: GenerationRow) -> dict[str, Any]:
        return {"x_first": row.rate / self.rows[0].rate}

    def report(self, wide: bool) -> list[Line | ResultTable]:
        head = f"{self.model} on {count(self.devices, 'device')}, {count(self.rows[0].rollouts, 'rollout')} of"
        warnings = [Line(f"warning: {warning}", "yellow") for warning in self.warnings]
        table = ResultTable([self._generation_cells(row) for row in self.rows])
        title = Line(f"{head} {count(self.tokens, 'sampled token')}")
        return [title, table, *warnings, Line(_GENERATION_LEGEND, "dim")]

    def _generation_cells(self, row: GenerationRow) -> Cells:
        return [
            ("turns", f"{row.turns} of {row.tokens:,}"),
            ("tok/s/dev", f"{row.rate:,.0f}"),
            ("x first", f"{row.rate / self.rows[0].rate:.2f}"),
            ("prefix", f"{row.prefix:.1%}"),
            ("at once", f"{row.at_once:.0f}"),
            ("step ms", f"{row.step * 1e3:.2f}"),
            ("floor", f"{row.floor * 1e3:.2f}"),
            ("idle", f"{row.idle:.1%}"),
            ("driver", f"{row.driver:.1%}"),
        ]
