"""Agents of nine clients, unmodified, with a real engine and a real trainer: 8 sessions of 8 turns each.

Trained ids are sampled ids, and the trainer agrees with the engine over whole episodes. The SDKs are those of the extra
`agents-test`; a test whose SDK is missing is skipped.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.builtin import RECIPES
from rlctl.data.chat import Chat, ChatSpec
from rlctl.data.load_tokenizer import load_tokenizer
from rlctl.data.tasks import Task
from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.outcomes import AgentSpec, EnvironmentSpec
from rlctl.generation.generator_pool import GeneratorPool
from rlctl.generation.requests import Completion, RolloutId, TurnRequest
from rlctl.grpo.batch import training_sample
from rlctl.grpo.logprob_mismatch import mismatch
from rlctl.preflight.load import load
from rlctl.preflight.machine import RunMachine
from rlctl.refit.refit import Refit
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.players.agent import AgentPlayer
from rlctl.rollout.players.episode_state import EpisodeLimits
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.types import Rollout, Sampling
from rlctl.training.trainer_group import TrainerGroup
from rlctl.workers.group import WorkerGroup, WorkerSpec
from tests.system import agent_clients
from tests.system.engines import SEAT, refit_options, spec_for
from tests.system.test_parity_check import DEADLINE, MakeTrainer

SESSIONS = 8
TURNS = 8
TURN = 40
# Positions: the system prompts of smolagents have thousands of tokens.
LENGTH = 32768
# Agent -> the package that it needs, and True if its client only appends.
AGENTS = {
    "calculator:run": ("openai", True),
    "here:openai_async": ("openai", True),
    "langgraph_agent:run": ("langgraph", True),
    "openai_agents:run": ("agents", True),
    "openai_agents:run_responses": ("agents", True),
    "pydantic_ai_agent:run": ("pydantic_ai", True),
    "pydantic_ai_agent:run_anthropic": ("pydantic_ai", True),
    "smolagents_agent:run": ("smolagents", True),
    # The last step has another system prompt.
    "smolagents_agent:run_code": ("smolagents", False),
    "here:mini_swe_agent": ("minisweagent", False),
}
EXPRESSIONS = [f"{number} + {number + 9}" for number in range(11, 11 + TURNS)]


@dataclass
class Stage:
    """A trainer and an engine with its weights, and agents that ask it for turns."""

    chat: Chat
    trainer: TrainerGroup
    dispatcher: RolloutDispatcher
    runner: RolloutRunner
    # Requests of each rollout, and what was sampled.
    sampled: dict[RolloutId, list[tuple[TurnRequest, Completion]]]

    def play(self, agent: str) -> list[Rollout]:
        row = {"agent": agent, "expressions": EXPRESSIONS}
        tasks = [Task(f"{agent} {number}", [], "", None, row) for number in range(SESSIONS)]
        sampling = Sampling("train", 0, SESSIONS, 1, TURN, 1.0)
        groups = self.dispatcher.sample(self.runner, sampling, tasks, 0)
        return list(chain.from_iterable(group.rollouts for group in groups))


@pytest.fixture(scope="module")
def stage(ray_here: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Return the shipped tiny chat model, with more positions, at the start of a run of the recipe."""
    root = tmp_path_factory.mktemp("sdks")
    folder = root / "model"
    shutil.copytree(RECIPES / "tiny/qwen3-games", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LENGTH}))
    settings = ["run.name=null", f"model.path={folder}", f"trainer.micro_batch_tokens={LENGTH}"]
    run = load("grpo", "calculator-agent-tiny", settings).settled.settle_on(RunMachine("cpu"), None)
    spec = EnvironmentSpec(f"{agent_clients.__file__}:run", 120.0, agent=AgentSpec())
    chat = Chat(load_tokenizer(str(folder)), (folder / "chat_template.jinja").read_text(), None, folder)
    engine = replace(spec_for(folder, LENGTH), kv_cache_mib=512)
    with ExitStack() as stack:
        agents = stack.enter_context(EnvironmentPool({"agent": spec}, 6144, 1))
        agents.give_chat(ChatSpec.from_chat(chat), "hermes")
        workers = WorkerGroup([WorkerSpec("trainer-0", MakeTrainer(run.trainer, folder, root / "store"))], DEADLINE)
        pool = GeneratorPool(engine, [SEAT], str(ray_here), DEADLINE, 0, lambda *_, **__: None)
        for part in (pool, workers):
            stack.callback(part.kill)
        workers.built().wait(DEADLINE)
        pool.wait_until_built()
        pool.connect(Refit(workers, refit_options("shm", root)))
        pool.sync(0)
        dispatcher = RolloutDispatcher(pool, run.config.run, lambda *_, **__: None, agents.events)
        stack.callback(dispatcher.close)
        sampled = record_samples(dispatcher)
        limits = EpisodeLimits(TURNS, LENGTH, 600.0, 0, "keep")
        runner = RolloutRunner(AgentPlayer(agents, chat, limits), dispatcher)
        stack.callback(runner.close)
        yield Stage(chat, TrainerGroup(workers, run.trainer), dispatcher, runner, sampled)


