"""Config sections in which every `auto` has a value, and the record of each such choice."""

# ruff: noqa: RUF009  (spec() makes a field, not a default)

from dataclasses import dataclass
from typing import Literal

from rlctl.config.fields import spec
from rlctl.config.grpo_schema import GenerationSection
from rlctl.config.trainer_schema import TrainerSection
from rlctl.models.adapters import AdapterSpec
from rlctl.models.facts import ModelSizes

Dtype = Literal["float32", "bfloat16"]
DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Choice:
    """Value that was chosen for a key at `auto`."""

    # Dotted key.
    key: str
    value: bool | int | float | str
    # Reason as text for the user.
    why: str


@dataclass(frozen=True)
class TeacherUse:
    """Teacher from which the ranks compute a divergence in an update, see `grpo.loss.distillation.over`."""

    sizes: ModelSizes
    # True if it is resident: its pass precedes the loss of each micro-batch. False if it is swapped: its weights
    # replace the policy's for a pass over the whole share of an update.
    is_resident: bool
    # Bytes that a token's side keeps from the teacher's pass to the loss.
    token_bytes: int
    # Tokens of a rank's share of an update, at most.
    update_tokens: int
    # True if engines give its likeliest tokens, so that a rank has no weights of it.
    is_on_engines: bool = False


@dataclass(frozen=True)
class TrainerSettings(TrainerSection):
    """Section `trainer` of a run, with a value for each `auto`."""

    replicas: int = spec("The copies of weights and optimizer state.")
    micro_batch_tokens: int = spec("The tokens of a pack.")
    dtype: Dtype = spec("The compute dtype.")
    activation_checkpointing: bool = spec("Layers are recomputed.")
    logprob_chunk_tokens: int = spec("The tokens whose logits are made at one time.")
    logprob_kept_tokens: int = spec("The tokens whose logits are kept for the backward pass.")
    compile: bool = spec("The trainer is compiled.")
    # Tokens of the longest row (0: unknown) if a micro-batch has a padded row for each sequence, see
    # `ModelSizes.one_sequence_a_row`. None: sequences are packed.
    row_tokens: int | None = None
    # Tokens of a rank's share of an update, at most; None: not bounded.
    update_tokens: int | None = None
    # Adapters that are trained in place of the weights; None: all weights are trained.
    adapters: AdapterSpec | None = None
    # Teacher of a divergence that an update computes; None for no such divergence.
    teacher: TeacherUse | None = None
    # Bytes of a rank's shard of the critic's float32 weights on the same GPU; 0 without critic, and on a CPU.
    critic_bytes: int = 0

    @property
    def is_padded(self) -> bool:
        """True if a micro-batch has a padded row for each sequence."""
        return self.row_tokens is not None

    @property
    def one_micro_batch(self) -> bool:
        """True if a rank's share of an update always fits one micro-batch."""
        bound = self.update_tokens
        return bound is not None and bound <= self.micro_batch_tokens and not self.is_padded


@dataclass(frozen=True)
class GenerationSettings(GenerationSection):
    """Section `generation` of a run, with a value for each `auto`."""

    dtype: Dtype = spec("The dtype of the engines' weights.")
    max_num_seqs: int = spec("The sequences that an engine decodes at a time.")
    gpu_memory_utilization: float = spec("The share of a device's memory that an engine uses.")
    sleep: bool = spec("Engines free their memory while the trainer works.")
    prefix_caching: bool = spec("Requests reuse keys and values of a prefix.")
    cache_mib: int | None = spec(
        "MiB of an engine's key-value cache, a device. None: vLLM takes the memory that it finds free, which fails "
        "while a trainer allocates."
    )
