"""The sections of the models besides the policy, and of the loss's term that distils from a teacher."""

# ruff: noqa: RUF009  (spec() makes a field, not a default)

from dataclasses import dataclass
from typing import Literal

from rlctl.config.fields import spec

Place = Literal["auto", "swapped", "resident", "engines"]
_PLACE = (
    "swapped puts the weights in the place of the policy's for each pass: the model has the policy's architecture. "
    "resident keeps a further model in the trainer's ranks, of any architecture with the same vocabulary. auto "
    "takes the faster one that fits."
)


@dataclass(frozen=True)
class RoleSection:
    """Keys of every role besides the policy. A section of a run that is one makes a role of its name."""

    path: str | None = spec("The model.", path="model")
    place: Place = spec(f"The place of its weights. {_PLACE}")


@dataclass(frozen=True)
class ReferenceSection(RoleSection):
    path: str | None = spec(
        "The model of the KL term: a Hugging Face folder or hub name, an adapter, or a run. null is the policy's first "
        "weights.",
        path="model",
    )
    place: Place = spec(f"The place of its weights. {_PLACE} The policy's first weights are swapped.")


@dataclass(frozen=True)
class TeacherSection(RoleSection):
    path: str | None = spec(
        "The teacher: a Hugging Face folder or hub name, an adapter, or a run. null is the base that lora names.",
        path="model",
    )
    lora: str | None = spec("An adapter over path: a PEFT folder, or a run. null is none.", path="model")
    place: Place = spec(
        f"The place of its weights. {_PLACE} engines is a pool of engines of its own, on GPUs of its own, that scores "
        "rollouts as they end."
    )
    num_engines: int = spec("Only with place engines: the number of engines.", ge=1)
    tensor_parallel_size: int = spec("Only with place engines: the GPUs of each engine.", ge=1)


@dataclass(frozen=True)
class DistillationSection:
    coef: float = spec("The weight of the KL divergence to the teacher.", gt=0)
    over: Literal["sampled", "vocabulary", "top_k"] = spec(
        "The tokens of the divergence at each place: the sampled one, all of the vocabulary, or the "
        "likeliest ones of the teacher."
    )
    divergence: Literal["reverse_kl", "forward_kl", "jensen_shannon"] = spec(
        "Only over vocabulary or top_k: the divergence. Over sampled tokens it is the reverse KL."
    )
    beta: float = spec("Only with jensen_shannon: the teacher's share of the mixture.", gt=0, lt=1)
    num_top_tokens: int = spec("Only over top_k: the number of the teacher's likeliest tokens.", ge=1)
    rest: Literal["bin", "renormalized"] = spec(
        "Only over top_k: the mass of all other tokens is one more token (bin), or it is left out, and the known "
        "tokens are scaled to a sum of 1 (renormalized)."
    )
    log_ratio_floor: float = spec(
        "Only over sampled: log(teacher / policy) of a token counts as at least this. The gradient keeps its sign "
        "there.",
        lt=0,
    )
