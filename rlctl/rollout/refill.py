"""Number of groups that replace useless ones in a step (dynamic sampling, DAPO, arXiv 2503.14476).

A step of N groups replaces at most B = floor(max_extra N) groups; further ones keep their place, so that every step
ends. An asynchronous run has S steps' worth of groups in flight besides a step's own (S: the bound on age). So it may
replace (S + 1) B at the start, and B more with each step; it begins one group for each that is filtered.

A synchronous step has no others on their way: were it to begin a replacement only when a group is filtered, it would
wait for one group after another. So it begins more than it needs, as many as the share of the last steps asks for. It
takes the first N useful ones in the order of their draws. Its choice then depends neither on the number of groups begun
nor on the order in which they ended. Pure.
"""

from collections import deque
from math import ceil

# Steps that the expected share is measured over.
STEPS = 4


class RefillRule:
    """Replacements of the groups of a step: how many there may be, and how many to begin ahead of need."""

    def __init__(self, groups_per_step: int, max_extra: float) -> None:
        self._groups_per_step = groups_per_step
        # Largest number of groups of a step that are replaced.
        self.budget = int(max_extra * groups_per_step)
        # (groups filtered, groups that ended) of the last steps.
        self._last_steps: deque[tuple[int, int]] = deque(maxlen=STEPS)

    def in_flight(self, filtered: int, ready: int) -> int:
        """Return how many groups a synchronous step keeps that are not filtered: `ready` ones, and for each of the
        N - ready places left, 1 / (1 - share) that are sampled.

        filtered, ready: groups of the current step that were scored so far. A step's worth of useful groups is
        presumed: the first few groups of a run do not decide alone.
        """
        size = self._groups_per_step
        all_ended = sum(ended for _, ended in self._last_steps) + filtered + ready + size
        all_filtered = sum(filtered for filtered, _ in self._last_steps) + filtered
        useful = all_ended - all_filtered
        expected = ready + ceil(max(0, size - ready) * all_ended / useful)
        return min(expected, size + self.budget - filtered)

    def note_step(self, filtered: int, ended: int) -> None:
        """Note how many of the groups that ended with a step taught nothing."""
        self._last_steps.append((filtered, ended))

    def state_dict(self) -> list[list[int]]:
        """Return the last steps, for a checkpoint."""
        return [[filtered, ended] for filtered, ended in self._last_steps]

    def load_state_dict(self, state: list[list[int]]) -> None:
        """Go on with the steps of a checkpoint."""
        self._last_steps.extend((filtered, ended) for filtered, ended in state)
