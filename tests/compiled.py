"""Counts of torch.compile's new graphs."""

from collections.abc import Callable

import torch


def new_graphs(work: Callable[[], object]) -> int:
    """How many graphs `work` made that were not there. Raises if torch, having compiled too often, would run one as it
    is: that makes none."""
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        work()
    return int(counters["stats"]["unique_graphs"] - before)
