"""torch.compile as every backend uses it: once, for packs of every size."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

# Of one function: norms of hidden states and of heads, with and without gradient, recomputed or not, came to 11
# (Qwen3 under Megatron, torch 2.13). Beyond torch's own limit of 8 the rest would run uncompiled, without a word.
_VARIANTS = 64


@cache
def _compile_options() -> dict[str, Any]:
    """Without the fusion of a norm's two reductions, which Inductor chooses by the number of tokens: it compiles anew
    for packs below 4096, and again for those below 5 Mi numbers, 10 s each (MixOrderReduction in inductor/scheduler.py;
    pytorch pull request 171941)."""
    from torch._inductor import config

    return {"triton.mix_order_reduction": False} if hasattr(config.triton, "mix_order_reduction") else {}


def compile_for_packs(function: Callable[..., Any]) -> Callable[..., Any]:
    """No graph for each new number of tokens or sequences: the few that there are take arguments of every size."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, _VARIANTS)
    return torch.compile(function, dynamic=True, options=_compile_options())
