"""Proof that an engine serves the trainer's weights: every tensor is sent, and the engine takes each in."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from rlctl.evaluation.model_facts import Finding
from rlctl.generation.engine import LoadMode
from rlctl.generation.requests import Completion
from rlctl.models.facts import ModelFacts
from rlctl.models.weight_headers import DTYPES, weight_headers
from rlctl.refit.refit_plan import Layout
from rlctl.refit.weight_source import Shard

# Numbers of the largest tensor that gets other values if an update leaves it as it is. Larger ones are matrices, which
# an update moves.
_SMALL = 1 << 20
# Size of other values, as a share of a tensor's mean, or by itself where that is 0.
_SHARE, _ALONE = 0.2, 0.05
# Usual size of an embedding's numbers beside which the epsilon of a norm, 1e-6 or 1e-5, counts.
_FAINT = 1e-3
# A parameter's float32 weight, gradient and two moments, and the second model's weight.
_BYTES = 20


def names_to_send(folder: Path, facts: ModelFacts) -> set[str]:
    """Return the tensors of a folder that a refit must send: all that the model holds, by the headers of the files.

    A tied output that is saved too is the embedding. Raises ModelError.
    """
    tied = f"{facts.head}.weight" if facts.sizes.tied else None
    return {name for name in weight_headers(folder) if not (tied and name.endswith(tied))} - set(facts.kept)


def is_rounded(layout: Layout, folder: Path) -> bool:
    """Return True if a refit sends a tensor with fewer digits than the folder has: an engine starts with more.

    layout: of the refit.
    """
    digits = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
    held = {name: DTYPES.get(dtype, dtype) for name, (dtype, _) in weight_headers(folder).items()}
    return any(digits.get(dtype, 0) < digits.get(held.get(name, dtype), 0) for name, _, dtype in layout)


def not_finite(shards: list[Shard]) -> str | None:
    """Return the first tensor that has a NaN or an infinity; None for weights without one."""
    return next((each.name for each in shards if not bool(each.tensor.isfinite().all())), None)


def make_faint(shards: list[Shard], embedding: str, buffers: Collection[str]) -> None:
    """Scale weights down, those of norms and buffers apart, until the embedding's numbers are about `_FAINT`."""
    kept = re.compile("|".join(["norm", r"\.ln_", *map(re.escape, buffers)]))
    scaled = [shard for shard in shards if not kept.search(shard.name)]
    first = next(shard for shard in scaled if shard.name.endswith(embedding))
    usual = float(first.tensor.float().square().mean().sqrt())
    if usual <= _FAINT:
        return
    for shard in scaled:
        shard.tensor.mul_(_FAINT / usual)


def refuse_too_large(parameters: int, device: str) -> Finding | None:
    """Return why a proof is not made, where trainer, optimizer and a second model do not fit in memory."""
    needed = _BYTES * parameters
    memory = psutil.virtual_memory().available if device == "cpu" else torch.cuda.mem_get_info()[1]
    if needed <= memory:
        return None
    text = f"not made: trainer, its optimizer and a second model take {needed / 2**30:.0f} GiB, {memory / 2**30:.0f} "
    return Finding("proof", text + f"are {'free' if device == 'cpu' else 'on the GPU'}", False)


class OtherValues:
    """Other values for tensors that an update leaves alone: buffers, and weights that move by less than rounding."""

    def __init__(self, shards: list[Shard]) -> None:
        """Remember the present values. shards: in the trainer's own memory."""
        small = [each for each in shards if each.tensor.is_floating_point() and each.tensor.numel() <= _SMALL]
        self._before: list[tuple[Tensor, Tensor]] = [(each.tensor, each.tensor.clone()) for each in small]

    def put(self, dtype: str) -> None:
        """Change each tensor whose values are still the same in `dtype`."""
        random, kind = torch.Generator().manual_seed(0), getattr(torch, dtype)
        for live, before in self._before:
            if torch.equal(live.to(kind), before.to(kind)):
                size = _SHARE * before.abs().float().mean() or torch.tensor(_ALONE)
                step = size.cpu() * torch.randn(live.shape, generator=random)
                live.add_(step.to(live.device, live.dtype))

    def undo(self) -> None:
        """Bring the values of before back."""
        for live, before in self._before:
            live.copy_(before)


def have_same_answers(one: list[tuple[Any, Completion]], other: list[tuple[Any, Completion]]) -> bool:
    """Return True if tokens and log-probs are equal to the last bit."""
    return all(
        np.array_equal(a.tokens, b.tokens) and np.array_equal(a.log_probs, b.log_probs)
        for (_, a), (_, b) in zip(one, other, strict=True)
    )


class Served(NamedTuple):
    """An engine's checksums before, between and after two refits, and more that they brought."""

    before: dict[str, int]
    between: dict[str, int]
    after: dict[str, int]
    # Tensors of a refit.
    sent: Collection[str]
    # Tensors that it must have.
    needed: Collection[str]
    # Tokens and log-probs of answers are, to the last bit, those of before.
    answers: bool


def judge_served(found: Served, chosen: LoadMode) -> Finding:
    """Judge an engine after other weights and the first ones again. Of some tensors only kernels have a copy.

    An engine may fuse several tensors of the folder into a parameter: each parameter must have changed.
    """
    before = found.before
    changed = [name for name in before if before[name] != found.between.get(name)]
    wrong = [name for name in before if before[name] != found.after.get(name)]
    # A word in brackets: no parameter. Buffers have the names of the folder; an engine makes others by itself.
    still = [
        name
        for name in set(before) - set(changed)
        if not name.endswith(")") or _tensor_name(name).removesuffix(" (buffer)") in found.sent
    ]
    unsent = sorted(set(found.needed) - set(found.sent))
    text = f"{len(found.sent)} tensors sent, twice, {chosen.mode} ({chosen.why}): "
    text += f"first other values changed {len(changed)} of the engine's {len(before)}"
    text += f", but not {min(map(_tensor_name, still))}" if still else ""
    text += f"; then {len(before) - len(wrong)} were bit for bit those of the start"
    text += f", but not {_tensor_name(wrong[0])}" if wrong else ""
    text += ", and answers too" if found.answers else "; answers were not"
    if unsent:
        more = f" and {len(unsent) - 1} more" if unsent[1:] else ""
        text = f"{unsent[0]}{more} of the model's {len(found.needed)} tensors not sent: engines would serve others"
    holds = bool(changed) and not wrong and not still and not unsent and found.answers
    return Finding("served = sent", text, holds, {"tensors": len(before), "changed": len(changed)})


def _tensor_name(name: str) -> str:
    """Return an engine's name of a tensor, without the worker's number."""
    return name.partition(": ")[2]
