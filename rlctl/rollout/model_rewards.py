"""Rewards by models with a value head: the output at the last token of a rollout's conversation (contract 11).

A reward model gets text, which its own tokenizer encodes by its own chat template. The values of a step's rollouts come
together, after its last rollout ended: packed in the trainer's ranks, or from engines that began as groups ended. A
rollout that a model cannot value has failed; it is never a 0.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.config.errors import one_line
from rlctl.data.chat import Chat
from rlctl.generation.requests import RolloutId
from rlctl.rewards.base import Outcome, RewardError, RewardFailure, RewardInput
from rlctl.rewards.metric_rows import MODEL_SECONDS, MODEL_TOKENS, MODEL_TOO_LONG
from rlctl.rewards.scorer import Scorer
from rlctl.rollout.frozen_scores import GivenTokens
from rlctl.rollout.scoring import read_inputs
from rlctl.rollout.types import Decode, RolloutGroup

# Return a column float32 [T] of each sequence, whose last number is the sequence's value.
ValueSequences = Callable[[Sequence[GivenTokens]], list[NDArray[np.float32]]]
# Most rollouts whose encoded conversations are kept for their step.
_MOST_KEPT = 1 << 16
TOO_LONG = "has too many tokens for the model"

Messages = list[dict[str, Any]]
# `GivenTokens.key`.
Key = tuple[bytes, int]
# Sequences to value, whose mean is the reward of a rollout; or why there is none.
Encoded = list[GivenTokens] | RewardFailure


@dataclass(frozen=True)
class ConversationEncoder:
    """Encodes a rollout's conversation for a reward model. May be called from several threads."""

    # The model's own tokenizer and chat template. Without a template the texts of the messages follow each other.
    chat: Chat
    # Most tokens of a conversation.
    longest: int
    over: str
    # The tokenizer is used by one thread at a time.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def encode(self, item: RewardInput) -> Encoded:
        """Return the conversation up to its last turn; with `over=turns`, up to the end of each turn of the policy."""
        sequences = []
        for messages in self._conversations(item):
            try:
                with self._lock:
                    tokens = self.chat.prompt_tokens(self.chat.render(messages, generation=False))
            except Exception as error:  # A template raises any error.
                return RewardFailure("could not be rendered by the model's chat template", detail=one_line(error))
            if not 2 <= len(tokens) <= self.longest:
                kind = TOO_LONG if len(tokens) > self.longest else "has too few tokens for the model"
                return RewardFailure(kind, detail=f"{len(tokens)}, at least 2 and at most {self.longest}")
            sampled = np.zeros(len(tokens), np.bool_)
            sampled[-1] = True
            sequences.append(GivenTokens(np.array(tokens, np.int32), sampled))
        return sequences

    def _conversations(self, item: RewardInput) -> Iterator[Messages]:
        prompt: Messages = [*item.prompt_messages]
        completion: Messages = [*item.completion_messages]
        if not prompt:
            prompt = [{"role": "user", "content": item.prompt}]
            completion = completion or [{"role": "assistant", "content": item.completion}]
        ends = [len(completion)]
        if self.over == "turns":
            turns = [number for number, message in enumerate(completion, 1) if message.get("role") == "assistant"]
            ends = turns or ends
        for end in ends:
            yield [*prompt, *completion[:end]]


@dataclass(frozen=True)
class RewardModel:
    """A reward model of the run."""

    # Name of the reward in metrics.
    name: str
    encoder: ConversationEncoder
    value: ValueSequences
    # Begins to value sequences; None if all are valued together in the end.
    begin: Callable[[Sequence[GivenTokens]], None] | None


