"""What a change of weights costs running requests, from the moments at which an engine's steps ended."""

from itertools import pairwise
from statistics import median

# Steps before the change that tell the ordinary gap.
_BEFORE = 64


def stall(steps: list[float], begin: float, end: float) -> float:
    """Seconds of the longest gap between two steps that touches [begin, end], beyond the median gap before it.

    steps: ascending times; 0 where nothing was sampled before or after.
    """
    gaps = [(first, last) for first, last in pairwise(steps) if last > begin and first < end]
    before = [last - first for first, last in pairwise([step for step in steps if step <= begin][-_BEFORE:])]
    if not gaps or not before:
        return 0.0
    return max(0.0, max(last - first for first, last in gaps) - median(before))
