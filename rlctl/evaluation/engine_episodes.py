"""Episodes of an environment with a real model (`rlctl env check --model`): an engine without a trainer plays them."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from rlctl.config.data_schema import DatasetSection
from rlctl.config.schema import GrpoConfig
from rlctl.data.datasets import Row
from rlctl.data.load_data import end_tokens, load_chat, load_prompts
from rlctl.grpo.group_record import group_records
from rlctl.launch.engines import engines
from rlctl.launch.sampling import decoder, make_runner
from rlctl.models.model_files import ModelFiles
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.settled import settle
from rlctl.rewards.scorer import Scorer
from rlctl.rollout.episode_setup import environment_pool, set_up
from rlctl.rollout.players.agent import agent_notes
from rlctl.rollout.scoring import GroupScorer
from rlctl.rollout.types import Sampling
from rlctl.telemetry.jsonl import Record
from rlctl.workers.user_logs import Emit


@dataclass(frozen=True)
class PlayedEpisodes:
    """Played episodes, and their times."""

    # One record for each episode in the form of rollouts.jsonl: a group of one rollout.
    records: list[Record]
    # Lines about the chat template and about an agent's requests.
    notes: list[str]
    # Seconds until the engine was ready, and seconds in which all episodes were played.
    start_s: float
    play_s: float

    @property
    def failures(self) -> list[str]:
        """Reasons why episodes failed."""
        rollouts = chain.from_iterable(record["rollouts"] for record in self.records)
        return [str(rollout["failed"]) for rollout in rollouts if rollout["failed"]]


def play_episodes(
    config: GrpoConfig, section: DatasetSection, rows: Sequence[Row], count: int, version: int, logs: Path, emit: Emit
) -> PlayedEpisodes:
    """Play `count` episodes of the config's environment with the config's model, concurrently.

    rows: rows to play, one for each episode; after the last row comes the first again. version: version of the weights.
    logs: folder for the engine's logs. The environment prints to standard error.
    Turns are sampled at `generation.temperature`. Only the environment gives a reward. Without `get_reward` an episode
    has no reward.
    Raises DataError, ModelError, UnusableEnvironmentError, PlacementError, RuntimeError.
    """
    begin = time.perf_counter()
    files = ModelFiles.prepare(config.model, logs, config.run.seed)
    settled = settle(config, RunMachine(), files.facts.sizes)
    chat = load_chat(config, files.chat)
    stops = end_tokens(config, chat).stops
    tasks, _ = load_prompts(config, section, chat, list(rows))
    tasks = [replace(tasks[index % len(tasks)], id=f"episode {index + 1}") for index in range(count)]
    generation = config.generation
    with ExitStack() as stack:
        # The pool starts before Ray changes this process's variables.
        pool = stack.enter_context(environment_pool(config))
        setup = set_up(config, pool, chat, tasks[0], needs_reward=False)
        scorer = stack.enter_context(Scorer([], logs, emit))
        dispatcher = stack.enter_context(engines(settled, files, stops, version, logs, emit, pool.events))
        runner = make_runner(settled, chat, dispatcher, pool, setup, trains=False)
        stack.callback(runner.close)
        play_begin = time.perf_counter()
        sampling = Sampling(
            purpose="validation",
            run_seed=config.run.seed,
            groups_per_step=count,
            num_rollouts=1,
            max_new_tokens=generation.max_new_tokens,
            temperature=generation.temperature,
        )
        groups = dispatcher.sample(runner, sampling, tasks, version)
        play_end = time.perf_counter()
        scored = GroupScorer(scorer, decoder(chat.tokenizer, special=False))(groups)
    # A dict instead of a set, because it keeps the order of the lines.
    agent_lines: dict[str, None] = {}
    for rollout in chain.from_iterable(group.rollouts for group in groups):
        if rollout.episode:
            agent_lines |= dict.fromkeys(agent_notes(rollout.episode.counts or {}, rollout.episode.rewritten or {}))
    records = group_records(scored, decoder(chat.tokenizer, special=True))
    return PlayedEpisodes(
        records=records,
        notes=[*setup.template_notes, *agent_lines],
        start_s=play_begin - begin,
        play_s=play_end - play_begin,
    )
