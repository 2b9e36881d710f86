"""Proof that an engine serves the trainer's weights: a refit sends every tensor, and each one changes the engine."""

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

# Most elements of a tensor that gets random changes if an update does not change it. Larger tensors are matrices, which
# every update changes.
_SMALL = 1 << 20
# Standard deviation of the random changes, as a share of the tensor's mean absolute value.
_SHARE_OF_MEAN = 0.2
# Standard deviation of the random changes of a tensor of zeros.
_SIZE_OF_ZEROS = 0.05
# Root mean square of an embedding at which the epsilon of a norm, 1e-6 or 1e-5, matters.
_FAINT = 1e-3
# Bytes for each parameter: the float32 weight, its gradient and two moments, and the second model's weight.
_BYTES = 20


def names_to_send(folder: Path, facts: ModelFacts) -> set[str]:
    """Return the names of a folder's tensors that a refit must send: all tensors of the model, by the files' headers.

    The weight of a tied output is left out, because it is the embedding. Raises ModelError.
    """
    tied = f"{facts.head}.weight" if facts.sizes.tied else None
    return {name for name in weight_headers(folder) if not (tied and name.endswith(tied))} - set(facts.kept)


def is_rounded(layout: Layout, folder: Path) -> bool:
    """Return True if a refit sends a tensor in a dtype with fewer digits than the tensor has in the folder.

    An engine that loaded the folder then has more digits than after a refit. layout: tensors of the refit.
    """
    digits = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
    saved = {name: DTYPES.get(dtype, dtype) for name, (dtype, _) in weight_headers(folder).items()}
    return any(digits.get(dtype, 0) < digits.get(saved.get(name, dtype), 0) for name, _, dtype in layout)


def not_finite(shards: list[Shard]) -> str | None:
    """Return the name of the first tensor with a NaN or an infinity; None if there is none."""
    return next((shard.name for shard in shards if not bool(shard.tensor.isfinite().all())), None)


def make_faint(shards: list[Shard], embedding: str, buffers: Collection[str]) -> None:
    """Scale weights down in place until the embedding's root mean square is `_FAINT`, but no norms and no buffers."""
    unscaled_names = re.compile("|".join(["norm", r"\.ln_", *map(re.escape, buffers)]))
    scaled = [shard for shard in shards if not unscaled_names.search(shard.name)]
    embedding_shard = next(shard for shard in scaled if shard.name.endswith(embedding))
    root_mean_square = float(embedding_shard.tensor.float().square().mean().sqrt())
    if root_mean_square <= _FAINT:
        return
    for shard in scaled:
        shard.tensor.mul_(_FAINT / root_mean_square)


def refuse_too_large(parameters: int, device: str) -> Finding | None:
    """Return a failed finding if trainer, optimizer and a second model do not fit in memory, else None."""
    proof_bytes = _BYTES * parameters
    memory = psutil.virtual_memory().available if device == "cpu" else torch.cuda.mem_get_info()[1]
    if proof_bytes <= memory:
        return None
    text = f"not made: trainer, its optimizer and a second model take {proof_bytes / 2**30:.0f} GiB"
    place = "free" if device == "cpu" else "on the GPU"
    return Finding("proof", f"{text}, {memory / 2**30:.0f} are {place}", False)


class OtherValues:
    """Random changes of tensors that an update does not change: buffers, and weights that move less than rounding."""

    def __init__(self, shards: list[Shard]) -> None:
        """Copy the present values. shards: the trainer's live tensors."""
        # (live tensor, copy of its first values) of each small tensor.
        self._copies: list[tuple[Tensor, Tensor]] = []
        for shard in shards:
            if shard.tensor.is_floating_point() and shard.tensor.numel() <= _SMALL:
                self._copies.append((shard.tensor, shard.tensor.clone()))

    def put(self, dtype: str) -> None:
        """Change each tensor whose values, rounded to `dtype`, still equal the first values."""
        random = torch.Generator().manual_seed(0)
        torch_dtype = getattr(torch, dtype)
        for live, copy in self._copies:
            if torch.equal(live.to(torch_dtype), copy.to(torch_dtype)):
                deviation = _SHARE_OF_MEAN * copy.abs().float().mean() or torch.tensor(_SIZE_OF_ZEROS)
                step = deviation.cpu() * torch.randn(live.shape, generator=random)
                live.add_(step.to(live.device, live.dtype))

    def undo(self) -> None:
        """Restore the first values."""
        for live, copy in self._copies:
            live.copy_(copy)


