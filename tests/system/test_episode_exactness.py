"""Contract 4 over whole episodes, for every architecture: trainer and engines agree on each sampled token, turns of a
rollout stay on their engine, and a greedy episode is replayed token for token."""

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlctl.data.chat import Chat
from rlctl.data.load_tokenizer import load_tokenizer
from rlctl.data.tasks import Task
from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.outcomes import EnvironmentSpec
from rlctl.generation.engine import Engine
from rlctl.generation.generator_pool import GeneratorPool
from rlctl.generation.requests import RequestId, RolloutId, TurnRequest
from rlctl.grpo.batch import training_sample
from rlctl.grpo.logprob_mismatch import mismatch
from rlctl.preflight.load import load
from rlctl.preflight.machine import RunMachine
from rlctl.refit.refit import Refit
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.players.environment import EnvironmentPlayer
from rlctl.rollout.players.episode_state import EpisodeLimits
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.types import Rollout, Sampling
from rlctl.training.trainer_group import TrainerGroup
from rlctl.workers.group import WorkerGroup, WorkerSpec
from tests.system.engines import SEAT, refit_options, spec_for
from tests.system.test_parity_check import DEADLINE, MakeTrainer
from tests.tiny_models import KINDS, Kind, make_model

TURN = 12
TURNS = 5
LENGTH = 256
# As Qwen3's drops thinking: of an earlier turn nothing is left that stands before its last 1, 5 or 9.
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:"
    "{{ m.content if m.role != 'assistant' or loop.last else m.content.split('1')[-1].split('5')[-1].split('9')[-1] }}"
    "<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
WORDS = {"prompt": "guess {low} to {high}", "higher": "higher", "lower": "lower", "unclear": "a number"}
TASKS = [Task(f"g{low}", [], "", None, {"low": low, "high": low + 9, "secret": low + 4}) for low in range(8)]


@dataclass
class Stage:
    """A trainer and engines with its weights, and episodes of a game between the engines and a process."""

    trainer: TrainerGroup
    dispatcher: RolloutDispatcher
    runners: dict[str, RolloutRunner]
    # Engines that sampled each rollout.
    homes: dict[RolloutId, set[str]]

    def play(self, history: str, purpose: Any, temperature: float) -> list[Rollout]:
        sampling = Sampling(purpose, 0, len(TASKS), 4, TURN, temperature)
        groups = self.dispatcher.sample(self.runners[history], sampling, TASKS, 0)
        return list(chain.from_iterable(group.rollouts for group in groups))

    def agree(self, rollouts: list[Rollout]) -> float:
        """Return the token_mult_prob_error between engines and trainer."""
        rows = chain.from_iterable(rollout.rows for rollout in rollouts)
        samples = [training_sample(row, 0.0) for row in rows]
        log_probs_of_engines = [sample.columns["rollout_log_prob"] for sample in samples]
        gap = mismatch(log_probs_of_engines, self.trainer.log_probs(samples), [sample.mask for sample in samples])
        assert gap.tokens == sum(rollout.num_sampled for rollout in rollouts)
        return gap.token_mult_prob_error

    def replay(self, rollouts: list[Rollout]) -> None:
        """Ask for every turn again, as a separate request in another mix."""
        replays: list[tuple[TurnRequest, list[int]]] = []
        for row in chain.from_iterable(rollout.rows for rollout in rollouts):
            for turn in sorted({*row.turns[row.sampled].tolist()}):
                (positions,) = np.nonzero(row.turns == turn)
                prompt = row.tokens[: positions[0]].tolist()
                number = len(replays)
                request = TurnRequest(RequestId(RolloutId("parity", "again", number, 0)), prompt, TURN, 0.0, number)
                replays.append((request, row.tokens[positions].tolist()))
        random.Random(0).shuffle(replays)
        futures = [self.dispatcher.events.submit(self.dispatcher.sample_turn(request)) for request, _ in replays]
        for future, (_, expected_tokens) in zip(futures, replays, strict=True):
            assert future.result(DEADLINE).tokens.tolist() == expected_tokens


def record_engines(pool: GeneratorPool) -> dict[RolloutId, set[str]]:
    """Return the engines that each rollout's turns are sent to. The sets grow from now on."""
    homes: dict[RolloutId, set[str]] = defaultdict(set)

    def watch(worker: Any) -> None:
        call = worker.call

        def record_and_call(deadline_s: float, method: Any, *arguments: Any) -> Any:
            if method is Engine.submit:
                for request in arguments[0]:
                    homes[request.id.rollout].add(worker.name)
            return call(deadline_s, method, *arguments)

        worker.call = record_and_call

    for worker in pool.engines:
        watch(worker)
    return homes


@contextmanager
def stage(folder: Path, logs: Path, engines: int, transit: Path) -> Iterator[Stage]:
    run = load("grpo", None, []).settled.settle_on(RunMachine("cpu"), None)
    make = MakeTrainer(run.trainer, folder, transit / "store")
    chat = Chat(load_tokenizer(str(folder)), TEMPLATE, None, folder)
    assert not chat.rewrites_history()  # There are no thinking blocks; those digits take their place.
    with ExitStack() as stack:
        games = stack.enter_context(EnvironmentPool({"guess": EnvironmentSpec("guess", 60.0, WORDS)}, 2048, 1))
        workers = WorkerGroup([WorkerSpec("trainer-0", make)], DEADLINE)
        pool = GeneratorPool(spec_for(folder, LENGTH), [SEAT] * engines, str(logs), DEADLINE, 0, lambda *_, **__: None)
        for part in (pool, workers):
            stack.callback(part.kill)
        workers.built().wait(DEADLINE)
        pool.wait_until_built()
        pool.connect(Refit(workers, refit_options("shm", transit)))
        pool.sync(0)
        homes = record_engines(pool)
        dispatcher = RolloutDispatcher(pool, run.config.run, lambda *_, **__: None, games.events)
        stack.callback(dispatcher.close)
        runners = {}
        for history in ("keep", "strip"):
            limits: Any = EpisodeLimits(TURNS, LENGTH, 600.0, 0, history)
            player = EnvironmentPlayer(games, games.contracts(), chat, limits, None)
            runners[history] = RolloutRunner(player, dispatcher)
            stack.callback(runners[history].close)
        yield Stage(TrainerGroup(workers, run.trainer), dispatcher, runners, homes)


@pytest.mark.long  # an engine and a trainer for each architecture
@pytest.mark.parametrize("kind", KINDS)
def test_whole_episodes_agree_and_a_greedy_one_is_replayed(kind: Kind, ray_here: Path, tmp_path: Path) -> None:
    engines = 2 if kind == "qwen3" else 1
    with stage(make_model(tmp_path / kind, kind, seed=3), ray_here, engines, tmp_path) as scene:
        keeping = scene.play("keep", "train", 1.0)
        stripping = scene.play("strip", "validation", 1.0)
        for rollouts in (keeping, stripping):
            episodes = [rollout.episode for rollout in rollouts if rollout.episode]
            assert {episode.ending for episode in episodes} <= {"done", "max_turns"}
            assert max(episode.turns for episode in episodes) == TURNS
            assert scene.agree(rollouts) < 1.001
        assert all(len(rollout.rows) == 1 for rollout in keeping)
        assert sum(len(rollout.rows) for rollout in stripping) > len(stripping) + 10
        assert all(len(names) == 1 for names in scene.homes.values())
        assert len(set.union(*scene.homes.values())) == engines
        greedy = scene.play("keep", "parity", 0.0)
        scene.replay([*greedy, *scene.play("strip", "train", 0.0)])
