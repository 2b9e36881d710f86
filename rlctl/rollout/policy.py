"""Interfaces `Policy` and `Player`: a player is a coroutine that plays a rollout. It samples with `policy.sample`."""

from typing import Protocol

from rlctl.generation.requests import Completion, TurnRequest
from rlctl.rollout.types import Rollout, RolloutStart


class Policy(Protocol):
    """The policy, as the player of one rollout sees it.

    The player follows these rules for its requests. A request's id has the rollout's id (`RolloutStart.id`) and the
    number of the turn. Turn 0 begins a try. The seed is `turn_seed(start.seed, turn)`, so that a resumed run samples
    the same tokens. The temperature is `start.temperature`. `max_new_tokens` is at least 1. Prompt and new tokens
    together fit the model's length: for a longer request the engine raises an error, and the engine is then replaced.
    """

    async def sample(self, request: TurnRequest) -> Completion:
        """Sample a turn: return its tokens with their log-probs and weight versions. A refit may change the version
        within a turn.

        The call waits while the engines are full, paused for new weights, or being replaced. It has no deadline, but
        the training loop has one, and ends the run. Turns of one rollout that are awaited together are sampled
        together, on one engine. If an engine is lost, the caller does not notice: another engine samples the same
        request from its first token. A request's id may be used again once its call has ended. A cancelled call ends
        when the engine has confirmed that it stopped, or is lost; the caller must let the CancelledError pass. Any
        other exception, for example for a call while the engines sleep, is a defect and ends the run.
        """


class Player(Protocol):
    """Plays a rollout of a task: one prompt and one answer, an episode with an environment, or a user's function.

    `play` runs on the event loop, once for each rollout in flight, and must not block. A player that waits for
    anything but the policy reports these waits in `describe`.
    """

    # True if a rollout may have several turns. If an engine is lost, finished turns then keep their tokens and
    # versions. False for a player that samples once: its rollouts begin again on another engine.
    several_turns: bool = False

    async def play(self, start: RolloutStart, policy: Policy) -> Rollout:
        """Play a rollout and return it, with the start's id. Each sampled token is marked as sampled in one row only.

        If the environment fails, return a rollout without rows whose episode's ending is "failed": only defects raise.
        A cancelled call frees its resources and raises CancelledError; the same start may be played again.
        """

    @property
    def last_step(self) -> float:
        """Time of the last event outside the engines, such as an environment's answer, by the event loop's clock."""
        return 0.0

    def describe(self) -> str:
        """Return a text on the rollouts that wait for anything but engines; empty if none does."""
        return ""
