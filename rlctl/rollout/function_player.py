"""Player of rollout functions: the user's coroutine decides each prompt, token by token (contracts 4 and 11).

What is sampled is a tree of tokens that only grows. A prompt that begins with a path of the tree goes on with that
path, so that one row trains it all; any other prompt begins a row of its own. A sampled token trains exactly once,
whatever prompts it is in afterwards.
"""

from typing import Any

from rlctl.data.files import DataError
from rlctl.environments.contract import Reward
from rlctl.generation.requests import Completion
from rlctl.rollout.conversation import Conversation
from rlctl.rollout.player import EpisodePlayer, Play
from rlctl.rollout.types import Ending


class FunctionPlayer(EpisodePlayer):
    """Plays rollouts by calls of a rollout function, see `RolloutPlayer` and environments/rollout_function.py.

    Deadlines, retries, budgets and aborts are those of an episode.
    """

    # True if a function must return a value, since no reward gives one.
    must_value: bool = False
    # Ids of the model, some of which a tokenizer may not have; the policy samples these too.
    vocabulary: int = 1 << 31

    def _reset(self, play: Play) -> None:
        play.began, play.ending = self._clock.now(), "done"
        play.conversation, play.leaf, play.opening = Conversation(), -1, 0
        task = play.start.task
        asked = {"id": task.id, "prompt": task.text, "tokens": task.tokens, "answer": task.answer, "row": task.row}
        self._ask(play, self._pool.begin(play.start.id, asked, play.start.group_seed), self._told_next)

    def _told_next(self, play: Play, told: dict[str, Any]) -> None:
        """Sample what the function asks for, or end the rollout with what it returned."""
        tokens = told.get("sample")
        if tokens is None:
            reward: Reward | None = told["reward"]
            if not play.conversation.turns:
                raise DataError("the rollout function returned without a sample")
            if reward is None and self.must_value:
                raise DataError("the rollout function returned None, and rewards is empty: nothing values the rollout")
            self._end(play, reward, None)
        elif play.ending != "done":
            raise DataError(f"the rollout function sampled again after {play.ending}: three empty lists had come")
        elif not tokens or not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            raise DataError("the rollout function sampled after ids that are no tokens, or after none")
        else:
            self._attach(play, tokens)
            self._sample(play)

    def _attach(self, play: Play, tokens: list[int]) -> None:
        """Make `play.leaf` the node whose path is `tokens`: below the longest path that they begin with."""
        one = play.conversation
        length, parent = one.longest_beginning(tokens)
        if parent is not None and length == len(tokens):
            play.leaf = parent
            return
        play.leaf = one.add_context(tokens[length:], parent)
        one.messages.append({"role": "user", "content": self._chat.turn_text(tokens[length:])})
        play.opening = play.opening or 1

    def _answered(self, play: Play, completion: Completion) -> None:
        play.leaf = play.conversation.add_turn(completion, play.leaf)
        tokens = completion.tokens.tolist()
        play.conversation.messages.append({"role": "assistant", "content": self._chat.turn_text(tokens)})
        self._give(play, (tokens, completion.log_probs.tolist(), completion.versions.tolist()))

    def _score(self, play: Play, ending: Ending) -> None:
        """Tell the function that a budget is used up."""
        play.ending = ending
        self._give(play, ([], [], []))

    def _give(self, play: Play, sampled: tuple[list[int], list[float], list[int]]) -> None:
        self._ask(play, self._pool.resume(play.start.id, sampled), self._told_next)
