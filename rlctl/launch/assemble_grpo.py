"""Assembly of the parts that only a GRPO run has: its tasks, and the parity check of trainer and engines."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rlctl.data.chat import Chat
from rlctl.data.cursor import TaskSource
from rlctl.data.load_data import RunRows
from rlctl.data.tasks import Task
from rlctl.launch.critic import find_critic, load_critic, start_critic
from rlctl.launch.loading import RunData, load_run_tasks
from rlctl.launch.precompile import precompile, precompiles
from rlctl.launch.roles import RoleFiles
from rlctl.launch.runtime import Allocation
from rlctl.launch.sampling import SamplingParts
from rlctl.launch.session import Session
from rlctl.models.model_files import ModelFiles
from rlctl.preflight.critic import critic_settings
from rlctl.preflight.declared_columns import Role, users_metrics
from rlctl.preflight.machine import Device
from rlctl.preflight.settled import SettledGrpo
from rlctl.run.fingerprint import digest_rows

if TYPE_CHECKING:
    from rlctl.grpo.components import GrpoComponents
    from rlctl.grpo.critic import Critic
    from rlctl.grpo.loop import GrpoLoop
    from rlctl.telemetry.resource_monitor import ResourceMonitor
    from rlctl.training.trainer_group import TrainerGroup
    from rlctl.workers.group import WorkerGroup


@dataclass
class GrpoParts:
    """`AlgorithmParts` of a GRPO run."""

    session: Session
    settled: SettledGrpo
    files: ModelFiles
    sampling: SamplingParts
    # Models of the run's roles besides the policy.
    role_files: Mapping[Role, RoleFiles]
    probe_only: bool
    # Ranks of the critic; None in a run without one, and before `start_models`.
    critic_group: "WorkerGroup | None" = None

    def load(self, chat: Chat, rows: RunRows) -> RunData[Task]:
        """Tokenize the tasks. Try environments, rewards and a user's advantage on the first task."""
        from rlctl.grpo.advantages.trial import try_advantage

        session = self.session
        with session.starting("data"):
            data = load_run_tasks(self.settled, rows, chat, session.events.emit)
        session.depend_on_rows(digest_rows(data.train))
        self.sampling.load_encoders(self.role_files)
        self.sampling.try_on(data.train[0])
        advantage_line, failed = try_advantage(self.settled.config)
        if failed:
            session.events.emit("warning", what=advantage_line)
        return data

    def start_models(self, allocation: Allocation) -> "list[WorkerGroup]":
        """Start the critic, if the run has one."""
        folder = find_critic(self.settled, self.files, self.session.run_dir.path)
        if folder is None:
            return []
        self.critic_group = start_critic(self.session, self.settled, folder, allocation)
        return [self.critic_group]

    def make_loop(
        self,
        allocation: Allocation,
        trainer: "TrainerGroup",
        source: TaskSource,
        data: RunData[Task],
    ) -> "GrpoLoop | None":
        """Connect the refit and send the engines the trainer's weights. Compare log-probs of both if `run.probe` is
        set.
        """
        from rlctl.grpo.components import Devices, GrpoComponents
        from rlctl.grpo.loop import GrpoLoop
        from rlctl.grpo.parity_check import bound_of, bound_of_steps, probe
        from rlctl.launch.worker_specs import training_cost

        session = self.session
        settled = self.settled
        sampling = self.sampling
        placement = allocation.placement
        config = settled.config
        pool = sampling.pool
        bound = config.health.max_token_mult_prob_error
        sampling.connect(allocation, trainer)
        # Engines on the trainer's devices sleep during the warm-up. Other runs warmed up while their engines started.
        if pool.sleeps and precompiles(settled):
            pool.rest()
            precompile(session, settled, trainer)
        device_name, flops = training_cost(self.files, trainer.info())
        devices = Devices(
            trainer=placement.trainer_devices,
            generator=placement.generator_devices,
            all=placement.all_devices,
            name=device_name,
            flops=flops,
        )
        with ExitStack() as stack:
            dispatcher, runner = sampling.open(stack)
            frozen = sampling.open_scoring(dispatcher.events, stack)
            components = GrpoComponents(
                trainer=trainer,
                pool=pool,
                dispatcher=dispatcher,
                runner=runner,
                source=source,
                validation=data.validation,
                score=sampling.score,
                recorder=session.recorder,
                devices=devices,
                monitor=self._monitor(placement.device, trainer),
                critic=self._make_critic(trainer),
                frozen=frozen,
                judges=sampling.open_judges(dispatcher.events, stack),
                model_rewards=sampling.open_reward_models(trainer, frozen),
                decode=sampling.decode,
                program_metrics=sampling.scorer.programs.take_metrics,
                failure_cause=self._failure_cause,
                tool_cause=self._tool_cause,
            )
            self._try_reward_models(components, data)
            if config.run.probe or self.probe_only:
                with session.starting("probe"):
                    probed = probe(
                        config,
                        components,
                        tasks=data.validation or data.train,
                        version=session.start,
                        dtype=pool.dtype,
                        emit=session.events.emit,
                        bound=bound_of(settled, placement.device, pool.dtype),
                    )
                bound = bound_of_steps(bound, probed.gap.token_mult_prob_error, pool.dtype)
                session.events.emit("probe", **probed.event, bound=bound)
            else:
                pool.sync(session.start)
            if self.probe_only:
                return None
            # From here on the loop owns the dispatcher and the runner, and closes them.
            stack.pop_all()
        session.recorder.declare(users_metrics(settled.config))
        return GrpoLoop(settled, components, session.stops, bound)

    def _try_reward_models(self, components: "GrpoComponents", data: RunData[Task]) -> None:
        """Value the first task's own answer by each reward model. Raises RewardError."""
        from rlctl.rollout.scoring import sample_item

        if components.model_rewards is None:
            return
        pool = components.pool
        if components.model_rewards.needs_ranks and pool.sleeps and not pool.asleep:
            pool.rest()
        with self.session.starting("reward model"):
            values = components.model_rewards.try_on(sample_item(data.train[0]))
        text = ", ".join(f"{name} {value:g}" for name, value in values.items())
        self.session.events.emit("data", what=f"the first row's own answer has the value {text}")

    def _make_critic(self, policy: "TrainerGroup") -> "Critic | None":
        """Return the critic with the weights of the run's checkpoint, if there is one; None in a run without critic."""
        from rlctl.grpo.critic import Critic
        from rlctl.training.trainer_group import TrainerGroup

        section = self.settled.config.critic
        trainer = critic_settings(self.settled)
        if self.critic_group is None or section is None or trainer is None:
            return None
        if self.session.checkpoint:
            load_critic(self.critic_group, self.session.checkpoint)
        shares_gpus = self.settled.device == "cuda"
        return Critic(TrainerGroup(self.critic_group, trainer), policy, section, shares_gpus=shares_gpus)

    def _monitor(self, device: Device, trainer: "TrainerGroup") -> "ResourceMonitor":
        from rlctl.generation.engine import Engine
        from rlctl.telemetry.resource_monitor import ResourceMonitor
        from rlctl.training.trainer_worker import TrainerWorker

        memories = {
            "trainer": lambda: trainer.group.call(TrainerWorker.memory),
            "engine": lambda: self.sampling.pool.call(Engine.memory),
        }
        memories |= {role: partial(pool.call, Engine.memory) for role, pool in self.sampling.scoring.items()}
        return ResourceMonitor(device, memories)

    def _failure_cause(self) -> str:
        """Return the most frequent error of episodes, else of rewards; empty if none failed."""
        environments = self.sampling.environments
        cause = environments.failures.most_common() if environments else ""
        return cause or self.sampling.scorer.failures.most_common()

    def _tool_cause(self) -> str:
        """Return the most frequent error of the environments' tools; empty if there was none."""
        environments = self.sampling.environments
        return environments.tool_errors.most_common() if environments else ""
