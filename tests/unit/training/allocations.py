"""The most bytes that torch's CPU allocator gives out at a time while a function runs."""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], Any]) -> int:
    """Return the largest sum of bytes that were given out and not yet freed, from the function's start on."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        function()
    results: Any = measured.profiler
    changes = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    live = 0
    peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        live += change.nbytes()
        peak = max(peak, live)
    return peak
