"""`rlctl bench generation`: tokens a second that engines sample, in one turn and in several turns of the same total.

No trainer runs, so weights do not change. All rows share the engines, which are those of a run, as are dispatcher,
players and environment processes. Prompts are new in every round, so that a prefix cache can only have the earlier
turns of the same rollout and the prompt of its group.
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

# The shortest possible chat template: one word marks the speaker, one word ends a turn.
_TEMPLATE = (
    "{% for m in messages %}{{ 'w4' if m.role == 'assistant' else 'w3' }} {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}w4 {% endif %}"
)
# Tokens between two turns: the environment's message, two speaker marks, two end marks, and one to spare.
_BETWEEN = len(ANSWER.split()) + 5
# Forced lengths have this multiple of a rollout's tokens as mean, so that a turn always ends at its `max_new_tokens`.
_FAR = 1000
# Tokens of each turn in the warm-up, in which kernels are compiled.
_WARM_UP = 4
# Bytes that are copied to measure the memory bandwidth of a GPU, and of a CPU; and number of copies.
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
    """Rollouts that all sample the same number of tokens, a row for each number of turns."""

    model: str
    prompts: int
    generations: int  # rollouts of a prompt
    tokens: int  # sampled in a rollout
    turns: tuple[int, ...]  # numbers of turns of a rollout
    spread: float  # of the lengths of a rollout's turns, see `TurnLengths`
    pause: float  # seconds that the environment takes between two turns
    rounds: int  # of each row
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
        """The most tokens of a rollout, with its prompt and the environment's messages."""
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
        # The config is checked first, because making random weights takes minutes.
        checked_config = self._write_config(shape, folder).config
        say(f"random weights in the shape of {self.model}")
        make_random_model(shape, folder)
        model = replace(checked_config.model, path=str(folder / "model"), random_init=False)
        config = replace(checked_config, model=model)
        settled = settle(config, RunMachine(device_of(count_gpus())), read_sizes(shape / "config.json"))
        files = ModelFiles.prepare(config.model, folder, 0)
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
            # Start environments before Ray: their processes are forked, and Ray starts threads, which a fork breaks.
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
        """Write data and a chat template; return a config whose engines can serve every row. Raises ConfigError."""
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
            # Forced lengths, because a turn must not end early if the model samples an end token.
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
        """Yield the rounds. Each round plays every row, so that a device that becomes slower affects all rows."""
        # The first rollouts make the engines compile their kernels.
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
        """Play one round of one row. version: makes the seeds of rounds differ. length: mean tokens of a turn.

        Raises RuntimeError if a rollout ends before it has sampled all of its tokens.
        """
        turns = played.turns
        played.lengths.tokens = turns * length
        sampling = Sampling(
            purpose="train",
            # The number of turns is the seed, so that rows sample with different seeds.
            run_seed=turns,
            groups_per_step=self.prompts,
            num_rollouts=self.generations,
            max_new_tokens=length,
            temperature=1.0,
        )
        tasks = list(islice(prompts, self.prompts))
        before = dispatcher.stats()
        cpu_begin = time.process_time()
        begin = time.perf_counter()
        groups = dispatcher.sample(played.runner, sampling, tasks, version)
        seconds = time.perf_counter() - begin
        cpu_seconds = time.process_time() - cpu_begin
        rollouts = list(chain.from_iterable(group.rollouts for group in groups))
        if any(rollout.num_sampled != turns * length for rollout in rollouts):
            episodes = [rollout.episode for rollout in rollouts if rollout.episode]
            failure = next((episode.failure for episode in episodes if episode.failure), None)
            raise RuntimeError(f"a rollout ended before its {turns * length} tokens: {failure or 'no reason given'}")
        return Round(
            played=played,
            seconds=seconds,
            cpu=cpu_seconds,
            tokens=turns * length * len(rollouts),
            place=float(np.mean([np.flatnonzero(rollout.sampled).mean() for rollout in rollouts])),
            before=before,
            after=dispatcher.stats(),
        )


