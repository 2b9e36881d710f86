"""Assembly of the parts of a run that sample and score: rewards, environments, engines, and the refit.

A GRPO run has these parts. An SFT run has them if a recipe validates it.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.config.plugins import model_rewards, served_judges
from rlctl.config.schema import GrpoConfig
from rlctl.data.chat import Chat
from rlctl.data.end_tokens import EndTokens
from rlctl.data.files import DataError
from rlctl.data.load_data import load_prompts, part_of
from rlctl.data.mixture import first_of_each
from rlctl.data.tasks import Task
from rlctl.launch.roles import RoleFiles
from rlctl.launch.runtime import Allocation
from rlctl.launch.session import Session
from rlctl.models.model_files import ModelFiles
from rlctl.models.vocabulary import count_tokens
from rlctl.preflight.declared_columns import Role, gives_top, is_teacher
from rlctl.preflight.placement import Placement, transport_of
from rlctl.preflight.roles import scoring_roles
from rlctl.preflight.settled import SettledGrpo
from rlctl.preflight.trainer_settings import DTYPE_BYTES
from rlctl.preflight.written_roles import WrittenRole, reward_role, written_roles
from rlctl.utils.event_loop import EventLoop
from rlctl.workers.reaper import SHARED_MEMORY, free_bytes
from rlctl.workers.user_logs import Emit

if TYPE_CHECKING:
    from rlctl.environments.environment_pool import EnvironmentPool
    from rlctl.generation.generator_pool import GeneratorPool
    from rlctl.rewards.scorer import Scorer
    from rlctl.rollout.dispatcher import RolloutDispatcher
    from rlctl.rollout.engine_judge import EngineJudge
    from rlctl.rollout.episode_setup import EpisodeSetup
    from rlctl.rollout.frozen_scores import FrozenScores
    from rlctl.rollout.model_rewards import ConversationEncoder, ModelRewards
    from rlctl.rollout.runner import Engines, RolloutRunner
    from rlctl.rollout.scoring import GroupScorer
    from rlctl.rollout.types import Decode
    from rlctl.training.trainer_group import TrainerGroup

# Bytes of shared memory that a run needs besides the weights in transit.
_BESIDE_BYTES = 16 << 20


def user_processes(
    config: GrpoConfig, logs: Path, records: Path, emit: Emit, stack: ExitStack
) -> "tuple[Scorer, EnvironmentPool | None]":
    """Start the processes of rewards, and of environments if rollouts have several turns. `stack` ends them.

    records: folder for the requests of judges.
    Call this before Ray starts, because Ray changes this process's environment variables.
    """
    from rlctl.rewards.scorer import Scorer
    from rlctl.rollout.episode_setup import environment_pool

    rewardless = not config.rewards and not config.has_turns
    scorer = stack.enter_context(
        Scorer(
            config.rewards,
            logs,
            emit,
            episodes=config.environment.is_enabled,
            rewardless=rewardless,
            records=records,
        )
    )
    environments = stack.enter_context(environment_pool(config, logs, emit)) if config.has_turns else None
    return scorer, environments


@dataclass
class SamplingParts:
    """Parts that sample and score. The methods are called in the order of their definition."""

    session: Session
    # Settled GRPO config by which the engines sample. In an SFT run it is the recipe's.
    settled: SettledGrpo
    files: ModelFiles
    scorer: "Scorer"
    # None if rollouts have one turn.
    environments: "EnvironmentPool | None"
    chat: Chat = field(init=False)
    ends: EndTokens = field(init=False)
    # Facts about the environments after `try_on`; None without environments.
    setup: "EpisodeSetup | None" = None
    pool: "GeneratorPool" = field(init=False)
    # Engines that score, by the role of their model.
    scoring: "dict[Role, GeneratorPool]" = field(default_factory=dict)
    # Tokenizer and chat template of each judge that engines of the run serve, by role.
    judge_chats: dict[Role, Chat] = field(default_factory=dict)
    # Encoders of the run's reward models, by the index of the reward.
    encoders: "dict[int, ConversationEncoder]" = field(default_factory=dict)

    @property
    def config(self) -> GrpoConfig:
        """GRPO config by which the engines sample."""
        return self.settled.config

    def try_on(self, first: Task) -> None:
        """Begin an episode of the first task and call the rewards on it. Raises UnusableEnvironmentError or
        RewardError.
        """
        from rlctl.rollout.scoring import sample_item

        session = self.session
        if self.environments:
            from rlctl.rollout.episode_setup import set_up

            with session.starting("environments"):
                self.setup = set_up(self.config, self.environments, self.chat, first)
            for note in self.setup.notes:
                session.events.emit("data", what=note)
            session.recorder.declare(self.setup.metrics)
        if self.config.rewards:
            with session.starting("rewards"):
                self.scorer.try_on_sample(sample_item(first))

    def load_encoders(self, role_files: Mapping[Role, RoleFiles]) -> None:
        """Load the tokenizers of the reward models. Raises DataError."""
        sections = model_rewards(self.config.rewards)
        if not sections:
            return
        from rlctl.launch.reward_models import load_encoder

        for index, section in sections.items():
            role = written_roles(self.config)[reward_role(index)]
            with self.session.starting(f"{role.name}: tokenizer"):
                encoder = load_encoder(section, role, role_files[role.name], self.settled.max_length)
            if encoder.chat.template is None:
                text = f"{role.name}: its tokenizer has no chat template: the texts of the messages follow each other"
                self.session.events.emit("warning", what=text)
            self.encoders[index] = encoder

    def start_engines(self, allocation: Allocation) -> "GeneratorPool":
        """Start the engines without waiting until they are ready. They stop an answer at the tokens of `ends`."""
        from rlctl.generation.generator_pool import GeneratorPool
        from rlctl.launch.worker_specs import engine_slots, engine_spec

        session = self.session
        config = self.config
        self.pool = GeneratorPool(
            engine_spec(self.settled, self.files, self.ends.stops, allocation.placement),
            engine_slots(self.settled, allocation, session.waits),
            str(session.logs),
            config.run.deadline_s,
            config.generation.max_restarts,
            session.events.emit,
        )
        return self.pool

    def start_scoring(
        self, allocation: Allocation, role_files: Mapping[Role, RoleFiles]
    ) -> "Collection[GeneratorPool]":
        """Start the engines that score with frozen models, without waiting until they are ready; return their pools."""
        from rlctl.generation.generator_pool import GeneratorPool
        from rlctl.launch.worker_specs import engine_spec, judge_spec, scoring_slots, scoring_spec

        session = self.session
        config = self.config
        slots = list(allocation.placement.scoring)
        sampler = engine_spec(self.settled, self.files, self.ends.stops, allocation.placement)
        for role in scoring_roles(config):
            files = role_files[role.name]
            if role.is_judge:
                spec = judge_spec(sampler, role, files, self._load_judge_chat(role, files))
            else:
                spec = scoring_spec(sampler, role, files)
            own_slots = slots[: role.num_engines]
            del slots[: role.num_engines]
            pool = GeneratorPool(
                spec,
                scoring_slots(self.settled, own_slots, allocation, session.waits),
                str(session.logs),
                config.run.deadline_s,
                config.generation.max_restarts,
                # Events name the role: the engines' numbers are those of the run's other engines too.
                partial(session.events.emit, role=role.name),
                name=role.name,
            )
            self.scoring[role.name] = pool
        return self.scoring.values()

    def _load_judge_chat(self, role: WrittenRole, files: RoleFiles) -> tuple[int, ...]:
        """Load a judge's tokenizer and chat template; return the ids that end its replies. Raises DataError."""
        from rlctl.launch.reward_models import load_own_chat

        chat = load_own_chat(Path(files.folder), files.tokenizer)
        self.judge_chats[role.name] = chat
        return chat.ends.stops

    def connect(self, allocation: Allocation, trainer: "TrainerGroup") -> None:
        """Set up the refit, which sends weights from trainer ranks to engines."""
        from rlctl.launch.worker_specs import refit_options
        from rlctl.refit.by_node import RefitByNode
        from rlctl.refit.refit import Refit

        placement = allocation.placement
        nodes = len(placement.used_nodes)
        with self.session.starting("refit"):
            parameters = int(trainer.info()["parameters"])
            if nodes > 1 and transport_of(self.settled, placement) != "broadcast":
                leases = [node for index, node in enumerate(allocation.nodes) if node and index in placement.used_nodes]
                folders = {node.id: self._new_transit(node.folder, placement, parameters) for node in leases}
                self.pool.connect(RefitByNode(trainer.group, refit_options(self.settled, placement, ""), folders))
                return
            # A broadcast to several nodes passes through no folder.
            folder = self._new_transit(allocation.folder, placement, parameters) if nodes == 1 else ""
            self.pool.connect(Refit(trainer.group, refit_options(self.settled, placement, folder)))

    def open(self, stack: ExitStack) -> "tuple[RolloutDispatcher, RolloutRunner]":
        """Create the dispatcher and the runner of rollouts. `stack` closes both."""
        from rlctl.rollout.dispatcher import RolloutDispatcher

        # True if a step waits for all of its groups. Asynchronous runs do not. With a filter, a step ends once enough
        # groups pass.
        waits_for_all = not self.config.async_.enabled and not self.config.grpo.dynamic_sampling.filter
        events = self.environments.events if self.environments else None
        emit = self.session.events.emit
        dispatcher = RolloutDispatcher(self.pool, self.config.run, emit, events, waits_for_all=waits_for_all)
        stack.callback(dispatcher.close)
        runner = make_runner(self.settled, self.chat, dispatcher, self.environments, self.setup, trains=True)
        stack.callback(runner.close)
        return dispatcher, runner

    def open_scoring(self, events: EventLoop, stack: ExitStack) -> "dict[Role, FrozenScores]":
        """Return the scores of each model on engines. events: loop of the rollouts. `stack` closes them."""
        from rlctl.rollout.dispatcher import RolloutDispatcher
        from rlctl.rollout.frozen_scores import FrozenScores

        config = self.config
        emit = self.session.events.emit
        term = config.distillation
        top = term.num_top_tokens if term and gives_top(config) else 0
        frozen = {}
        for role, pool in self.scoring.items():
            if role in self.judge_chats:
                continue
            scores = FrozenScores(
                RolloutDispatcher(pool, config.run, emit, events, waits_for_all=True),
                config.run,
                emit,
                name=role,
                temperature=config.generation.temperature,
                longest=pool.longest,
                max_age=config.async_.max_age,
                has_value_head=written_roles(config)[role].has_value_head,
                top=top if is_teacher(role) else 0,
                # As in ranks, a teacher's likeliest tokens are those of the policy's tokenizer.
                num_tokens=count_tokens(Path(self.files.chat)) if top else None,
            )
            stack.callback(scores.close)
            frozen[role] = scores
        return frozen

    def open_judges(self, events: EventLoop, stack: ExitStack) -> "list[EngineJudge]":
        """Let the judges' engines answer the questions of their rewards. events: loop of the rollouts."""
        from rlctl.rollout.dispatcher import RolloutDispatcher
        from rlctl.rollout.engine_judge import EngineJudge

        config = self.config
        judges = []
        for index in served_judges(config.rewards):
            role = reward_role(index)
            pool = self.scoring[role]
            dispatcher = RolloutDispatcher(pool, config.run, self.session.events.emit, events, waits_for_all=True)
            stack.callback(dispatcher.close)
            judge = EngineJudge(dispatcher, role, self.judge_chats[role], pool.longest, config.run.seed)
            self.scorer.connect_judge(index, judge)
            judges.append(judge)
        return judges

    def open_reward_models(
        self, trainer: "TrainerGroup", frozen: "Mapping[Role, FrozenScores]"
    ) -> "ModelRewards | None":
        """Return the run's reward models; None without any. frozen: result of `open_scoring`."""
        from rlctl.launch.reward_models import open_reward_models

        if not self.encoders:
            return None
        decode = decoder(self.chat.tokenizer, special=False)
        return open_reward_models(self.config.rewards, self.encoders, frozen, trainer, self.scorer, decode)

    @property
    def score(self) -> "GroupScorer":
        """Scorer of groups. It gives rewards text without special tokens."""
        from rlctl.rollout.scoring import GroupScorer

        return GroupScorer(self.scorer, decoder(self.chat.tokenizer, special=False))

    @property
    def decode(self) -> "Decode":
        """Function from tokens to text with special tokens, for the records of rollouts."""
        return decoder(self.chat.tokenizer, special=True)

    def _new_transit(self, make_folder: Callable[[str, str | None], str], placement: Placement, parameters: int) -> str:
        """Create a folder for weights in transit, with room for two copies. make_folder: see `Allocation.folder`."""
        copy_bytes = parameters * DTYPE_BYTES[self.settled.generation_dtype]
        root = shared_memory(2 * copy_bytes + _BESIDE_BYTES) if placement.device == "cpu" else shared_memory()
        if root is None:
            free_mib = free_bytes(SHARED_MEMORY) >> 20
            text = (
                f"{SHARED_MEMORY} has {free_mib} MiB free, weights in transit take 2 x {copy_bytes >> 20} MiB: they go "
                "through the disk, which is slower; in a container: docker run --shm-size=2g"
            )
            self.session.events.emit("warning", what=text)
        return make_folder(f"rlctl-{self.session.run_dir.name}-", root)


