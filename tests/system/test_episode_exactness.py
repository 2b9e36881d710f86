"""Contract 4 over whole episodes, for every architecture: trainer and engines agree on each sampled token, turns of a
rollout stay on their engine, and a greedy episode is replayed token for token."""

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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

TURN, TURNS, LENGTH = 12, 5, 256
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
        return [rollout for group in groups for rollout in group.rollouts]

    def agree(self, rollouts: list[Rollout]) -> float:
        samples = [training_sample(row, 0.0) for rollout in rollouts for row in rollout.rows]
        theirs = [sample.columns["rollout_log_prob"] for sample in samples]
        gap = mismatch(theirs, self.trainer.log_probs(samples), [sample.mask for sample in samples])
        assert gap.tokens == sum(rollout.num_sampled for rollout in rollouts)
        return gap.token_mult_prob_error

    def replay(self, rollouts: list[Rollout]) -> None:
        """Ask for every turn again, as a separate request in another mix."""
        wanted: list[tuple[TurnRequest, list[int]]] = []
        for row in (row for rollout in rollouts for row in rollout.rows):
            for turn in sorted({*row.turns[row.sampled].tolist()}):
                (at,) = np.nonzero(row.turns == turn)
                prompt, number = row.tokens[: at[0]].tolist(), len(wanted)
                request = TurnRequest(RequestId(RolloutId("parity", "again", number, 0)), prompt, TURN, 0.0, number)
                wanted.append((request, row.tokens[at].tolist()))
        random.Random(0).shuffle(wanted)
        sample, events = self.dispatcher.sample_turn, self.dispatcher.events
        again = [events.submit(sample(request)) for request, _ in wanted]
        assert [each.result(DEADLINE).tokens.tolist() for each in again] == [tokens for _, tokens in wanted]


def watched(pool: GeneratorPool) -> dict[RolloutId, set[str]]:
    """Return the engines that are asked for each rollout's turns, from now on."""
    homes: dict[RolloutId, set[str]] = defaultdict(set)

    def watch(worker: Any) -> None:
        call = worker.call

        def called(deadline_s: float, method: Any, *arguments: Any) -> Any:
            for each in arguments[0] if method is Engine.submit else ():
                homes[each.id.rollout].add(worker.name)
            return call(deadline_s, method, *arguments)

        worker.call = called

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
        homes = watched(pool)
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
    with stage(make_model(tmp_path / kind, kind, seed=3), ray_here, engines, tmp_path) as on:
        kept, stripped = on.play("keep", "train", 1.0), on.play("strip", "validation", 1.0)
        for rollouts in (kept, stripped):
            assert {one.episode.ending for one in rollouts if one.episode} <= {"done", "max_turns"}
            assert max(one.episode.turns for one in rollouts if one.episode) == TURNS
            assert on.agree(rollouts) < 1.001
        assert all(len(one.rows) == 1 for one in kept)
        assert sum(len(one.rows) for one in stripped) > len(stripped) + 10
        assert all(len(names) == 1 for names in on.homes.values())
        assert len(set.union(*on.homes.values())) == engines
        greedy = on.play("keep", "parity", 0.0)
        on.replay([*greedy, *on.play("strip", "train", 0.0)])
