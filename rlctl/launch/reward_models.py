"""Reward models: loading of their tokenizers, and the ranks or engines that value rollouts."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlctl.config.grpo_schema import AnyRewardSection, ModelRewardSection
from rlctl.config.plugins import model_rewards, reward_names
from rlctl.data.chat import Chat
from rlctl.data.load_tokenizer import load_tokenizer
from rlctl.data.templates import find_template
from rlctl.launch.roles import RoleFiles
from rlctl.preflight.declared_columns import Role
from rlctl.preflight.written_roles import WrittenRole, longest_sequence_of, reward_role
from rlctl.rewards.base import RewardFailure, RewardInput, UnusableError
from rlctl.rewards.scorer import Scorer
from rlctl.rollout.frozen_scores import FrozenScores, GivenTokens
from rlctl.rollout.model_rewards import ConversationEncoder, ModelRewards, RewardModel
from rlctl.rollout.types import Decode
from rlctl.training.micro_batching import TrainingSample

if TYPE_CHECKING:
    # It imports Ray, see `frozen_scores.py`.
    from rlctl.training.trainer_group import TrainerGroup


def load_encoder(
    section: ModelRewardSection, role: WrittenRole, files: RoleFiles, policy_longest: int
) -> ConversationEncoder:
    """Load a reward model's tokenizer and chat template. policy_longest: most tokens of the policy's sequences.

    Raises DataError.
    """
    assert files.facts.sizes
    chat = load_own_chat(Path(files.folder), files.tokenizer)
    return ConversationEncoder(chat, longest_sequence_of(role, files.facts.sizes, policy_longest), section.over)


def load_own_chat(folder: Path, tokenizer: str) -> Chat:
    """Load the tokenizer and the chat template of the model in `folder`. Raises DataError."""
    loaded = load_tokenizer(tokenizer)
    return Chat(loaded, find_template("auto", loaded), system_prompt=None, folder=folder)


def try_encoders(rewards: Sequence[AnyRewardSection], item: RewardInput) -> list[str]:
    """Encode one rollout for each reward model on this machine, without its weights. Return a line for each.

    Raises UnusableError if a model cannot read it, and DataError for a tokenizer that cannot be loaded.
    """
    lines = []
    for index, reward in model_rewards(rewards).items():
        if not Path(reward.path).is_dir():
            lines.append(f"rewards.{index}: not tried, {reward.path} is not on this machine")
            continue
        chat = load_own_chat(Path(reward.path), reward.path)
        encoded = ConversationEncoder(chat, sys.maxsize, reward.over).encode(item)
        if isinstance(encoded, RewardFailure):
            raise UnusableError([(index, str(encoded))], rewards)
        text = f"the first row's own answer has {len(encoded[-1].tokens)} tokens of the model's tokenizer"
        lines.append(f"rewards.{index}: {text}; its value needs the model, which a start of the run loads")
    return lines


def open_reward_models(
    rewards: Sequence[AnyRewardSection],
    encoders: Mapping[int, ConversationEncoder],
    frozen: Mapping[Role, FrozenScores],
    trainer: "TrainerGroup",
    scorer: Scorer,
    decode: Decode,
) -> ModelRewards:
    """Return the reward models of a run. encoders: by the index of the reward. frozen: models on engines, by role."""
    names = reward_names(rewards)
    models = []
    for index in model_rewards(rewards):
        role = reward_role(index)
        if role in frozen:
            scores = frozen[role]
            models.append(RewardModel(names[index], encoders[index], value=scores.scores, begin=scores.begin))
        else:
            value = partial(_value_in_ranks, trainer, role)
            models.append(RewardModel(names[index], encoders[index], value=value, begin=None))
    needs_ranks = any(model.begin is None for model in models)
    return ModelRewards(models, scorer, decode, needs_ranks=needs_ranks)


def _value_in_ranks(trainer: "TrainerGroup", role: Role, sequences: Sequence[GivenTokens]) -> list[NDArray[np.float32]]:
    return trainer.values([TrainingSample(sequence.tokens, sequence.sampled) for sequence in sequences], role)