def have_same_answers(first: list[tuple[Any, Completion]], second: list[tuple[Any, Completion]]) -> bool:
    """Return True if two lists of (prompt, answer) have bitwise equal tokens and log-probs."""
    for (_, answer), (_, other) in zip(first, second, strict=True):
        if not np.array_equal(answer.tokens, other.tokens) or not np.array_equal(answer.log_probs, other.log_probs):
            return False
    return True


class Served(NamedTuple):
    """An engine's checksums before, between and after two refits, and facts of these refits."""

    # Checksum of each tensor by name, with the first weights.
    before: dict[str, int]
    # The same after a refit with changed weights.
    between: dict[str, int]
    # The same after a refit with the first weights again.
    after: dict[str, int]
    # Names of the tensors that a refit sends.
    sent: Collection[str]
    # Names of the tensors that a refit must send.
    required: Collection[str]
    # True if the answers before and after have bitwise equal tokens and log-probs.
    has_same_answers: bool
    # True if the refits send adapters: the engine's parameters are frozen, and adapters are buffers beside them.
    adapts: bool = False


def judge_served(served: Served, chosen: LoadMode) -> Finding:
    """Judge an engine after a refit with changed weights and a refit with the first weights again.

    Every parameter of the engine must have changed and then returned. Parameters are compared and not the folder's
    tensors, because an engine may fuse several tensors into one parameter. With adapters no parameter may change, and
    some buffer must: each refit compares every live A and B by itself.
    """
    before = served.before
    changed = [name for name in before if before[name] != served.between.get(name)]
    unrestored = [name for name in before if before[name] != served.after.get(name)]
    unchanged = [] if served.adapts else _find_unchanged(served, changed)
    changed_frozen = [name for name in changed if served.adapts and _is_parameter(name)]
    unsent = sorted(set(served.required) - set(served.sent))
    text = f"{len(served.sent)} tensors sent, twice, {chosen.mode} ({chosen.why}): "
    text += f"first other values changed {len(changed)} of the engine's {len(before)}"
    text += f", but not {min(unchanged)}" if unchanged else ""
    text += f", also {_tensor_name(changed_frozen[0])}, which is frozen" if changed_frozen else ""
    text += f"; then {len(before) - len(unrestored)} were bit for bit those of the start"
    text += f", but not {_tensor_name(unrestored[0])}" if unrestored else ""
    text += ", and answers too" if served.has_same_answers else "; answers were not"
    if unsent:
        further = f" and {len(unsent) - 1} more" if unsent[1:] else ""
        text = f"{unsent[0]}{further} of the model's {len(served.required)} tensors not sent"
        text += ": engines would serve others"
    is_complete = bool(changed) and not unchanged and not unsent
    holds = is_complete and not changed_frozen and not unrestored and served.has_same_answers
    return Finding("served = sent", text, holds, {"tensors": len(before), "changed": len(changed)})


def _find_unchanged(served: Served, changed: list[str]) -> list[str]:
    """Return the names of the tensors that should have changed and did not.

    A tensor that is no parameter must change only if it is a buffer that the refit sends: an engine computes other such
    tensors itself.
    """
    unchanged = []
    for name in set(served.before) - set(changed):
        tensor_name = _tensor_name(name)
        if _is_parameter(name) or tensor_name.removesuffix(" (buffer)") in served.sent:
            unchanged.append(tensor_name)
    return unchanged


def _is_parameter(name: str) -> bool:
    """Return True for a parameter's name: the names of other tensors end with a word in brackets."""
    return not name.endswith(")")


def _tensor_name(name: str) -> str:
    """Return a tensor's name in an engine's checksums without the worker's number."""
    return name.partition(": ")[2]