def held_out_tasks(settled: SettledGrpo, chat: Chat, emit: Emit) -> list[Task]:
    """Read and tokenize the tasks of a validation. Raises DataError for a bad row or a prompt that is too long.

    emit: called with a `warning` event for each finding in the rows.
    """
    config = settled.config
    loaded = [load_prompts(config, part.section, chat, part.rows) for part in part_of(config, "validation")]
    for line in chain.from_iterable(report.warnings for _, report in loaded):
        emit("warning", what=line)
    all_tasks = list(chain.from_iterable(tasks for tasks, _ in loaded))
    tasks = first_of_each(all_tasks, config.validation.max_prompts)
    check_room(tasks, config.generation.max_new_tokens, settled.max_length)
    return tasks


def make_runner(
    settled: SettledGrpo,
    chat: Chat,
    engines: "Engines",
    environments: "EnvironmentPool | None",
    setup: "EpisodeSetup | None",
    *,
    trains: bool,
) -> "RolloutRunner":
    """Return the runner of rollouts. Its player depends on the config: one turn, a rollout function, an agent, or
    episodes.

    setup: facts about the environments. trains: True if a trainer learns from the rollouts.
    """
    from rlctl.rollout.runner import RolloutRunner

    if environments is None or setup is None:
        from rlctl.rollout.players.single_turn import SingleTurnPlayer

        return RolloutRunner(SingleTurnPlayer(), engines)
    from rlctl.rollout.episode_setup import episode_limits

    config = settled.config
    limits = episode_limits(settled, trains)
    if config.rollout is not None:
        from rlctl.rollout.players.function import FunctionPlayer

        assert settled.facts
        function = FunctionPlayer(
            environments,
            chat,
            limits,
            needs_reward=not config.rewards,
            num_token_ids=settled.facts.vocab,
        )
        return RolloutRunner(function, engines)
    if config.agent.is_enabled:
        from rlctl.rollout.players.agent import AgentPlayer, most_agents

        assert settled.facts
        agent = AgentPlayer(
            environments,
            chat,
            limits,
            needs_reward=not config.rewards,
            num_token_ids=settled.facts.vocab,
            max_agents=most_agents(config.agent),
        )
        return RolloutRunner(agent, engines)
    from rlctl.rollout.players.environment import EnvironmentPlayer

    player = EnvironmentPlayer(environments, setup.contracts, chat, limits, setup.tool_format)
    return RolloutRunner(player, engines)


def check_room(tasks: list[Task], answer: int, length: int) -> None:
    """Raise DataError if a prompt plus `answer` tokens exceeds the model's `length`, all in tokens."""
    longest = max(tasks, key=lambda task: len(task.tokens))
    if len(longest.tokens) + answer > length:
        raise DataError(
            f"prompt {longest.id} has {len(longest.tokens)} tokens; with generation.max_new_tokens={answer} that is "
            f"above the longest sequence, {length}: data.max_prompt_length={length - answer} leaves such prompts out"
        )


def shared_memory(nbytes: int = 0) -> str | None:
    """Return the folder of shared memory if it has more than `nbytes` bytes free, else None."""
    return str(SHARED_MEMORY) if free_bytes(SHARED_MEMORY) > nbytes else None


def decoder(tokenizer: Any, special: bool) -> "Decode":
    """Return a function from lists of token ids to texts. special: keep special tokens in the text."""
    fast = tokenizer.backend_tokenizer
    return lambda rows: fast.decode_batch(rows, skip_special_tokens=not special)