def record_samples(dispatcher: RolloutDispatcher) -> dict[RolloutId, list[tuple[TurnRequest, Completion]]]:
    """Return the turns of each rollout, which grow from now on: requests with their completions."""
    sampled: dict[RolloutId, list[tuple[TurnRequest, Completion]]] = defaultdict(list)
    sample: Any = dispatcher.sample_turn

    async def sample_and_record(request: TurnRequest, **options: Any) -> Completion:
        completion: Completion = await sample(request, **options)
        sampled[request.id.rollout].append((request, completion))
        return completion

    dispatcher.sample_turn = sample_and_record  # type: ignore[method-assign]
    return sampled


@pytest.mark.long  # an engine, a trainer, and SDKs that take seconds to import
@pytest.mark.parametrize("agent", AGENTS)
def test_what_was_sampled_trains_and_the_trainer_agrees(agent: str, stage: Stage) -> None:
    package, appends = AGENTS[agent]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -e '.[agents-test]'")
    rollouts = stage.play(agent)
    assert len(rollouts) == SESSIONS
    samples = []
    for rollout in rollouts:
        assert rollout.episode
        assert (rollout.episode.failure, rollout.episode.turns) == (None, TURNS)
        trained = []
        for row in rollout.rows:
            samples.append(training_sample(row, 0.0))
            turns = {*row.turns[row.sampled].tolist()}
            trained += [tuple(row.tokens[row.turns == turn].tolist()) for turn in turns]
        sampled = [tuple(completion.tokens.tolist()) for _, completion in stage.sampled[rollout.id]]
        assert sorted(trained) == sorted(sampled)
        if appends:
            assert len(rollout.rows) == 1, rollout.episode.rewritten
    log_probs_of_engine = [sample.columns["rollout_log_prob"] for sample in samples]
    gap = mismatch(log_probs_of_engine, stage.trainer.log_probs(samples), [sample.mask for sample in samples])
    assert gap.tokens == sum(rollout.num_sampled for rollout in rollouts) and gap.token_mult_prob_error < 1.001


@pytest.mark.long  # the engine and the trainer of the test above
def test_the_engine_ends_a_turn_at_a_stop(stage: Stage) -> None:
    (stop,) = stage.chat.encode("}}")
    rollouts = stage.play("here:stopping")
    turns = list(chain.from_iterable(stage.sampled[rollout.id] for rollout in rollouts))
    stopped = [completion for _, completion in turns if stop in completion.tokens]
    assert stopped and len(turns) == SESSIONS * TURNS
    for completion in stopped:
        assert completion.tokens.tolist().index(stop) == len(completion.tokens) - 1
        assert completion.finish == "stop"
