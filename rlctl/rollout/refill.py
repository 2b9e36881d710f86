"""Number of groups that replace useless groups of a step (dynamic sampling, DAPO, arXiv 2503.14476).

A step of N groups replaces at most B = floor(max_extra N) groups. Further useless groups keep their place, so that
every step ends. An asynchronous run has S N groups in flight besides the N of a step (S: the bound on age). So it may
replace (S + 1) B groups at the start, and B more with each step; it begins one group for each that is filtered.

A synchronous step has no further groups in flight: if it began a replacement only after a group was filtered, it would
wait for one group after another. So it begins more groups than it needs, by the share of useless groups in the last
steps. It trains the first N useful groups in the order of their draws. This choice depends neither on the number of
groups begun nor on the order in which they ended. No clock and no processes.
"""

from collections import deque
from math import ceil

# Number of last steps over which the share of useless groups is measured.
STEPS = 4


class RefillRule:
    """Limits the number of groups that a step replaces, and says how many groups to begin ahead of need."""

    def __init__(self, groups_per_step: int, max_extra: float) -> None:
        self._groups_per_step = groups_per_step
        # Most groups that a step may replace.
        self.budget = int(max_extra * groups_per_step)
        # (number of useless groups, number of all groups that ended) of each of the last steps.
        self._last_steps: deque[tuple[int, int]] = deque(maxlen=STEPS)

    def in_flight(self, filtered: int, ready: int) -> int:
        """Return the number of groups, without useless ones, that a synchronous step has in progress.

        These are the `ready` groups, and for each of the N - ready groups that it lacks 1 / (1 - share) groups that are
        sampled. share: expected share of useless groups. It is measured over the last steps and N imaginary useful
        groups, so that the first few groups of a run do not decide it. filtered, ready: numbers of useless and useful
        groups that were scored in the current step.
        """
        size = self._groups_per_step
        # Sums over the last steps, the current step and the imaginary groups.
        num_ended = sum(ended for _, ended in self._last_steps) + filtered + ready + size
        num_filtered = sum(step_filtered for step_filtered, _ in self._last_steps) + filtered
        num_useful = num_ended - num_filtered
        wanted = ready + ceil(max(0, size - ready) * num_ended / num_useful)
        return min(wanted, size + self.budget - filtered)

    def note_step(self, filtered: int, ended: int) -> None:
        """Note a step's end. ended: number of its groups. filtered: number of its groups that taught nothing."""
        self._last_steps.append((filtered, ended))

    def state_dict(self) -> list[list[int]]:
        """Return the counts of the last steps, for a checkpoint."""
        return [[filtered, ended] for filtered, ended in self._last_steps]

    def load_state_dict(self, state: list[list[int]]) -> None:
        """Continue with the counts of a checkpoint."""
        self._last_steps.extend((filtered, ended) for filtered, ended in state)
