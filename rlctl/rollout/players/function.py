"""Player of rollout functions: the user's coroutine gives the exact tokens of each prompt (contracts 4 and 11).

Sampled turns are nodes of an append-only tree. A prompt that begins with the tokens of a path continues the path: both
are in one training row. Any other prompt begins a new row. A sampled token is trained exactly once, even if later
prompts contain it.

Samples that a function begins together are sampled together. Turn numbers, seeds, answers and nodes follow the order of
the function's requests, whatever the speed of the engines.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from rlctl.data.chat import Chat
from rlctl.data.files import DataError
from rlctl.environments.contract import Reward
from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.messages import FunctionEnded, FunctionMessage, FunctionWaits, Sampled
from rlctl.generation.requests import Completion
from rlctl.rollout.players.episode_state import EpisodeLimits, EpisodeState
from rlctl.rollout.players.episode_tries import EpisodeTries
from rlctl.rollout.players.running_call import RunningCall
from rlctl.rollout.policy import Player, Policy
from rlctl.rollout.types import Ending, Rollout, RolloutStart


class FunctionPlayer(Player):
    """Plays rollouts by calls of the pool's rollout function, see environments/rollout_function.py.

    Deadlines, retries, budgets and aborts are those of an episode. needs_reward: the function must return a reward,
    because the config has no reward functions. num_token_ids: number of the model's token ids. The tokenizer may have
    fewer; the model samples the others too.
    """

    def __init__(
        self,
        pool: EnvironmentPool,
        chat: Chat,
        limits: EpisodeLimits,
        needs_reward: bool = False,
        num_token_ids: int = 1 << 31,
    ) -> None:
        self.chat = chat
        self.tries = EpisodeTries(pool, limits)
        self.needs_reward = needs_reward
        self.num_token_ids = num_token_ids
        self.several_turns = limits.max_turns > 1

    @property
    def last_step(self) -> float:
        return self.tries.last_step

    def describe(self) -> str:
        return self.tries.describe()

    async def play(self, start: RolloutStart, policy: Policy) -> Rollout:
        return await self.tries.play(start, lambda episode: FunctionCall(self, episode, policy).play())


@dataclass(eq=False)
class FunctionSample:
    """One sample that a function asked for."""

    prompt: list[int]
    # The turn, or the budget that was used up; None while an engine samples the turn.
    answer: Completion | Ending | None


class FunctionCall:
    """The driver's side of one call of a rollout function."""

    def __init__(self, player: FunctionPlayer, episode: EpisodeState, policy: Policy) -> None:
        self._player = player
        self._episode = episode
        self._call = RunningCall[FunctionMessage, FunctionSample](player.tries, episode, policy)
        # Samples that the function has not taken yet, in the order of its requests, and number of those sent to it.
        self._samples: deque[FunctionSample] = deque()
        self._sent = 0
        # True once several samples were in flight at the same time.
        self._side_by_side = False

    async def play(self) -> Reward | None:
        """Call the function; return its reward. Raises DataError for a wrong reward, EpisodeFailed if its process
        fails.

        When this method ends, no engine samples for the call: the same requests may be submitted again.
        """
        self._episode.ending = "done"
        self._episode.opening = 0
        async with self._call:
            self._begin_call()
            while True:
                completions, message = await self._call.wait()
                for sample, completion in completions:
                    sample.answer = completion
                match message:
                    case FunctionEnded():
                        self._take_answers(message.answers_taken)
                        return self._checked_reward(message.reward)
                    case FunctionWaits():
                        self._take_answers(message.answers_taken)
                        self._sample_prompts(message)
                self._send_answers()

    def _begin_call(self) -> None:
        start = self._episode.start
        task = start.task
        fields = {"id": task.id, "prompt": task.text, "tokens": task.tokens, "answer": task.answer, "row": task.row}
        self._call.act(self._player.tries.pool.begin(start.id, fields, start.group_seed), waits=True)

    def _take_answers(self, count: int) -> None:
        """Add the next `count` samples to the tree: the function has taken their answers."""
        if not 0 <= count <= self._sent:
            raise DataError(f"the rollout function took {count} answers of {self._sent}")
        self._sent -= count
        for _ in range(count):
            self._attach(self._samples.popleft())

    def _checked_reward(self, reward: Reward | None) -> Reward | None:
        """Return the reward that the function returned. Raises DataError if it may not be None and is."""
        if not self._episode.conversation.turns:
            raise DataError("the rollout function returned without a sample")
        if reward is None and self._player.needs_reward:
            raise DataError("the rollout function returned None, and rewards is empty: nothing values the rollout")
        return reward

    def _sample_prompts(self, message: FunctionWaits) -> None:
        """Sample a turn after each of the function's prompts, within the budgets."""
        episode = self._episode
        num_token_ids = self._player.num_token_ids
        if message.asks_again:
            raise DataError(f"the rollout function sampled again after {episode.ending}: three empty lists had come")
        if not all(message.samples):
            raise DataError("the rollout function sampled after an empty list: a prompt needs a token")
        if any(not 0 <= min(tokens) <= max(tokens) < num_token_ids for tokens in message.samples):
            raise DataError("the rollout function sampled after ids that are no tokens")
        now = asyncio.get_running_loop().time()
        for tokens in message.samples:
            turn = self._call.turns
            sample = FunctionSample(tokens, episode.used_up(turn, len(tokens), now))
            self._samples.append(sample)
            if sample.answer is None:
                self._call.sample(sample, episode.request(turn, tokens))
        self._side_by_side |= self._call.num_sampling > 1

    def _send_answers(self) -> None:
        """Send the next answers, and ask the function's process for further samples."""
        answers: list[Sampled | None] = []
        for sample in list(self._samples)[self._sent :]:
            if sample.answer is None:
                break
            answers.append(_function_answer(sample.answer))
        self._sent += len(answers)
        # True while engines sample an answer for the function. Time then does not count as the environment's.
        is_sampling = self._sent < len(self._samples)
        # A function with several branches may ask at any time; one with a single branch asks only after its answer.
        if answers or (not self._call.has_action and (self._side_by_side or not is_sampling)):
            pool = self._player.tries.pool
            self._call.act(pool.resume(self._episode.start.id, answers, waits=is_sampling), waits=not is_sampling)

    def _attach(self, sample: FunctionSample) -> None:
        """Add a sample to the tree, below the longest path whose tokens its prompt begins with."""
        episode = self._episode
        conversation = episode.conversation
        answer = sample.answer
        chat = self._player.chat
        if not isinstance(answer, Completion):
            # A budget was used up. The first one that the function met is the episode's ending.
            if answer and episode.ending == "done":
                episode.ending = answer
            return
        length, parent = conversation.longest_beginning(sample.prompt)
        if parent is None or length < len(sample.prompt):
            parent = conversation.add_context(sample.prompt[length:], parent)
            conversation.messages.append({"role": "user", "content": chat.turn_text(sample.prompt[length:])})
            episode.opening = episode.opening or 1
        conversation.add_turn(answer, parent)
        conversation.messages.append({"role": "assistant", "content": chat.turn_text(answer.tokens.tolist())})


def _function_answer(answer: Completion | Ending) -> Sampled | None:
    """Return an answer in the form that the function's process expects; None if a budget is used up."""
    if isinstance(answer, Completion):
        return Sampled(answer.tokens.tolist(), answer.log_probs.tolist(), answer.versions.tolist())
    return None
