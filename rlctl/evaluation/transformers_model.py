"""Log-probs of transformers' own model of a folder, one sequence at a time. The trainer's are compared with these."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rlctl.models.meta_model import whole_class


class OwnLogProbs(NamedTuple):
    """Log-prob of every token given the tokens before it, 0 at the first: float32 [T] for each sequence."""

    # Computed in the given dtype.
    rows: list[NDArray[np.float32]]
    # Computed in float32, with weights rounded to the given dtype.
    exact: list[NDArray[np.float32]]


def own_log_probs(
    folder: str,
    device: str,
    sequences: Sequence[NDArray[np.int32]],
    dtype: str,
    keeps_float32: Callable[[str], bool],
) -> OwnLogProbs:
    """Compute log-probs in a dtype, and in float32 with rounded weights.

    keeps_float32: True for the name of a parameter or buffer that the trainer does not round. transformers itself
    rounds fewer tensors: some classes keep a parameter in float32 (A_log of olmo_hybrid: 0.012 nats).
    """
    if dtype == "float32":
        lm = plain_model(folder, device)
        exact = [plain_log_probs(lm, sequence) for sequence in sequences]
        return OwnLogProbs(exact, exact)
    lm = plain_model(folder, device, dtype)
    rows = [plain_log_probs(lm, sequence) for sequence in sequences]
    # Two models at the same time may not fit in memory.
    del lm
    lm = plain_model(folder, device)
    for name, tensor in lm.state_dict().items():
        if tensor.is_floating_point() and not keeps_float32(name):
            tensor.copy_(tensor.to(getattr(torch, dtype)))
    return OwnLogProbs(rows, [plain_log_probs(lm, sequence) for sequence in sequences])


def plain_model(folder: str, device: str, dtype: str = "float32") -> Any:
    """Return transformers' own model of a folder: its causal LM, or for a multimodal folder the whole model.

    The causal LM of a multimodal folder may lack a tied output, because only the whole model's config says it is tied.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    load: Any = (whole_class(Path(folder)) or AutoModelForCausalLM).from_pretrained
    lm = load(folder, dtype=getattr(torch, dtype), attn_implementation="eager")
    return lm.to(device).eval()


@torch.no_grad()
def plain_logits(lm: Any, tokens: NDArray[np.int32]) -> torch.Tensor:
    """Return the logits, float32 [T, vocab]."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None].to(lm.device)
    logits: torch.Tensor = lm(input_ids=ids, use_cache=False).logits[0].float().cpu()
    return logits


def plain_log_probs(lm: Any, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the log-prob of every token given the tokens before it, 0 at the first, float32 [T]."""
    log_p = plain_logits(lm, tokens)[:-1].log_softmax(-1)
    chosen = log_p.gather(1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0]
    return np.concatenate([np.zeros(1, np.float32), chosen.numpy()])
