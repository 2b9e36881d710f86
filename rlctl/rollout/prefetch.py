"""Number of groups that an asynchronous run keeps in progress: enough to keep the trainer busy, and no more.

The bound on age (`max_trajectory_age_steps`) is a bound, not a target. If the generator is faster, groups that wait for
the trainer only grow older. If the trainer is faster, every group that the bound allows is in progress. Measured on the
tiny run, whose trainer is slower: with bound 4 and as many groups in progress as the bound allows, held-out accuracy
after 240 steps was 0.870 at a mean age of 3.90; the synchronous run reached 0.945. No clock and no processes.
"""

from collections import deque
from math import ceil

# A wait of less than this share of a step is ignored.
NOISE = 0.02
# Number of consecutive steps with spare groups after which the target shrinks.
STEPS = 4


class AdaptivePrefetch:
    """Target number of groups between admission and the end of their step, from 2 N to the capacity (max_age + 1) N.

    N is the number of groups in a step: N groups train while N are sampled, so with less than 2 N one side would idle.
    adaptive: False keeps the target at the capacity.
    """

    def __init__(self, num_prompts_per_step: int, capacity: int, *, adaptive: bool) -> None:
        self._groups_per_step = num_prompts_per_step
        self._capacity = capacity
        self._is_adaptive = adaptive
        self._min_target = min(2 * num_prompts_per_step, capacity)
        self.target = self._min_target if adaptive else capacity
        # For each of the last steps: number of complete groups at its end, minus the groups of one step.
        self._surpluses: deque[int] = deque(maxlen=STEPS)

    def resume(self, target: int) -> None:
        """Continue with the target of a checkpoint, clipped to the present range."""
        if self._is_adaptive:
            self.target = max(self._min_target, min(self._capacity, target))

    def note_step(self, waited: float, complete: int) -> None:
        """Adapt the target at the end of a step.

        waited: share of the step in which the trainer waited for rollouts. complete: number of complete groups for the
        next step. After a wait, the target grows by half of a step's groups. After `STEPS` steps without a wait it
        shrinks by half of their least surplus.
        """
        if not self._is_adaptive:
            return
        if waited > NOISE:
            self._surpluses.clear()
            self.target = min(self._capacity, self.target + ceil(self._groups_per_step / 2))
            return
        self._surpluses.append(complete - self._groups_per_step)
        least_surplus = min(self._surpluses)
        if len(self._surpluses) == STEPS and least_surplus > 0:
            self._surpluses.clear()
            self.target = max(self._min_target, self.target - ceil(least_surplus / 2))
