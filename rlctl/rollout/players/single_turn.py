"""Player of rollouts of one turn: it samples one answer to the task's prompt."""

from rlctl.generation.requests import RequestId, TurnRequest
from rlctl.rollout.policy import Player, Policy
from rlctl.rollout.types import Rollout, RolloutStart


class SingleTurnPlayer(Player):
    """Plays rollouts of one prompt and one answer."""

    async def play(self, start: RolloutStart, policy: Policy) -> Rollout:
        request = TurnRequest(
            id=RequestId(start.id),
            prompt_tokens=start.task.tokens,
            max_new_tokens=start.max_new_tokens,
            temperature=start.temperature,
            seed=start.seed,
        )
        return Rollout.from_turn(request, await policy.sample(request))
