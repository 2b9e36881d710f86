"""Scores of groups: from the config's reward functions and from the environment's reward (contract 11)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlctl.config.plugins import ENVIRONMENT_REWARD
from rlctl.data.tasks import Task
from rlctl.environments.contract import Message, Reward
from rlctl.rewards.base import RewardInput
from rlctl.rewards.scorer import Score, Scorer
from rlctl.rollout.types import Decode, PlayedEpisode, Rollout, RolloutGroup

# Number of tokens at the end of a prompt that are decoded: enough for an opening tag such as <think> and white space.
_PROMPT_END = 32


@dataclass(frozen=True)
class GroupScorer:
    """Scores groups; may be called from several threads."""

    scorer: Scorer
    # Decodes tokens to text, without special tokens.
    decode: Decode

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with a score for each rollout. A failed episode is not passed to reward functions: its
        value is None."""
        inputs: list[RewardInput] = []
        episode_rewards: list[dict[str, float]] = []
        for rollout, item in read_inputs(groups, self.decode):
            inputs.append(item)
            episode_rewards.append(environment_rewards(rollout.episode.reward if rollout.episode else None))
        group_sizes = [sum(not _is_failed(rollout) for rollout in group.rollouts) for group in groups]
        scores = iter(self.scorer.score(inputs, episode_rewards, group_sizes))
        scored_groups = []
        for group in groups:
            scored = [
                replace(rollout, score=self._failure_score(rollout) if _is_failed(rollout) else next(scores))
                for rollout in group.rollouts
            ]
            scored_groups.append(replace(group, rollouts=scored))
        return scored_groups

    def _failure_score(self, rollout: Rollout) -> Score:
        reason = rollout.episode.failure if rollout.episode else None
        return Score(None, dict.fromkeys(self.scorer.names), f"environment: {reason}", right=False)


def read_inputs(groups: Sequence[RolloutGroup], decode: Decode) -> list[tuple[Rollout, RewardInput]]:
    """Return each rollout whose episode did not fail, with the input of its rewards, in the order of the groups."""
    texts = iter(decode([_tokens_to_decode(rollout) for group in groups for rollout in group.rollouts]))
    inputs = []
    for group in groups:
        for rollout in group.rollouts:
            text = next(texts)
            if not _is_failed(rollout):
                inputs.append((rollout, reward_input(group.task, rollout.episode, text)))
    return inputs


def reward_input(task: Task, episode: PlayedEpisode | None, text: str) -> RewardInput:
    """Return the input of rewards: the answer's text, or the whole conversation of an episode.

    In an episode, the prompt is its opening and the completion is the rest; the row's `messages` is the conversation.
    text: decoded tokens of `_tokens_to_decode`: the answer, or the end of the prompt of an episode's last turn.
    """
    if episode is None:
        completion_messages = [{"role": "assistant", "content": text}]
        return RewardInput(task.text, text, task.answer, task.row, task.messages, completion_messages)
    opening = episode.messages[: episode.opening]
    rest = episode.messages[episode.opening :]
    row = {**task.row, "messages": episode.messages}
    last_turn = _text_of([message for message in rest if message.get("role") == "assistant"][-1:])
    return RewardInput(_text_of(opening), _text_of(rest), task.answer, row, opening, rest, text, last_turn)


def _tokens_to_decode(rollout: Rollout) -> list[int]:
    """Return the sampled tokens. For an episode, return the last tokens of the prompt of its last turn instead: they
    show whether the prompt opened a thinking section."""
    if not rollout.episode:
        sampled_tokens: list[int] = rollout.sampled_tokens.tolist()
        return sampled_tokens
    if not rollout.rows:
        return []
    row = max(rollout.rows, key=lambda row: int(row.turns.max()))
    # First token of the row's last turn. The prompt ends before it.
    turn_start = int(row.turns.argmax())
    prompt_end: list[int] = row.tokens[max(0, turn_start - _PROMPT_END) : turn_start].tolist()
    return prompt_end


def _text_of(messages: Sequence[Message]) -> str:
    return "\n".join(str(message.get("content") or "") for message in messages)


def environment_rewards(reward: Reward | None) -> dict[str, float]:
    """Return an episode's rewards by name: a dict as it is, a number as `environment`, nothing for None."""
    if reward is None:
        return {}
    return reward if isinstance(reward, dict) else {ENVIRONMENT_REWARD: reward}


def sample_item(task: Task) -> RewardInput:
    """Return an input on which rewards are tried before a run: the task with the row's answer as the completion.

    A `<think>` at the end of the prompt is removed, since the answer is no thinking.
    """
    sample = reward_input(task, None, task.answer or "")
    return replace(sample, prompt=sample.prompt.rstrip().removesuffix("<think>") if sample.prompt else "")


def _is_failed(rollout: Rollout) -> bool:
    return rollout.episode is not None and rollout.episode.ending == "failed"
