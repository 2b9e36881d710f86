"""Low-rank adapters (LoRA, arXiv 2106.09685) as plain data: target layers, scale, and tensor names. No torch.

An adapted linear layer computes y + ((x A^T) B^T) * scale, where y is the frozen layer's output. Trainer and engine
both compute in this order, with A and B rounded to the compute dtype. A tensor's name is transformers' module name plus
PEFT's suffix.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlctl.config.errors import did_you_mean
from rlctl.models.layer_kinds import LinearLayer

# Part of a module's name in a vision-language model. The same module of the text model does not have this part.
_INSIDE = "language_model."
LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"
# Word in `lora.targets` -> the parts of a layer that it selects.
WORDS = {"all": ("attention", "mlp"), "attention": ("attention",), "mlp": ("mlp",)}
# Part of a layer -> reason why its linear layers get no adapter.
_REFUSED_PARTS = {
    "experts": "is in a mixture of experts, whose experts and router get no adapters",
    "states": "is in a layer with states, whose fused kernels read the weight and pass an adapter by",
    "absorbed": "is folded into the attention by engines, which would leave an adapter out",
    "other": "is neither of an attention nor of an MLP",
}

# Word in a module's name -> reason why the module gets no adapter. These modules are outside the layers, or not linear.
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

    # Name in a refit and in a checkpoint.
    name: str
    shape: tuple[int, int]
    # Name of the adapted linear layer. is_a: True for A [rank, inputs], False for B [outputs, rank].
    target: str
    is_a: bool


@dataclass(frozen=True)
class AdapterSpec:
    """Adapters of a run: one A and one B of equal rank for each target."""

    rank: int
    alpha: float
    # True: divide alpha by the square root of the rank (rsLoRA, arXiv 2312.03732).
    rslora: bool
    # Probability that an input of A is set to 0 in training.
    dropout: float
    # Adapted linear layers, in the order of the model's layers.
    targets: tuple[LinearLayer, ...]

    @property
    def scale(self) -> float:
        """Factor by which the adapter's output is multiplied."""
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
        """Number of trained parameters: the elements of all A and B."""
        return self.rank * sum(linear.inputs + linear.outputs for linear in self.targets)


def text_name(name: str) -> str:
    """Return the name in the text model for a module name in the vision-language model."""
    return name.replace(_INSIDE, "", 1)


def choose_targets(
    linears: Sequence[LinearLayer], targets: str | Sequence[str]
) -> tuple[tuple[LinearLayer, ...], list[str]]:
    """Return the linear layers to adapt, and a problem for each name in `targets` that selects none.

    linears: `ModelSizes.linears`. targets: a key of `WORDS`, or a list of ends of module names, for example q_proj or
    mlp.up_proj.
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
    """Return why `target` matches no linear layer, with the names that the model has."""
    for word in target.split("."):
        if word in _NO_LINEAR:
            return f"{target} {_NO_LINEAR[word]}"
    adaptable = (linear for linear in linears if linear.part not in _REFUSED_PARTS)
    last_names = list(dict.fromkeys(linear.name.rpartition(".")[2] for linear in adaptable))
    hint = did_you_mean(target, last_names) or f"; there are {', '.join(last_names)}"
    return f"{target}: no linear layer of the model has this name{hint}"


def _why_none(linears: Iterable[LinearLayer]) -> str:
    """Return why this model's linear layers get no adapters, with one example for each reason."""
    # Reversed, so that the first layer of each part is the one that stays.
    example_of_part = {linear.part: linear.name for linear in reversed(list(linears)) if linear.part in _REFUSED_PARTS}
    reasons = [f"{name} {_REFUSED_PARTS[part]}" for part, name in example_of_part.items()]
    return "; ".join(reasons) or "it has none at all"