class ModelRewards:
    """The reward models of a run. `begin` is called on the scoring thread, the other methods on the training thread."""

    def __init__(
        self,
        models: Sequence[RewardModel],
        scorer: Scorer,
        decode: Decode,
        *,
        needs_ranks: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """decode: decodes tokens to text, without special tokens. needs_ranks: a model is in the trainer's ranks, so
        that engines on the same devices must sleep.
        """
        self._models = models
        self._scorer = scorer
        self._decode = decode
        self.needs_ranks = needs_ranks
        self._now = now
        # Encoded conversations of rollouts that `begin` got, by the rollout, one for each model.
        self._encoded: OrderedDict[RolloutId, list[Encoded]] = OrderedDict()
        self._lock = threading.Lock()
        # Metrics of the last call.
        self.metrics: dict[str, float] = {}

    def begin(self, groups: Sequence[RolloutGroup]) -> None:
        """Encode the conversations of groups that ended. Models on engines begin to value them."""
        for rollout, item in read_inputs(groups, self._decode):
            encoded = [model.encoder.encode(item) for model in self._models]
            for model, sequences in zip(self._models, encoded, strict=True):
                if model.begin and not isinstance(sequences, RewardFailure):
                    model.begin(sequences)
            with self._lock:
                self._encoded[rollout.id] = encoded
                while len(self._encoded) > _MOST_KEPT:
                    self._encoded.popitem(last=False)

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with the values of all reward models in their scores."""
        began = self._now()
        encoded = {}
        for rollout, item in read_inputs(groups, self._decode):
            with self._lock:
                kept = self._encoded.pop(rollout.id, None)
            encoded[rollout.id] = kept or [model.encoder.encode(item) for model in self._models]
        outcomes: dict[RolloutId, dict[str, Outcome]] = {rollout_id: {} for rollout_id in encoded}
        tokens = 0
        too_long = 0
        for index, model in enumerate(self._models):
            sequences_of_model = {rollout_id: rows[index] for rollout_id, rows in encoded.items()}
            unique_sequences = _unique(sequences_of_model)
            tokens += sum(len(sequence.tokens) for sequence in unique_sequences.values())
            values = self._value(model, unique_sequences)
            for rollout_id, sequences in sequences_of_model.items():
                outcome = _outcome_of(sequences, values)
                outcomes[rollout_id][model.name] = outcome
                too_long += isinstance(outcome, RewardFailure) and outcome.kind == TOO_LONG
        self.metrics = {
            MODEL_TOKENS.name: float(tokens),
            MODEL_SECONDS.name: self._now() - began,
            MODEL_TOO_LONG.name: float(too_long),
        }
        return [self._complete(group, outcomes) for group in groups]

    def try_on(self, item: RewardInput) -> dict[str, float]:
        """Return the value of one input by each model's name, before the run starts. Raises RewardError."""
        values = {}
        for model in self._models:
            encoded = model.encoder.encode(item)
            outcome = _outcome_of(encoded, self._value(model, _unique({0: encoded})))
            if not isinstance(outcome, float):
                raise RewardError(f"{model.name}: {outcome}")
            values[model.name] = outcome
        return values

    def _value(self, model: RewardModel, sequences: Mapping[Key, GivenTokens]) -> dict[Key, float]:
        """Return the value of each sequence by its key."""
        if not sequences:
            return {}
        columns = model.value(list(sequences.values()))
        return {key: float(column[-1]) for key, column in zip(sequences, columns, strict=True)}

    def _complete(self, group: RolloutGroup, outcomes: Mapping[RolloutId, Mapping[str, Outcome]]) -> RolloutGroup:
        rollouts = []
        for rollout in group.rollouts:
            score = rollout.score
            if score is not None and rollout.id in outcomes:
                score = self._scorer.complete(score, outcomes[rollout.id])
            rollouts.append(replace(rollout, score=score))
        return replace(group, rollouts=rollouts)


def _unique(encoded: Mapping[Any, Encoded]) -> dict[Key, GivenTokens]:
    """Return the different sequences of all rollouts, by their keys."""
    unique_sequences: dict[Key, GivenTokens] = {}
    for sequences in encoded.values():
        if not isinstance(sequences, RewardFailure):
            unique_sequences |= {sequence.key: sequence for sequence in sequences}
    return unique_sequences


def _outcome_of(encoded: Encoded, values: Mapping[Key, float]) -> Outcome:
    """Return the mean value of a rollout's sequences, or why there is none."""
    if isinstance(encoded, RewardFailure):
        return encoded
    value = float(np.mean([values[sequence.key] for sequence in encoded]))
    if not np.isfinite(value):
        return RewardFailure("no finite number", detail=f"the model's output is {value}")
    return value
