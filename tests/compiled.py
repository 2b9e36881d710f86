"""Counts the graphs that torch.compile adds."""

from collections.abc import Callable

import torch


def new_graphs(work: Callable[[], object]) -> int:
    """Return the number of graphs that `work` adds. Raises if torch has compiled too often and would run code
    uncompiled, which adds none."""
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        work()
    return int(counters["stats"]["unique_graphs"] - before)
