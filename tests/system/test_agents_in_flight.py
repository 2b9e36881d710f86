"""Weights that change inside an agent's turn: between two requests, and in the middle of a stream that has begun.

The version and the log-prob of each token are known exactly, and the rollout trains as one row.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlctl.config.builtin import RECIPES
from rlctl.data.chat import Chat, ChatSpec
from rlctl.data.load_tokenizer import load_tokenizer
from rlctl.data.tasks import Task
from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.outcomes import AgentSpec, EnvironmentSpec
from rlctl.generation.generator_pool import GeneratorPool
from rlctl.generation.requests import RolloutId
from rlctl.generation.spec import ForcedLengths
from rlctl.preflight.load import load
from rlctl.refit.refit import Refit
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.players.agent import AgentPlayer
from rlctl.rollout.players.episode_state import EpisodeLimits
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.types import Rollout, RolloutStart
from rlctl.workers.group import WorkerGroup, WorkerSpec
from tests.system.drifting import DriftingSource
from tests.system.engines import SEAT, MakeSource, refit_options, spec_for
from tests.system.test_agent_sdks import record_samples
from tests.system.test_in_flight import DEADLINE, Models, spans, with_kept_keys
from tests.waiting import until

SESSIONS = 4
SHORT = 20
STREAMED = 3000
POSITIONS = 4096
AGENT = f"""
import json, pathlib, time
from urllib.request import Request, urlopen

from rlctl.environments.agents import endpoint

# A stream begins before its turn is there.
endpoint._STREAM_S = 0.02


def ask(url, key, messages, most, stream=False):
    body = json.dumps({{"messages": messages, "max_tokens": most, "stream": stream}}).encode()
    answer = urlopen(Request(url + "/chat/completions", body, {{"Authorization": f"Bearer {{key}}"}})).read().decode()
    if not stream:
        return json.loads(answer)["choices"][0]["message"]["content"] or "", 0
    parts = [json.loads(line[6:])["choices"] for line in answer.splitlines() if line.startswith("data: {{")]
    said = "".join(part[0]["delta"].get("content") or "" for part in parts if part)
    return said, answer.count(": the policy samples")


def run(task, url, key):
    here, messages, comments = pathlib.Path(task.row["here"]), [], 0
    for turn, (most, stream) in enumerate([({SHORT}, False), ({STREAMED}, True), ({SHORT}, False)]):
        messages.append({{"role": "user", "content": f"turn {{turn}}"}})
        said, waited = ask(url, key, messages, most, stream)
        comments += waited
        messages.append({{"role": "assistant", "content": said}})
        (here / f"{{task.id}}-{{turn}}").touch()
        while not (here / f"after-{{turn}}").exists():
            time.sleep(0.01)
    return comments
"""


@dataclass
class Scene:
    """Engine, agents, and weights of any version."""

    pool: GeneratorPool
    dispatcher: RolloutDispatcher
    runner: RolloutRunner
    sampled: dict[RolloutId, list[Any]]
    ended: list[Rollout]

    def check(self) -> None:
        """Raise the error of a rollout, of the agents or of the engine."""
        self.runner.check()
        self.dispatcher.repair()


@contextmanager
def open_scene(folder: Path, logs: Path, root: Path) -> Iterator[Scene]:
    chat = Chat(load_tokenizer(str(folder)), (folder / "chat_template.jinja").read_text(), None, folder)
    (root / "agent.py").write_text(AGENT)
    spec = EnvironmentSpec(f"{root}/agent.py:run", DEADLINE, agent=AgentSpec())
    # No turn ends by itself: as many tokens are sampled as were asked for.
    engine = replace(spec_for(folder, POSITIONS), forced_lengths=ForcedLengths(1e6, 0.001), kv_cache_mib=256)
    run = load("grpo", "calculator-agent-tiny", ["run.name=null"]).settled.config.run
    with ExitStack() as stack:
        agents = stack.enter_context(EnvironmentPool({"agent": spec}, 4096, 1))
        agents.give_chat(ChatSpec.from_chat(chat), None)
        source = WorkerGroup([WorkerSpec("source", MakeSource(folder, DriftingSource))], DEADLINE)
        stack.callback(source.kill)
        pool = GeneratorPool(engine, [SEAT], str(logs), DEADLINE, 0, lambda *_, **__: None)
        stack.callback(pool.kill)
        source.built().wait(DEADLINE)
        pool.wait_until_built()
        pool.connect(Refit(source, refit_options("shm", root, in_flight=True)))
        pool.sync(0)
        dispatcher = RolloutDispatcher(pool, run, lambda *_, **__: None, agents.events)
        stack.callback(dispatcher.close)
        limits = EpisodeLimits(3, POSITIONS, DEADLINE, 0, "keep")
        runner = RolloutRunner(AgentPlayer(agents, chat, limits), dispatcher)
        stack.callback(runner.close)
        yield Scene(pool, dispatcher, runner, record_samples(dispatcher), [])


@pytest.mark.long  # an engine
def test_weights_change_between_requests_and_in_the_middle_of_a_stream(ray_here: Path, tmp_path: Path) -> None:
    folder = float32_model(tmp_path / "model")
    with open_scene(folder, ray_here, tmp_path) as scene:
        tasks = [Task(f"r{number}", [], "", None, {"here": str(tmp_path)}) for number in range(SESSIONS)]
        starts = [
            RolloutStart(RolloutId("train", task.id, number, 0), task, STREAMED, 1.0, number, 0)
            for number, task in enumerate(tasks)
        ]
        scene.runner.events.ask(lambda: scene.runner.begin(starts, scene.ended.append))
        version = 0
        for turn in range(3):
            if turn == 1:
                # In the middle of a stream, three times; then between it and the next turn.
                until(lambda: (scene.check(), scene.dispatcher.stats()[0].tokens > SESSIONS * SHORT)[1])
                for version in range(2, 5):
                    scene.pool.sync(version)
            until(lambda turn=turn: (scene.check(), _all_have_ended(turn, tmp_path))[1])
            version += 1
            scene.pool.sync(version)
            (tmp_path / f"after-{turn}").touch()
        until(lambda: (scene.check(), len(scene.ended) == SESSIONS)[1])
    models = Models(folder)
    for rollout in scene.ended:
        completions = [completion for _, completion in scene.sampled[rollout.id]]
        versions = [[version for _, _, version in spans(completion)] for completion in completions]
        # The streamed turn is the second of three.
        assert versions == [[0], [1, 2, 3, 4], [5]]
        assert rollout.episode and rollout.episode.failure is None
        assert rollout.episode.reward is not None and rollout.episode.reward >= 1, "the stream had begun"
        (row,) = rollout.rows
        for name, column in (("tokens", row.tokens), ("versions", row.versions), ("log_probs", row.log_probs)):
            assert np.array_equal(column[row.sampled], np.concatenate([getattr(turn, name) for turn in completions]))
        for request, completion in scene.sampled[rollout.id]:
            expected = with_kept_keys(models, list(request.prompt_tokens), completion)
            assert np.abs(expected - completion.log_probs).max() < 5e-5


def _all_have_ended(turn: int, folder: Path) -> bool:
    return len(list(folder.glob(f"r*-{turn}"))) == SESSIONS


def float32_model(folder: Path) -> Path:
    """Save the shipped tiny chat model in float32, with more positions."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(RECIPES / "tiny/qwen3-games", folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": POSITIONS}))
    return folder
