"""Validation: samples held-out tasks as a run does every `validation.every` steps, and scores them.

A run's own validation and `rlctl eval` are this code. Equal weights, tasks and seeds therefore give equal numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlctl.config.schema import GrpoConfig
from rlctl.data.tasks import Task
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.scoring import GroupScorer
from rlctl.rollout.types import RolloutGroup, RolloutPlayer, Sampling


@dataclass(frozen=True)
class Validation:
    """Held-out tasks, and what samples and scores them. The engines hold the weights."""

    config: GrpoConfig
    dispatcher: RolloutDispatcher
    score: GroupScorer
    tasks: Sequence[Task]
    # Plays the rollouts with the dispatcher's engines; None: of one turn each.
    player: RolloutPlayer | None = None

    def groups(self, version: int, places: range | None = None) -> list[RolloutGroup]:
        """Return the scored groups of the tasks at `places`, all of them for None, in order.

        Seeds follow from `run.seed`, the weights' version, and a task's place among all: a part of the tasks is
        sampled as it is within the whole. Raises what `RolloutDispatcher.sample` raises.
        """
        places = range(len(self.tasks)) if places is None else places
        config, length = self.config.validation, self.config.generation.max_new_tokens
        shape = (len(self.tasks), config.num_generations, length)
        sampling = Sampling("validation", self.config.run.seed, *shape, config.temperature)
        tasks = [self.tasks[place] for place in places]
        return self.score(self.dispatcher.sample(sampling, tasks, version, places.start, self.player))
