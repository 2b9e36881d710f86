"""Port of the policy: a rollout is a coroutine, `play(start, policy)`, and `await policy.sample` is a turn."""

from typing import Protocol

from rlctl.generation.requests import Completion, TurnRequest
from rlctl.rollout.types import Rollout, RolloutStart


class Policy(Protocol):
    """The policy, as the player of one rollout sees it.

    A request is of the player's rollout, `RolloutStart.id`. Its turns have a number each, and turn 0 begins a try. The
    seed is `turn_seed(start.seed, turn)` and the temperature the start's, so that a resumed run samples the same. The
    prompt and `max_new_tokens`, at least 1, fit the model: an engine raises for others, and is lost.
    """

    async def sample(self, request: TurnRequest) -> Completion:
        """Sample a turn: tokens, each with its log-prob and weight version, which may change within a turn.

        It takes as long as the engines are full, paused for new weights, or being replaced. No deadline cuts it short:
        the training loop has one for all that it waits for, and ends the run. Samples of one rollout that are awaited
        together are sampled together, on one engine. A lost engine is hidden: another one samples the same request from
        its first token. The id of a request may be sampled again once its sample has ended. A cancelled sample ends
        when the engine has confirmed that it stopped, or is lost: pass the CancelledError on. Any other exception is a
        defect, such as a sample while the engines sleep, and ends the run.
        """


class Player(Protocol):
    """The way from a task to a rollout: one prompt and one answer, an episode with an environment, a user's function.

    `play` runs on the event loop, once for each rollout in flight, and must not block. A player that waits for
    something else than the policy says so in `describe`.
    """

    # Turns may follow the first one. They stay when an engine is lost, with their versions. False for a player that
    # samples once: its rollouts begin afresh on another engine.
    several_turns: bool = False

    async def play(self, start: RolloutStart, policy: Policy) -> Rollout:
        """Play a rollout and return it, under the start's id. Each sampled token is true in one row, with its version.

        A failure of the environment is a value of the rollout, without rows, whose ending is "failed": only defects
        raise. Cancelled, it frees its resources and raises CancelledError; the same start may be played again.
        """

    @property
    def last_step(self) -> float:
        """When anything last happened that engines do not do, by the event loop's clock."""
        return 0.0

    def describe(self) -> str:
        """Return the waits of rollouts for anything but engines, for a human; empty if there are none."""
        return ""
