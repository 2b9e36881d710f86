"""Player of rollouts of one turn: a prompt goes to an engine, and its answer is the rollout."""

from rlctl.generation.requests import RequestId, TurnRequest
from rlctl.rollout.policy import Player, Policy
from rlctl.rollout.types import Rollout, RolloutStart


class SingleTurnPlayer(Player):
    """Plays rollouts of one prompt and one answer."""

    async def play(self, start: RolloutStart, policy: Policy) -> Rollout:
        own = RequestId(start.id)
        request = TurnRequest(own, start.task.tokens, start.max_new_tokens, start.temperature, start.seed)
        return Rollout.of_turn(request, await policy.sample(request))
