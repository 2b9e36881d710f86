"""Low-rank adapters (LoRA, arXiv 2106.09685) as plain data: targets, scale, and the names of their tensors.

An adapted linear layer computes y + ((x A^T) B^T) * scale, with y the frozen layer's output. Trainer and engine compute
it in this order, with A and B rounded to the compute dtype. Names are transformers' module names plus PEFT's suffixes.
No torch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlctl.config.errors import did_you_mean
from rlctl.models.layer_kinds import LinearLayer

# Part of a module's name inside a vision-language model, which the text model alone lacks.
_INSIDE = "language_model."
LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"
# Targets by a word.
WORDS = {"all": ("attention", "mlp"), "attention": ("attention",), "mlp": ("mlp",)}
# Reason why a linear layer of each further part has no adapter.
_REFUSED_PARTS = {
    "experts": "is in a mixture of experts, whose experts and router get no adapters",
    "states": "is in a layer with states, whose fused kernels read the weight and pass an adapter by",
    "absorbed": "is folded into the attention by engines, which would leave an adapter out",
    "other": "is neither of an attention nor of an MLP",
}

# The same of modules outside the layers, or that are no linear layer, by a word of their names.
_NO_LINEAR = {
    "lm_head": "is the output: it and the embedding, tied or not, get no adapters",
    "embed_tokens": "is the embedding, which gets no adapter",
    "experts": "names experts, which get no adapters",
    "router": "is a router, which gets no adapter",
    "gate": "is a router, which gets no adapter",
}


@dataclass(frozen=True)
class AdapterTensor:
    """One tensor of an adapter."""

    # As a refit and a checkpoint have it.
    name: str
    shape: tuple[int, int]
    # Linear layer, and side of the product: A [rank, inputs], B [outputs, rank].
    target: str
    is_a: bool


@dataclass(frozen=True)
class AdapterSpec:
    """Adapters of a run: one A and one B of equal rank for each target."""

    rank: int
    alpha: float
    # Scale by the root of the rank (rsLoRA, arXiv 2312.03732).
    rslora: bool
    # Share of the inputs of A that are 0 in training.
    dropout: float
    # In the order of the model's layers.
    targets: tuple[LinearLayer, ...]

    @property
    def scale(self) -> float:
        """Factor of the adapter's product."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def tensors(self) -> list[AdapterTensor]:
        """Tensors of all targets, A before B."""
        tensors = []
        for linear in self.targets:
            shape_a = (self.rank, linear.inputs)
            shape_b = (linear.outputs, self.rank)
            tensors.append(AdapterTensor(linear.name + LORA_A, shape_a, target=linear.name, is_a=True))
            tensors.append(AdapterTensor(linear.name + LORA_B, shape_b, target=linear.name, is_a=False))
        return tensors

    @property
    def parameters(self) -> int:
        """Numbers of all tensors."""
        return self.rank * sum(linear.inputs + linear.outputs for linear in self.targets)


def text_name(name: str) -> str:
    """Return the name that a module of a vision-language model's text has in the text model alone."""
    return name.replace(_INSIDE, "", 1)


def choose_targets(
    linears: Sequence[LinearLayer], targets: str | Sequence[str]
) -> tuple[tuple[LinearLayer, ...], list[str]]:
    """Return the linear layers to adapt, and the problem with each name that cannot be one.

    linears: `ModelSizes.linears`. targets: a key of `WORDS`, or ends of module names such as q_proj or mlp.up_proj.
    """
    if isinstance(targets, str):
        chosen = tuple(linear for linear in linears if linear.part in WORDS[targets])
        if chosen:
            return chosen, []
        return (), [f"this model has no linear layer for {targets}: {_why_none(linears)}"]
    chosen_names: set[str] = set()
    problems = []
    for target in targets:
        matches = [linear for linear in linears if f".{linear.name}".endswith(f".{target}")]
        refused = next((linear for linear in matches if linear.part in _REFUSED_PARTS), None)
        if refused:
            problems.append(f"{refused.name} {_REFUSED_PARTS[refused.part]}")
        elif not matches:
            problems.append(_why_no_match(target, linears))
        chosen_names |= {linear.name for linear in matches}
    return tuple(linear for linear in linears if linear.name in chosen_names), problems


def _why_no_match(target: str, linears: Iterable[LinearLayer]) -> str:
    """Return why a name is that of no linear layer, with the names that there are."""
    for word in target.split("."):
        if word in _NO_LINEAR:
            return f"{target} {_NO_LINEAR[word]}"
    adaptable = (linear for linear in linears if linear.part not in _REFUSED_PARTS)
    last_names = list(dict.fromkeys(linear.name.rpartition(".")[2] for linear in adaptable))
    hint = did_you_mean(target, last_names) or f"; there are {', '.join(last_names)}"
    return f"{target}: no linear layer of the model has this name{hint}"


def _why_none(linears: Iterable[LinearLayer]) -> str:
    """Return why linear layers get no adapters, the first of each kind."""
    first = {linear.part: linear.name for linear in reversed(list(linears)) if linear.part in _REFUSED_PARTS}
    return "; ".join(f"{name} {_REFUSED_PARTS[part]}" for part, name in first.items()) or "it has none at all"
