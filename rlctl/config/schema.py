"""Schema of a run's config: sections of all kinds of run, sections of SFT, and the two kinds themselves.

A key that is a Python keyword has a trailing underscore as a field (`async_`), but not in a config.
"""

# ruff: noqa: RUF009  (spec() makes a field, not a default)

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from rlctl.config.critic_schema import CriticSection
from rlctl.config.data_schema import DataSection
from rlctl.config.environment_schema import AgentSection, EnvironmentSection
from rlctl.config.fields import MOST_SEQUENCES, Elsewhere, seconds, spec
from rlctl.config.grpo_schema import AnyRewardSection, AsyncSection, GenerationSection, GrpoSection, RefitSection
from rlctl.config.health_schema import GrpoHealthSection, SftHealthSection
from rlctl.config.plugins import SANDBOXED, needs_answers
from rlctl.config.role_schema import DistillationSection, ReferenceSection, RoleSection, TeacherSection
from rlctl.config.sandbox_schema import SandboxSection
from rlctl.config.telemetry_schema import TelemetrySection
from rlctl.config.trainer_schema import LoraSection, TrainerSection


@dataclass
class RunSection:
    name: str | None = spec("The name of the run and of its directory. null makes one up: KIND--MODEL--N.")
    dir: str = spec("The folder that holds the run directories.", path="folder")
    seed: int = spec("The seed of everything random in the run.", ge=0)
    probe: bool = spec(
        "Before step 1, compare the weights and log-probs of trainer and generator. The run stops if they differ."
    )
    log_every: int = spec(
        "The steps between two printed lines, where the output is not a terminal. The last step has one too.", ge=1
    )
    deadline_s: float = seconds("The longest wait for one answer of a worker, in seconds.", gt=0)
    explain_after_s: float = seconds(
        "When nothing has arrived for this many seconds, the run says who waits for whom.", gt=0
    )
    max_restarts: int = spec(
        "After a loss of processes the run restarts from its last checkpoint, at most this many times.", ge=0
    )
    restart_backoff_s: float = seconds(
        "The pause before a restart, in seconds. It doubles each time, up to a minute.", ge=0
    )


@dataclass
class ModelSection:
    path: str = spec(
        "A Hugging Face folder, or the hub name, of a causal language model. A run, by its directory or its name, is "
        "its newest checkpoint. A checkpoint's folder is that checkpoint.",
        path="model",
    )
    tokenizer: str | None = spec("The folder or hub name of the tokenizer. null is the model's own.", path="model")
    random_init: bool = spec(
        "Start from random weights, drawn with run.seed. The model's folder then gives shape and tokenizer only."
    )
    max_length: int | None = spec(
        "The longest sequence, prompt and answer together, in tokens. null is the model's max_position_embeddings.",
        ge=2,
    )


@dataclass
class PlacementSection:
    wait_s: float = seconds(
        "On a cluster: the longest wait for room, in seconds, of a run with --wait or of one that restarts.", ge=0
    )
    trainer: Literal["pack", "spread"] = spec(
        "Trainer ranks are placed on as few nodes as possible (pack), or in turn on all nodes with room (spread)."
    )
    cpus_per_process: float = spec("On a cluster without GPUs: the CPUs that each rank and engine reserves.", gt=0)
    nodes: str | None = spec(
        "A planned cluster, for --dry-run only: nodes x GPUs as 32x8, or 32x8x141 with the GiB of a GPU "
        "(79, of an H100, if left out). A run is not started with it."
    )


@dataclass
class GrpoPlacementSection(PlacementSection):
    generator: Literal["pack", "spread"] = spec(
        "Engines are placed on as few nodes as possible (pack), or in turn on all nodes with room (spread). The "
        "devices of one engine are on one node."
    )
    colocated: bool | None = spec(
        "Engines share the trainer's devices: on GPUs they sleep while it trains; on several nodes, each has equal "
        "shares of ranks and engines. null is the opposite of async.enabled."
    )


@dataclass
class ValidationSection:
    every: int = spec("The steps between validations. 0 validates never.", ge=0)
    at_start: bool = spec("Validate before step 1.")
    num_generations: int = spec(
        "The answers to each prompt. With 1 the accuracy is measured, with k also pass@k.", ge=1, most=MOST_SEQUENCES
    )
    temperature: float = spec("The sampling temperature. 0 is greedy.", ge=0)
    max_prompts: int | None = spec("Use only the first prompts, this many. null uses all.", ge=1)


@dataclass
class CheckpointSection:
    every: int = spec("The steps between checkpoints. 0 saves none on the way.", ge=0)
    at_end: bool = spec("Save after the last step too. A run that is stopped is saved in any case.")
    keep_last: int = spec("The number of newest checkpoints that are kept.", ge=1)
    keep_best: int = spec("The number of best checkpoints that are kept besides.", ge=0)
    metric: str = spec(
        "The metric by which a checkpoint is best. The largest value is best, or with a leading - the smallest."
    )
    export: bool = spec("Write the weights of each checkpoint as a Hugging Face folder too.")
    export_dtype: Literal["auto", "float32", "bfloat16"] = spec(
        "The dtype of that folder. auto is the trainer's compute dtype."
    )
    beside_training: bool = spec(
        "Copy the trainer's state to host memory and write it while the next steps train. Where the host has no room "
        "for the copy, and if false, steps wait until the checkpoint is written."
    )


