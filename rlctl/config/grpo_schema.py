"""Schema of the sections that only a GRPO run has: rewards, algorithm, asynchronous training, generation, refit."""

# ruff: noqa: RUF009  (spec() makes a field, not a default)

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from rlctl.config.fields import MOST_PROCESSES, MOST_SEQUENCES, Elsewhere, seconds, spec
from rlctl.config.role_schema import DistillationSection


@dataclass
class RewardEntry:
    """Keys of every reward."""

    name: str
    weight: float = spec("The factor of this reward in the sum of all.")
    correct_at: float | None = spec(
        "This reward decides if an answer is right: it is where the reward, before its weight, is at least this value. "
        "If it is null in every reward, the first one decides, at 1."
    )


@dataclass
class RewardSection(RewardEntry):
    name: str = spec(
        "A built-in reward (exact, regex, math_verify, reasoning_gym), model, python_tests, or a function: "
        "module:function or file.py:function.",
        path="plugin",
    )
    pattern: str | None = spec(
        "Only for regex: the pattern whose first group is compared with the answer. It is null for every other reward."
    )
    timeout_s: float = seconds("A reward that takes longer than this, in seconds, has failed for that rollout.", gt=0)
    concurrency: int = spec(
        "Only for an async def: the most calls of it that run at a time, in one process.", ge=1, most=MOST_SEQUENCES
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) for each wrong value that a key's type does not exclude."""
        yield from ()


@dataclass
class ModelRewardSection(RewardEntry):
    name: Literal["model"] = spec("A reward model: its output at the last token of the conversation.")
    path: str = spec(
        "The model: a Hugging Face folder or hub name of a sequence or token classifier with one label, with its own "
        "tokenizer and chat template.",
        path="model",
    )
    place: Literal["auto", "resident", "engines"] = spec(
        "The place of its weights. resident keeps the model in the trainer's ranks, which value the rollouts of a step "
        "after the last one ended. engines is a pool of engines, on further GPUs, that values rollouts as their groups "
        "end. auto is resident."
    )
    num_engines: int = spec("Only with place engines: the number of engines.", ge=1)
    tensor_parallel_size: int = spec("Only with place engines: the GPUs of each engine.", ge=1)
    max_length: int | None = spec(
        "The most tokens of a conversation. A longer one fails, and is counted. null is twice the longest sequence of "
        "the policy. The model's own limit is never exceeded.",
        ge=2,
    )
    over: Literal["rollout", "turns"] = spec(
        "The value of an episode: the score of the whole conversation (rollout), or the mean of the scores at the end "
        "of each turn of the policy (turns)."
    )


@dataclass
class ProgramRewardSection(RewardEntry):
    name: Literal["python_tests"] = spec("The tests of a row, which a program in the answer must pass in a sandbox.")
    score: Literal["all", "share"] = spec(
        "The worth of a program. all: 1 if it passes every test of its row, else 0; they end at the first failure. "
        "share: the share of the tests that it passes."
    )
    cpu_s: float = seconds("The CPU time of one test, in seconds.", gt=0)
    idle_s: float = seconds("The time for which one test may sleep, in seconds. Waiting for a core is no sleep.", gt=0)
    wall_s: float = seconds(
        "A program whose tests take longer than this, in seconds, has no result: a failure, and no 0.", gt=0
    )
    memory_mib: int = spec("The memory of a program, in MiB.", ge=32)
    cache: bool = spec(
        "The result of a program that reads neither a clock nor random numbers is kept for the run, and serves equal "
        "programs of the same tests."
    )
    command: str | None = spec(
        "Another language than Python: a shell command that runs the file `program` with each input, for example "
        "`node program`. Only for rows whose tests are standard input and output."
    )
    column: str | None = spec("The column with the tests. null takes the known ones.")


@dataclass
class ServedJudgeSection(RewardSection):
    """Keys of a judge that engines of the run serve."""

    path: str | None = spec(
        "In place of base_url: a model that engines of the run's own serve, on further GPUs. null is for base_url.",
        path="model",
    )
    num_engines: int = spec("Only with path: the number of engines.", ge=1)
    tensor_parallel_size: int = spec("Only with path: the GPUs of each engine.", ge=1)
    max_length: int | None = spec(
        "Only with path: the most tokens of a question and its reply. null is 8192. The model's own limit is never "
        "exceeded.",
        ge=2,
    )


