"""The parts of a run that only GRPO has: rewards, engines, the refit, and the parity check before step 1."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlctl.config.schema import GrpoConfig
from rlctl.data.chat import Chat
from rlctl.data.cursor import TaskSource
from rlctl.data.files import DataError
from rlctl.data.load import RunRows, load_prompts
from rlctl.data.mixture import first_of_each
from rlctl.data.tasks import Task
from rlctl.launch.loading import DataLoading, RunData
from rlctl.launch.runtime import Allocation
from rlctl.launch.session import Session
from rlctl.launch.warm_up import warm_up, warms_up
from rlctl.models.model_files import ModelFiles
from rlctl.preflight.resolved import Device, Resolved
from rlctl.preflight.tuning import Tuned
from rlctl.run.fingerprint import digest_rows
from rlctl.workers.reaper import SHARED_MEMORY, free_bytes

if TYPE_CHECKING:
    from rlctl.environments.pool import EnvironmentPool
    from rlctl.generation.pool import GeneratorPool
    from rlctl.grpo.loop import GrpoLoop
    from rlctl.rewards.scorer import Scorer
    from rlctl.rollout.dispatcher import RolloutDispatcher
    from rlctl.rollout.episode_setup import EpisodeSetup
    from rlctl.rollout.types import Decode, RolloutPlayer
    from rlctl.telemetry.resource_monitor import ResourceMonitor
    from rlctl.training.trainer_group import TrainerGroup

# Room in shared memory beside the weights in transit, for what else a run keeps there.
_BESIDE_BYTES = 16 << 20


@dataclass
class GrpoParts:
    """The parts of a GRPO run, see `AlgorithmParts`."""

    session: Session
    config: GrpoConfig
    files: ModelFiles
    scorer: "Scorer"
    # None: rollouts have one turn.
    environments: "EnvironmentPool | None"
    probe_only: bool
    # See `tuning.Tuned`.
    kv_cache_mib: int | None = field(init=False)
    pool: "GeneratorPool" = field(init=False)
    chat: Chat = field(init=False)
    # Set while the data load, in a run with environments.
    setup: "EpisodeSetup" = field(init=False)

    def __post_init__(self) -> None:
        self.updates = self.config.grpo.num_steps * self.config.grpo.updates_per_step
        self.temperature = self.config.generation.temperature

    def settle(self, tuned: Tuned) -> None:
        """Take over the values that were chosen, see `AlgorithmParts`."""
        assert isinstance(tuned.config, GrpoConfig)
        self.config, self.kv_cache_mib = tuned.config, tuned.kv_cache_mib

    def load(self, chat: Chat, rows: RunRows) -> RunData[Task]:
        """Tokenize the tasks, and try the rewards on the first one."""
        from rlctl.rollout.scoring import sample_item

        session, config = self.session, self.config
        length, answer = Resolved(config).max_length(self.files.max_length), config.generation.max_new_tokens
        found: dict[str, list[Task]] = {"train": [], "validation": []}
        with session.starting("data"):
            for part in rows.parts(config.data):
                tasks, report = load_prompts(config, part.section, chat, part.rows)
                found[part.of] += tasks
                session.events.emit("data", what=f"{part.name}: {report}")
                check_room(tasks, answer, length)
        session.depend_on_rows(digest_rows(found["train"]))
        if self.environments:
            from rlctl.rollout.episode_setup import set_up

            with session.starting("environments"):
                self.setup = set_up(config, self.environments, chat, found["train"][0])
            for note in self.setup.notes:
                session.events.emit("data", what=note)
        if config.rewards:
            with session.starting("rewards"):
                self.scorer.try_on_sample(sample_item(found["train"][0]))
        return RunData(found["train"], first_of_each(found["validation"], config.validation.max_prompts))

    def start_engines(self, allocation: Allocation, loading: DataLoading[Task]) -> "GeneratorPool":
        """Start the engines, which are made with the tokens that end an answer."""
        from rlctl.generation.pool import GeneratorPool
        from rlctl.launch.worker_specs import engine_slots, engine_spec

        session, config = self.session, self.config
        self.chat, ends = loading.chat.result()
        self.pool = GeneratorPool(
            engine_spec(config, self.files, ends.stops, allocation.placement, self.kv_cache_mib),
            engine_slots(config, allocation, session.waits),
            str(session.logs),
            config.run.deadline_s,
            config.generation.max_restarts,
            session.events.emit,
        )
        return self.pool

    def make_loop(
        self, allocation: Allocation, trainer: "TrainerGroup", source: TaskSource, data: RunData[Task]
    ) -> "GrpoLoop | None":
        """Open the refit, bring the engines to the trainer's version, and compare the two if that is asked."""
        from rlctl.grpo.components import Devices, GrpoComponents
        from rlctl.grpo.loop import GrpoLoop
        from rlctl.grpo.parity_check import probe
        from rlctl.launch.worker_specs import training_cost
        from rlctl.rollout.dispatcher import RolloutDispatcher
        from rlctl.rollout.scoring import GroupScorer

        session, config, pool, placement = self.session, self.config, self.pool, allocation.placement
        self._connect(allocation, trainer)
        if pool.sleeps and warms_up(config):
            pool.rest()
            warm_up(session, config, trainer)
        score = GroupScorer(self.scorer, decoder(self.chat.tokenizer, special=False))
        decode = decoder(self.chat.tokenizer, special=True)
        devices = Devices(
            placement.trainer_devices,
            placement.generator_devices,
            placement.all_devices,
            *training_cost(self.files, trainer.info()),
        )
        monitor = self._monitor(placement.device, trainer)
        with ExitStack() as stack:
            dispatcher = RolloutDispatcher(pool, config.run, session.events.emit)
            stack.callback(dispatcher.close)
            setup = self.setup if self.environments else None
            player = make_player(config, self.files, self.chat, dispatcher, self.environments, setup)
            stack.callback(player.close)
            components = GrpoComponents(
                trainer,
                pool,
                dispatcher,
                player,
                source,
                data.validation,
                score,
                session.recorder,
                devices,
                monitor,
                decode,
                self._failure_cause,
            )
            if config.run.probe or self.probe_only:
                with session.starting("probe"):
                    tasks = data.validation or data.train
                    gap = probe(config, components, tasks, session.start, pool.dtype)
                session.events.emit("probe", **vars(gap))
            else:
                pool.sync(session.start)
            if self.probe_only:
                return None
            # From here on the loop closes the dispatcher and the player.
            stack.pop_all()
        return GrpoLoop(config, components, session.stops)

    def _monitor(self, device: Device, trainer: "TrainerGroup") -> "ResourceMonitor":
        from rlctl.generation.engine import Engine
        from rlctl.telemetry.resource_monitor import ResourceMonitor
        from rlctl.training.worker import TrainerWorker

        memories = {
            "trainer": lambda: trainer.group.call(TrainerWorker.memory),
            "engine": lambda: self.pool.call(Engine.memory),
        }
        return ResourceMonitor(device, memories)

    def _failure_cause(self) -> str:
        """Return what most episodes, or rewards, that failed failed of; empty where none did."""
        environment = self.environments.failures.most_common() if self.environments else ""
        return environment or self.scorer.failures.most_common()

    def _connect(self, allocation: Allocation, trainer: "TrainerGroup") -> None:
        from rlctl.launch.worker_specs import refit_options
        from rlctl.refit.refit import Refit

        placement = allocation.placement
        dtype = Resolved(self.config, placement.device).generation_dtype
        with self.session.starting("refit"):
            parameters = int(trainer.info()["parameters"])
            folder = self._transit(allocation, parameters, dtype) if len(placement.used) == 1 else ""
            self.pool.connect(Refit(trainer.group, refit_options(self.config, placement, dtype, folder)))

    def _transit(self, allocation: Allocation, parameters: int, dtype: str) -> str:
        """Return a new folder for weights in transit, which are there twice."""
        nbytes = 2 * parameters * (4 if dtype == "float32" else 2)
        root = shared_memory(nbytes + _BESIDE_BYTES) if allocation.placement.device == "cpu" else shared_memory()
        if root is None:
            free, needed = f"{free_bytes(SHARED_MEMORY) >> 20} MiB free", f"2 x {nbytes >> 21} MiB"
            what = f"{SHARED_MEMORY} has {free}, weights in transit take {needed}"
            what += ": they go through the disk, which is slower; in a container: docker run --shm-size=2g"
            self.session.events.emit("warning", what=what)
        return allocation.folder(f"rlctl-{self.session.run_dir.name}-", root)