@dataclass
class TurnLengths:
    """Wrapper of `Engines` that replaces the requested length of each turn by a drawn one."""

    engines: Engines
    turns: int  # of a rollout
    # Lengths are proportional to log-normal numbers, whose logarithm has this standard deviation. 0: all are equal.
    spread: float
    tokens: int  # of all turns of a rollout

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
    """Return the number of tokens of each turn of a rollout: at least 1 each, `tokens` together. A pure function."""
    weights = np.random.default_rng([rollout.group, rollout.index]).lognormal(0, spread, turns)
    # Each turn gets one token and a share of the others. Rounding the running sum keeps the total exact.
    ends = np.rint(np.cumsum(weights) / weights.sum() * (tokens - turns)).astype(int)
    return tuple((1 + np.diff(ends, prepend=0)).tolist())


@dataclass(frozen=True, eq=False)
class Played:
    """The runner that plays the rollouts of one row."""

    lengths: TurnLengths
    runner: "RolloutRunner"

    @property
    def turns(self) -> int:
        """Number of turns of a rollout."""
        return self.lengths.turns


@dataclass(frozen=True)
class Round:
    """Measurements of one round of a row."""

    played: Played
    seconds: float
    cpu: float  # CPU seconds of this process
    tokens: int  # sampled
    place: float  # mean position of a sampled token in its sequence
    before: "list[EngineStats]"  # of each engine, before the round
    after: "list[EngineStats]"

    def gain(self, name: str) -> float:
        """Return the growth of a counter of `EngineStats` during the round, summed over all engines."""
        return float(sum(getattr(end, name) - getattr(start, name) for start, end in zip(self.before, self.after)))


@dataclass(frozen=True)
class GenerationRow:
    """Results for one number of turns."""

    turns: int
    rollouts: int  # of a round
    tokens: int  # sampled in a turn, mean
    seconds: list[float]  # of each round
    rate: float  # sampled tokens/s/device, median of the rounds
    prefix: float  # share of the prompts' tokens that were in prefix caches
    at_once: float  # sequences in an engine's step, mean
    step: float  # seconds of an engine's step, mean
    floor: float  # seconds that the device needs to read a step's weights, keys and values
    idle: float  # share of the time in which an engine made no step, mean
    driver: float  # CPU seconds of this process a second


def _generation_row(
    played: Played, rounds: list[Round], speed: float, bench: GenerationBench, settled: SettledGrpo
) -> GenerationRow:
    """Return the results of a row from its rounds. speed: bytes/s that a device reads."""
    generation = settled.config.generation
    sizes = settled.facts
    seconds = [played_round.seconds for played_round in rounds]
    assert sizes
    engines = generation.num_engines
    turns = played.turns

    def total(name: str) -> float:
        return sum(played_round.gain(name) for played_round in rounds)

    at_once = total("tokens") / total("steps")
    # Mean length of a sequence when a token is sampled. The engine reads the keys and values of this many tokens.
    mean_context = median(played_round.place for played_round in rounds)
    rate = median(played_round.tokens / played_round.seconds for played_round in rounds)
    weight_bytes = refit_bytes(sizes, settled.generation_dtype) / generation.tensor_parallel_size
    cache_bytes_a_token = token_bytes(sizes, settled.generation_dtype, generation.tensor_parallel_size)
    return GenerationRow(
        turns=turns,
        rollouts=bench.prompts * bench.generations,
        tokens=bench.tokens // turns,
        seconds=seconds,
        rate=rate / (engines * generation.tensor_parallel_size),
        # max(1.0, ...), because engines without a prefix cache count no tokens.
        prefix=total("cached_tokens") / max(1.0, total("prompt_tokens")),
        at_once=at_once,
        step=total("busy") / total("steps"),
        floor=(weight_bytes + at_once * mean_context * cache_bytes_a_token) / speed,
        idle=1 - total("busy") / (engines * sum(seconds)),
        driver=sum(played_round.cpu for played_round in rounds) / sum(seconds),
    )


def copy_speed(gpu: bool) -> float:
    """Return the memory bandwidth of this machine's first device, bytes/s: a copy reads and writes each byte."""
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
    """Yield tasks with random prompts, without end."""
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
    """Results: a row for each number of turns."""

    model: str
    tokens: int  # sampled in a rollout
    spread: float  # of the lengths of a rollout's turns
    devices: int
    speed: float  # memory bandwidth of a device, bytes/s
    rows: list[GenerationRow]
    warnings: list[str]  # warnings and errors of engines and environments
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