AnyRewardSection = ModelRewardSection | ProgramRewardSection | RewardSection


@dataclass
class DynamicSamplingSection:
    filter: Literal["rewards", "accuracy"] | None = spec(
        "Groups that are not trained, since they teach nothing: those whose rewards are all equal (rewards), or whose "
        "answers are all right or all wrong (accuracy, which a length penalty does not blur). null leaves out none."
    )
    max_extra: float = spec(
        "Other groups are sampled in place of those that the filter leaves out: for a step, at most this many times "
        "num_prompts_per_step. Further ones keep their place, and the step trains on fewer groups. 0 replaces none.",
        ge=0,
    )


@dataclass
class OverlongSection:
    penalty_tokens: int | None = spec(
        "The number of last tokens before generation.max_new_tokens that cost reward: each takes an equal part of the "
        "penalty. null takes nothing.",
        ge=1,
    )
    penalty: float = spec("Only with penalty_tokens: the loss of an answer of generation.max_new_tokens tokens.", ge=0)
    mask: bool = spec(
        "Answers that were cut at generation.max_new_tokens are not trained. Their rewards still count in the baseline "
        "of their group."
    )


# Rollouts on which one advantage depends: its group's, or all of the step's (batch).
AdvantageScope = Literal["group", "batch"]


@dataclass
class UserClassSection:
    """Keys of a user's class."""

    name: str = spec(
        "Your own class: module:Class or file.py:Class. The fields of the class are further keys.", path="plugin"
    )
    further: dict[str, Any] = spec("The fields of the class.")


@dataclass
class AdvantageSection:
    """Keys that every advantage has."""

    scope: ClassVar[AdvantageScope] = "group"
    # Names of columns that the advantage reads, see `preflight.declared_columns.COLUMNS`.
    columns: ClassVar[tuple[str, ...]] = ()

    name: str = spec("The advantage.")

    def teaches_nothing(self, size: int) -> tuple[str, str] | None:
        """Return (key, reason) if every advantage in a group of `size` rollouts is 0; None if advantages may differ."""
        return None


@dataclass
class UserAdvantageSection(UserClassSection, AdvantageSection):
    """Keys of a user's advantage."""