@dataclass
class SftLossSection:
    nll_coef: float = spec(
        "The weight of the negative log-likelihood. 0 is for a run that learns from the teacher alone.", ge=0
    )
    distillation: DistillationSection | None = spec(
        "The term that distils from a teacher, over its vocabulary or its likeliest tokens. null has none. {} is the "
        "defaults of distillation.yaml."
    )


@dataclass
class SftSection:
    num_steps: int = spec("The steps of the whole run.", ge=1, most=10**9)
    batch_size: int = spec("The samples of a step.", ge=1, most=MOST_SEQUENCES)
    mask: Literal["all", "last"] = spec("Train on all assistant turns of a chat, or on the last one.")
    history: Literal["keep", "strip"] = spec(
        "Each turn is trained as the chat template writes it while it is the last one. Where the template writes it "
        "otherwise later, as one that drops thinking, strip begins another sample with the history as the template "
        "writes it. keep goes on in the same sample."
    )
    loss: SftLossSection = spec("The loss.")


@dataclass
class CompiledGraphSection:
    enabled: bool | Literal["require"] = spec(
        "Call the trainer ranks through a Ray Compiled Graph. Where none can be made, or its warm-up fails, true warns "
        "and makes ordinary calls, and require fails."
    )
    warmup_seq_len: int | None = spec("The tokens of a warm-up sequence. null is the longest of the run.", ge=1)
    warmup_gbs: int | None = spec("The sequences of the warm-up. null is sft.batch_size.", ge=1, most=MOST_SEQUENCES)


class StepShape(NamedTuple):
    """Sizes of one training step."""

    # Number of prompts (GRPO) or samples (SFT).
    prompts: int
    # Number of rollouts of each prompt; 1 in SFT.
    group: int
    updates: int

    @property
    def per_update(self) -> int:
        """Number of rollouts or samples in one optimizer update."""
        return self.prompts * self.group // self.updates


@dataclass
class GrpoConfig:
    """A whole GRPO run (`rlctl train grpo`)."""

    kind: Literal["grpo"] = spec("The kind of run.")
    run: RunSection = spec("The run itself: name, folder, seed, deadlines, restarts.")
    model: ModelSection = spec("The policy.")
    data: DataSection = spec("The prompts.")
    rewards: list[Annotated[AnyRewardSection, Elsewhere("rlctl.rewards.judge.sections:AnyReward")]] = spec(
        "The rewards, summed by weight. One reward decides which answers are right (correct_at). [] is for a run that "
        "learns from grpo.loss.distillation alone."
    )
    environment: EnvironmentSection = spec(
        "The other side of rollouts of several turns: a game, or tools. Its own reward is added to rewards, which may "
        "then be []. It decides if a rollout is right, at 1, unless a reward has a correct_at."
    )
    rollout: str | None = spec(
        "In place of an environment: a coroutine function play(task, policy) that samples turns by their tokens, "
        "module:function or file.py:function. Budgets, deadlines and processes are those of environment. null has "
        "none.",
        path="plugin",
    )
    agent: AgentSection = spec(
        "In place of an environment: a program that knows nothing of rlctl, and asks for the policy's turns by HTTP. "
        "Its value, or rewards, score the rollout."
    )
    sandbox: SandboxSection = spec("The sandbox of programs that the policy writes: those of tools and of rewards.")
    grpo: GrpoSection = spec("The algorithm.")
    reference: ReferenceSection = spec("The model of the KL term.")
    teacher: TeacherSection | None = spec(
        "The model that the policy is distilled from (grpo.loss.distillation). null has none."
    )
    teachers: dict[str, TeacherSection] = spec(
        "In place of teacher, several of them: NAME -> the keys of teacher. The column teacher_key of a row names its "
        "teacher. {} has none."
    )
    teacher_key: str | None = spec("Only with teachers: the column of the data set's rows that names a row's teacher.")
    roles: dict[str, RoleSection] = spec(
        "Further frozen models: NAME -> path and place, as of reference. A loss or an advantage of your own reads the "
        "log-probs of NAME as the column NAME_log_prob. {} has none."
    )
    critic: CriticSection | None = spec(
        "The model that values the states of rollouts, for grpo.advantage.name=gae (PPO). null has none. {} is the "
        "defaults of critic.yaml."
    )
    async_: AsyncSection = spec("Generation and training at the same time.")
    lora: LoraSection | None = spec(
        "Train low-rank adapters, and leave the model's own weights as they are. null trains every weight. {} is the "
        "defaults of lora.yaml."
    )
    trainer: TrainerSection = spec("The trainer.")
    generation: GenerationSection = spec("The engines that sample.")
    placement: GrpoPlacementSection = spec("The nodes and devices of trainer ranks and engines.")
    refit: RefitSection = spec("The way of weights from the trainer to the engines.")
    validation: ValidationSection = spec("Validation on held-out prompts.")
    checkpoint: CheckpointSection = spec("Checkpoints: when they are saved, and which are kept.")
    health: GrpoHealthSection = spec("Bounds on the run's health.")
    telemetry: TelemetrySection = spec("The display and the records of the run.")

    @property
    def sft(self) -> None:
        """None: this is no SFT run."""
        return None

    @property
    def distillation(self) -> DistillationSection | None:
        """Term of the loss that distils from a teacher; None for none."""
        return self.grpo.loss.distillation

    @property
    def has_turns(self) -> bool:
        """True if an environment, a rollout function or an agent plays the rollouts."""
        return self.opens_prompts or self.rollout is not None

    @property
    def runs_programs(self) -> bool:
        """True if a shipped reward or environment runs programs of the policy in the sandbox."""
        names = {choice.name for choice in self.environment.environments.values()}
        names |= {reward.name for reward in self.rewards}
        return not SANDBOXED.isdisjoint(names)

    @property
    def opens_prompts(self) -> bool:
        """True if an environment or an agent writes the prompts, so that they are known only when an episode begins."""
        return self.environment.is_enabled or self.agent.is_enabled

    @property
    def compares_apart(self) -> bool:
        """True if log-probs of trainer and engines are compared on extra tokens, sampled every `health.parity_every`
        steps.

        Else a step's own tokens are compared: they were sampled by the newest weights from the whole distribution.
        """
        return self.async_.enabled or self.generation.cuts_distribution

    @property
    def step_shape(self) -> StepShape:
        """Sizes of a step."""
        return StepShape(
            prompts=self.grpo.num_prompts_per_step,
            group=self.grpo.num_generations_per_prompt,
            updates=self.grpo.updates_per_step,
        )

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.grpo.num_steps

    @property
    def needs_prompts(self) -> bool:
        """True if every row must have a prompt. With an environment or an agent none is needed."""
        return not self.opens_prompts

    @property
    def needs_answers(self) -> bool:
        """True if every row must have a reference answer."""
        return needs_answers(self.rewards)

    @property
    def further_stops(self) -> list[int] | None:
        """Ids of tokens that end a sampled answer in addition to the model's own."""
        return self.generation.stop_token_ids