def judges(stack: ExitStack, session: Session, config: GrpoConfig) -> "tuple[Scorer, EnvironmentPool | None]":
    """Return the rewards and the environments of a run, whose processes `stack` ends. For before Ray starts."""
    from rlctl.rewards.scorer import Scorer

    scorer = stack.enter_context(Scorer(config.rewards, session.logs, session.events.emit))
    if not config.environment.enabled:
        return scorer, None
    from rlctl.rollout.episode_setup import environment_pool

    return scorer, stack.enter_context(environment_pool(config, session.logs, session.events.emit))


def make_player(
    config: GrpoConfig,
    files: ModelFiles,
    chat: Chat,
    dispatcher: "RolloutDispatcher",
    environments: "EnvironmentPool | None",
    setup: "EpisodeSetup | None",
) -> "RolloutPlayer":
    """Return what plays rollouts: of one turn, or episodes where there are environments, whose `setup` is known."""
    from rlctl.rollout.single_turn import SingleTurnPlayer

    if environments is None or setup is None:
        return SingleTurnPlayer(dispatcher)
    from rlctl.rollout.episode_setup import episode_limits
    from rlctl.rollout.player import EpisodePlayer

    limits = episode_limits(config, Resolved(config).max_length(files.max_length))
    return EpisodePlayer(dispatcher, environments, setup.contracts, chat, limits, setup.tool_format)


def check_room(tasks: list[Task], answer: int, length: int) -> None:
    """Raise DataError if a prompt leaves less than `answer` tokens of the model's `length`."""
    longest = max(tasks, key=lambda task: len(task.tokens))
    if len(longest.tokens) + answer > length:
        raise DataError(
            f"prompt {longest.id} has {len(longest.tokens)} tokens; with generation.max_new_tokens={answer} that is "
            f"above the longest sequence, {length}: data.max_prompt_length={length - answer} leaves such prompts out"
        )


def shared_memory(nbytes: int = 0) -> str | None:
    """Return the folder of shared memory if it has room for so many bytes, else None."""
    return str(SHARED_MEMORY) if free_bytes(SHARED_MEMORY) > nbytes else None


def decoder(tokenizer: Any, special: bool) -> "Decode":
    """Return a function from rows of tokens to texts. special: keep special tokens."""
    fast = tokenizer.backend_tokenizer
    return lambda rows: fast.decode_batch(rows, skip_special_tokens=not special)