@dataclass
class LossSection:
    """Keys that every loss has."""

    # True: `proximal: auto` means recompute in every run.
    recomputes: ClassVar[bool] = False
    # True: the loss clips the ratio.
    clips: ClassVar[bool] = False
    # Names of columns that the loss always reads, see `preflight.declared_columns.COLUMNS`.
    columns: ClassVar[tuple[str, ...]] = ()

    name: str = spec("The loss.")
    proximal: Literal["auto", "rollout", "recompute"] = spec(
        "The old policy of the ratio. rollout uses the log-probs that the generator sampled with. recompute uses the "
        "trainer's log-probs before the update (the decoupled objective). auto is recompute in an asynchronous run, "
        "for a loss that declares it (gspo), and under generation.top_p or top_k, and else rollout."
    )
    force_on_policy_ratio: bool | None = spec(
        "Only with proximal recompute: take the policy that is being updated for the one before the update, which "
        "saves a pass over all tokens. null does so where a step makes one update, so that the two are the same."
    )
    importance_cap: float | None = spec(
        "Only with proximal recompute: weight each token by min(proximal / rollout, this value) (TIS). null weights "
        "the tokens that a mask keeps by proximal / rollout, and no token where there is no mask.",
        gt=0,
    )
    importance_mask: list[float] | None = spec(
        "Only with proximal recompute: leave out tokens whose proximal / rollout is outside [low, high] (IcePop). "
        "null leaves out none.",
        ge=0,
    )
    sequence_mask: list[float] | None = spec(
        "Only with proximal recompute: leave out rollouts whose geometric mean of proximal / rollout is outside "
        "[low, high]. null leaves out none.",
        ge=0,
    )
    age_decay: float = spec(
        "clip_low, clip_high and importance_cap - 1 are multiplied by this value once for each step of age.", gt=0, le=1
    )
    kl_coef: float = spec("The weight of the KL divergence to the reference. At 0 no reference is loaded.", ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = spec("The estimator of the KL divergence.")
    kl_max: float | None = spec(
        "The most that a token's KL term and its importance weight may be, without a gradient beyond. null bounds "
        "neither.",
        gt=0,
    )
    entropy_coef: float = spec("The weight of the entropy bonus.", ge=0)
    distillation: DistillationSection | None = spec(
        "The term that distils from a teacher, beside the policy term. null has none. {} is the defaults of "
        "distillation.yaml."
    )

    @property
    def whole_rollouts(self) -> bool:
        """True if the loss reads all rows of a rollout together, so that one micro-batch must hold them."""
        return self.sequence_mask is not None


@dataclass
class UserLossSection(UserClassSection, LossSection):
    """Keys of a user's loss."""


@dataclass
class GrpoSection:
    num_steps: int = spec("The steps of the whole run.", ge=1, most=10**9)
    num_prompts_per_step: int = spec("The prompts of a step.", ge=1, most=MOST_SEQUENCES)
    num_generations_per_prompt: int = spec(
        "The rollouts of each prompt, which are its group. 1 is for runs without rewards.", ge=1, most=MOST_SEQUENCES
    )
    updates_per_step: int = spec("The optimizer updates of a step, each on an equal share of its groups.", ge=1)
    dynamic_sampling: DynamicSamplingSection = spec("Groups that teach nothing, and others in their place.")
    overlong: OverlongSection = spec("Answers that reach generation.max_new_tokens, or come near it.")
    advantage: Annotated[AdvantageSection, Elsewhere("rlctl.grpo.advantages.sections:AnyAdvantageSection")] = spec(
        "The advantage of each rollout, by its `name`."
    )
    loss: Annotated[LossSection, Elsewhere("rlctl.grpo.losses.sections:AnyLossSection")] = spec(
        "The policy loss, by its `name`."
    )


@dataclass
class AsyncSection:
    enabled: bool = spec("Train and generate at the same time, on separate devices.")
    max_trajectory_age_steps: int = spec(
        "No group trains whose oldest token is more steps behind the trainer than this. More than 4 is unwise.", ge=1
    )
    in_flight_weight_updates: bool = spec("Rollouts go on across a refit. If false, they end before it.")
    recompute_kv_cache_after_weight_updates: bool = spec(
        "Rollouts in flight recompute their keys and values with the new weights. If false, they keep the old ones."
    )
    policy: Literal["windowed_fifo", "in_order", "ready_first"] = spec(
        "The complete groups that train next: those within a window from the oldest on (windowed_fifo), only the "
        "oldest (in_order), or any (ready_first)."
    )
    prefetch: Literal["auto", "full"] = spec(
        "The groups in flight: as many as keep the trainer busy (auto), or always as many as the bound on age allows "
        "(full)."
    )
    streamed_training: bool = spec(
        "A step begins to train on its complete groups while its last ones are being sampled. This needs one update a "
        "step, and no pass over log-probs before it."
    )
    window_fraction: float = spec(
        "Only with policy windowed_fifo: the window beyond one step's groups, as a share of all groups in flight.", ge=0
    )
    on_bound: Literal["wait", "requeue"] = spec(
        "What happens if the oldest group must train now and is still being sampled: the trainer waits for it, or its "
        "prompt is sampled again, once."
    )

    @property
    def max_age(self) -> int:
        """Largest age of a group in steps; 0 in a synchronous run."""
        return self.max_trajectory_age_steps if self.enabled else 0


@dataclass
class EngineSection:
    """Keys that every engine has. The section of an engine adds its own keys."""

    name: str = spec("The engine that samples.")


@dataclass
class UserEngineSection(EngineSection):
    """Keys of a user's engine."""

    name: str = spec(
        "Your own engine: the EngineKind of module:KIND or file.py:KIND. The fields of its options are further keys.",
        path="plugin",
    )
    further: dict[str, Any] = spec("The options of the engine.")


@dataclass(frozen=True)
class GenerationSection:
    engine: Annotated[EngineSection, Elsewhere("rlctl.preflight.engines.sections:AnyEngineSection")] = spec(
        "The engine that samples, by its `name`, with its own keys."
    )
    num_engines: int = spec("The number of engines.", ge=1, most=MOST_PROCESSES)
    tensor_parallel_size: int = spec(
        "The devices of each engine, all of one node. Layers and experts are cut over them.", ge=1, most=MOST_PROCESSES
    )
    dtype: Literal["auto", "float32", "bfloat16"] = spec(
        "The dtype of the engines' weights. auto is the trainer's compute dtype."
    )
    max_new_tokens: int = spec("The longest answer, in tokens.", ge=1)
    temperature: float = spec("The sampling temperature. Log-probs are those of the tempered distribution.", gt=0)
    top_p: float = spec(
        "Nucleus sampling: the smallest set of tokens of this probability. Below 1 the engine's log-probs are larger "
        "than the trainer's by the probability that is cut, and each token weighs less by as much.",
        gt=0,
        le=1,
    )
    top_k: int = spec(
        "Sample among this many of the likeliest tokens. 0 samples among all. Log-probs are as under top_p.", ge=0
    )
    stop_token_ids: list[int] = spec(
        "Tokens that end an answer, besides those of the model, the tokenizer and the chat template.", ge=0
    )
    max_num_seqs: int | Literal["auto"] = spec(
        "The most sequences that an engine decodes at a time. auto is 256 on a CPU, and on GPUs an engine's share of "
        "the rollouts in flight, from 256 to 512.",
        ge=1,
        most=MOST_SEQUENCES,
    )
    gpu_memory_utilization: float | Literal["auto"] = spec(
        "The share of a device's memory that an engine may use. auto is the need of a step's longest sequences "
        "where engines share the trainer's GPUs, and 0.85 elsewhere.",
        gt=0,
        le=1,
    )
    sleep: bool | Literal["auto"] = spec(
        "Only if engines share the trainer's GPUs: they free their memory while the trainer works. auto is false where "
        "both fit side by side."
    )
    kv_cache_mib: int = spec("Only on a CPU: the key-value cache of an engine, in MiB.", ge=1, most=1 << 30)
    prefix_caching: bool | Literal["auto"] = spec(
        "Requests of an engine reuse the keys and values of a common prefix: rollouts of a group their prompt, a later "
        "turn the turns before. auto is true on GPUs, and on a CPU where sequences "
        "are short enough for it to change no bit: 480 tokens of a model with heads of 32. It is false for a model "
        "with layers that carry a state."
    )
    reset_prefix_cache_after_weight_updates: bool = spec(
        "After a refit no new request or turn reuses keys and values of older weights. If false, it does."
    )
    max_restarts: int = spec("The run stops when more engines than this have died; until then each is replaced.", ge=0)
    max_generation_failures: int = spec(
        "A group is dropped when it has lost its engine more times than this; until then it is sampled again.", ge=0
    )
    forced_lengths: list[float] | None = spec(
        "Only for measurements: answers end at lengths that are drawn from a log-normal distribution, [mean, sigma], "
        "not at stop tokens. null turns it off.",
        gt=0,
    )

    @property
    def cuts_distribution(self) -> bool:
        """True if top_p or top_k truncate the distribution. Engines then return larger log-probs than the trainer."""
        return self.top_p < 1 or self.top_k > 0


@dataclass
class RefitSection:
    transport: Literal["auto", "shm", "ipc", "broadcast"] = spec(
        "The way of weights to the engines: host memory (shm), engines that read the trainers' GPU memory (ipc), or "
        "NCCL, on a CPU gloo (broadcast). auto is shm on a CPU, ipc on shared devices or from one rank to one engine, "
        "and broadcast elsewhere."
    )
    mode: Literal["auto", "staged", "direct"] = spec(
        "staged receives new weights next to the live ones while engines sample, then makes them live in one short "
        "pause. direct receives into the live weights and needs no memory. auto is staged where sampling goes on and "
        "memory allows it."
    )
    num_buffers: int = spec(
        "The buffers at each end that weights pass through. With broadcast from several ranks an engine has twice as "
        "many, for tensors that cannot be received into their place.",
        ge=1,
    )
    buffer_memory_ratio: float = spec(
        "The most memory of a buffer, as a share of the device's. It is never over 5 GiB.", gt=0, le=0.5
    )
    checksum: Literal["auto", "all", "sampled", "off"] = spec(
        "The tensors whose bytes are compared after each refit. auto is all on a CPU, and one in 16 (sampled) on GPUs."
    )
    timeout_s: float = seconds("The longest that one end of a refit waits for the other, in seconds.", gt=0)