@dataclass
class SftValidationSection(ValidationSection):
    recipe: GrpoConfig | None = spec(
        "A GRPO recipe, by its name or file: its held-out prompts are sampled and scored at each validation, besides "
        "the loss. The weights are this run's; prompts, rewards, environment, lengths, temperature, seed and engines "
        "are the recipe's, whose keys are set by validation.recipe.KEY.",
        whole=True,
    )


@dataclass
class SftConfig:
    """A whole SFT run (`rlctl train sft`)."""

    kind: Literal["sft"] = spec("The kind of run.")
    run: RunSection = spec("The run itself: name, folder, seed, deadlines, restarts.")
    model: ModelSection = spec("The policy.")
    data: DataSection = spec("The samples.")
    sft: SftSection = spec("The algorithm.")
    teacher: TeacherSection | None = spec(
        "The model that the policy is distilled from (sft.loss.distillation), in the trainer's ranks. null has none."
    )
    ray_compiled_graph: CompiledGraphSection = spec("Calls to the trainer ranks through a Ray Compiled Graph.")
    lora: LoraSection | None = spec(
        "Train low-rank adapters, and leave the model's own weights as they are. null trains every weight. {} is the "
        "defaults of lora.yaml."
    )
    trainer: TrainerSection = spec("The trainer.")
    placement: PlacementSection = spec("The nodes of the trainer ranks.")
    validation: SftValidationSection = spec("Validation on held-out samples.")
    checkpoint: CheckpointSection = spec("Checkpoints: when they are saved, and which are kept.")
    health: SftHealthSection = spec("Bounds on the run's health.")
    telemetry: TelemetrySection = spec("The display and the records of the run.")

    @property
    def teachers(self) -> dict[str, TeacherSection]:
        """Empty: an SFT run has one teacher at most."""
        return {}

    @property
    def distillation(self) -> DistillationSection | None:
        """Term of the loss that distils from a teacher; None for none."""
        return self.sft.loss.distillation

    @property
    def step_shape(self) -> StepShape:
        """Sizes of a step."""
        return StepShape(prompts=self.sft.batch_size, group=1, updates=1)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.sft.num_steps

    @property
    def needs_prompts(self) -> bool:
        """True: every row must have a prompt or a chat."""
        return True

    @property
    def needs_answers(self) -> bool:
        """True: every row must have an answer or a chat."""
        return True

    @property
    def further_stops(self) -> list[int] | None:
        """None: an SFT run samples nothing."""
        return None


RunConfig = GrpoConfig | SftConfig
KINDS: dict[str, type[GrpoConfig] | type[SftConfig]] = {"grpo": GrpoConfig, "sft": SftConfig}
