"""Player of episodes: rollouts of several turns between the policy and an environment (contracts 4 and 11).

    reset -> first prompt -> turn -- calls tools --> their answers -> turn -- calls none --> step -> turn ... -> reward

An episode ends when the environment says so, when a turn calls no tool and there is no `step`, or at a budget.
"""

from collections.abc import Mapping
from functools import partial

from rlctl.data.chat import Chat
from rlctl.data.files import DataError
from rlctl.environments.contract import ContractError, EnvironmentContract, Reward, opening_messages
from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.rollout.players.episode_state import EpisodeLimits, EpisodeState
from rlctl.rollout.players.episode_tries import EpisodeTries
from rlctl.rollout.players.tool_loop import ToolLoop
from rlctl.rollout.policy import Player, Policy
from rlctl.rollout.types import Rollout, RolloutStart


class EnvironmentPlayer(Player):
    """Plays episodes with a pool of environments. contracts: environment's key in the pool -> its contract."""

    def __init__(
        self,
        pool: EnvironmentPool,
        contracts: Mapping[str, EnvironmentContract],
        chat: Chat,
        limits: EpisodeLimits,
        tool_format: str | None,
    ) -> None:
        self._pool = pool
        self._contracts = contracts
        self._tries = EpisodeTries(pool, limits)
        self._tool_loop = ToolLoop(
            chat,
            self._tries,
            tool_format,
            note_spelled=self._tries.note_spelled,
            note_unwritten=self._tries.note_unwritten,
        )
        self.several_turns = limits.max_turns > 1

    @property
    def last_step(self) -> float:
        return self._tries.last_step

    def describe(self) -> str:
        return self._tries.describe()

    async def play(self, start: RolloutStart, policy: Policy) -> Rollout:
        return await self._tries.play(start, partial(self._play_try, policy))

    async def _play_try(self, policy: Policy, episode: EpisodeState) -> Reward | None:
        """Play one try of an episode; return the environment's reward, None if it gives none."""
        ask = self._tries.ask
        rollout_id = episode.start.id
        row = episode.start.task.row
        observation = await ask(episode, self._pool.reset(rollout_id, row, episode.start.group_seed))
        # The key exists: a row that names no known environment has failed in `reset` already.
        contract = self._contracts[self._pool.key_of(row)]
        try:
            messages = opening_messages(episode.start.task.messages, observation)
        except ContractError as error:
            raise DataError(str(error)) from error
        if not messages:
            problem = "the row has no prompt, and reset returned None: there is nothing to answer"
            raise DataError(f"{problem}; return a message from reset, or give the row a column prompt")
        self._tool_loop.add(episode, messages)
        episode.opening = len(messages)
        while (text := await self._tool_loop.answer(episode, contract.tools, policy)) is not None:
            if not contract.has_step:
                episode.ending = "answered"
                break
            answer = await ask(episode, self._pool.step(rollout_id, text))
            if answer is None:
                episode.ending = "done"
                break
            self._tool_loop.add(episode, [{"role": "user", "content": answer}])
        columns = None
        if contract.rewards:
            prompts = episode.messages[: episode.opening]
            completions = episode.messages[episode.opening :]
            columns = {**row, "prompts": prompts, "completions": completions}
        elif not contract.has_reward:
            return None
        reward: Reward = await ask(episode, self._pool.reward(rollout_id, columns))
        return reward
