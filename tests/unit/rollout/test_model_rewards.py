"""Reward models value the text of rollouts by their own tokenizers; a rollout that one cannot value has failed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlctl.config.grpo_schema import ModelRewardSection, RewardSection
from rlctl.data.chat import Chat
from rlctl.data.tasks import Task
from rlctl.data.templates import find_template
from rlctl.generation.requests import Completion
from rlctl.rewards.base import RewardError, RewardFailure, RewardInput
from rlctl.rewards.scorer import Score, Scorer
from rlctl.rollout.frozen_scores import GivenTokens
from rlctl.rollout.model_rewards import ConversationEncoder, ModelRewards, RewardModel
from rlctl.rollout.scoring import GroupScorer
from rlctl.rollout.types import Rollout, RolloutGroup
from tests.tiny_models import make_tokenizer
from tests.turns import turn
from tests.unit.rollout.test_scoring import make_episode, make_rollout

MODEL = ModelRewardSection(
    name="model",
    weight=2.0,
    correct_at=None,
    path="m",
    place="auto",
    num_engines=1,
    tensor_parallel_size=1,
    max_length=None,
    over="rollout",
)
EXACT = RewardSection("exact", 1.0, None, None, 5.0, 64)
TASK = Task("t", [], "1+1=", "2", {})
CHAT_TASK = replace(TASK, messages=[{"role": "user", "content": "1+1="}])
TEXTS = {5: "2", 6: "30", 7: "x" * 90}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def make_encoder(tokenizer: Any, over: str = "rollout", template: str | None = "auto") -> ConversationEncoder:
    own_template = find_template(template, tokenizer) if template else None
    return ConversationEncoder(Chat(tokenizer, own_template, system_prompt=None), longest=60, over=over)


def decode(rows: list[list[int]]) -> list[str]:
    return ["".join(TEXTS.get(token, "") for token in row) for row in rows]


def read_text(tokenizer: Any, sequence: GivenTokens) -> str:
    return str(tokenizer.decode(sequence.tokens.tolist()))


def sample(index: int, token: int) -> Rollout:
    answer = Completion(np.array([token], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")
    return Rollout.from_turn(turn(0, index), answer)


class Stage:
    """Reward models over a scorer. A sequence's value is its number of tokens."""

    def __init__(self, tokenizer: Any, *sections: ModelRewardSection | RewardSection, over: str = "rollout") -> None:
        self.calls: list[list[GivenTokens]] = []
        self.begun: list[GivenTokens] = []
        self.scorer = Scorer(sections)
        models = [
            RewardModel(name, make_encoder(tokenizer, over), self.value, self.begun.extend)
            for name, section in zip(self.scorer.names, sections)
            if isinstance(section, ModelRewardSection)
        ]
        self.models = ModelRewards(models, self.scorer, decode, needs_ranks=False, now=iter(range(100)).__next__)

    def value(self, sequences: Sequence[GivenTokens]) -> list[np.ndarray[Any, Any]]:
        self.calls.append(list(sequences))
        return [np.full(len(sequence.tokens), len(sequence.tokens), np.float32) for sequence in sequences]

    def score(self, group: RolloutGroup, *, begins: bool = True) -> list[Score]:
        if begins:
            self.models.begin([group])
        open_groups = GroupScorer(self.scorer, decode)([group])
        assert all(rollout.reward is None for rollout in open_groups[0].rollouts)
        return self.models(open_groups)[0].scores


def test_a_conversation_is_rendered_by_the_models_own_template(tokenizer: Any) -> None:
    item = RewardInput("<prompt>1+1=", "2", "2", {}, CHAT_TASK.messages, [{"role": "assistant", "content": "2"}])
    (chat,) = make_encoder(tokenizer).encode(item)
    assert read_text(tokenizer, chat) == "u:1+1=\na:2\n"
    assert chat.sampled.tolist() == [False] * (len(chat.tokens) - 1) + [True]
    (text,) = make_encoder(tokenizer).encode(replace(item, prompt="1+1=", prompt_messages=[]))
    assert read_text(tokenizer, text) == "u:1+1=\na:2\n"
    (plain,) = make_encoder(tokenizer, template=None).encode(replace(item, prompt="1+1=", prompt_messages=[]))
    assert read_text(tokenizer, plain) == "1+1=2"


def test_a_control_token_that_an_answer_spells_stays_text(tokenizer: Any) -> None:
    item = RewardInput("1", "2<pad>2", None, {}, [], [{"role": "assistant", "content": "2<pad>2"}])
    (sequence,) = make_encoder(tokenizer).encode(item)
    assert tokenizer.pad_token_id not in sequence.tokens


def test_a_text_that_the_model_cannot_read_is_a_failure(tokenizer: Any) -> None:
    long = make_encoder(tokenizer).encode(RewardInput("1", "2" * 60, None, {}))
    assert isinstance(long, RewardFailure) and "too many tokens" in long.kind and long.detail.endswith("at most 60")
    strict = "{{ raise_exception('no tools') }}"
    chat = Chat(tokenizer, strict, system_prompt=None)
    refused = ConversationEncoder(chat, longest=60, over="rollout").encode(RewardInput("1", "2", None, {}))
    assert isinstance(refused, RewardFailure) and "no tools" in refused.detail


def test_the_value_is_weighted_and_added_once_the_step_has_it(tokenizer: Any) -> None:
    stage = Stage(tokenizer, MODEL, EXACT)
    group = RolloutGroup(TASK, [sample(0, 5), sample(1, 6), sample(2, 5)])
    scores = stage.score(group)
    assert [score.parts for score in scores] == [
        {"model": 11.0, "exact": 1.0},
        {"model": 12.0, "exact": 0.0},
        {"model": 11.0, "exact": 1.0},
    ]
    assert [score.value for score in scores] == [23.0, 24.0, 23.0]
    assert all(score.right for score in scores), "the first reward decides, at 1"
    assert len(stage.begun) == 3 and [len(call) for call in stage.calls] == [2], "equal texts are valued once"
    assert stage.models.metrics["reward_model/tokens"] == 23.0
    assert stage.models.metrics["reward_model/seconds"] > 0


def test_groups_of_a_checkpoint_are_encoded_in_their_step(tokenizer: Any) -> None:
    stage = Stage(tokenizer, replace(MODEL, correct_at=12.0))
    scores = stage.score(RolloutGroup(TASK, [sample(0, 5), sample(1, 6)]), begins=False)
    assert [(score.value, score.right) for score in scores] == [(22.0, False), (24.0, True)]


def test_a_failure_of_a_model_or_of_another_reward_is_no_zero(tokenizer: Any) -> None:
    stage = Stage(tokenizer, MODEL, EXACT)
    too_long, fine = stage.score(RolloutGroup(TASK, [sample(0, 7), sample(1, 5)]))
    assert too_long.value is None and too_long.failed and "too many tokens" in too_long.failed
    assert fine.value == 23.0 and stage.models.metrics["reward_model/too_long"] == 1.0
    assert "model" in stage.scorer.failures.most_common()
    no_answer = replace(TASK, answer=None)
    (failed,) = Stage(tokenizer, MODEL, EXACT).score(RolloutGroup(no_answer, [sample(0, 5)]))
    assert failed.value is None and failed.failed and failed.failed.startswith("exact: ")
    assert failed.parts == {"exact": None, "model": 11.0}


def test_a_value_that_is_no_number_fails(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tokenizer, MODEL)
    monkeypatch.setattr(stage, "value", lambda sequences: [np.array([np.nan], np.float32) for _ in sequences])
    models = ModelRewards(
        [RewardModel("model", make_encoder(tokenizer), stage.value, None)], stage.scorer, decode, needs_ranks=True
    )
    (group,) = models(GroupScorer(stage.scorer, decode)([RolloutGroup(TASK, [sample(0, 5)])]))
    assert group.scores[0].failed == "model: no finite number: the model's output is nan"
    with pytest.raises(RewardError, match="model: no finite number"):
        models.try_on(RewardInput("1", "2", None, {}))


def test_the_turns_of_an_episode_are_valued_each_and_a_failed_episode_is_not(tokenizer: Any) -> None:
    stage = Stage(tokenizer, MODEL, over="turns")
    group = RolloutGroup(TASK, [make_rollout(make_episode(1.0)), make_rollout(make_episode(None, "died"))])
    group.rollouts[1] = replace(group.rollouts[1], id=sample(1, 5).id)
    played, failed = stage.score(group)
    texts = [read_text(tokenizer, sequence) for sequence in stage.calls[0]]
    assert texts == ["u:1-9=\na:7\n", "u:1-9=\na:7\nu:+\na:8\n"]
    lengths = [len(sequence.tokens) for sequence in stage.calls[0]]
    assert played.parts == {"model": float(np.mean(lengths)), "environment": 1.0}
    assert played.value == 2 * float(np.mean(lengths)) + 1.0
    assert failed.failed == "environment: died" and failed.value is None


def test_a_penalty_of_the_environment_keeps_its_name(tokenizer: Any, tmp_path: Path) -> None:
    (score,) = Stage(tokenizer, MODEL).score(RolloutGroup(TASK, [make_rollout(make_episode({"model": 0.5}))]))
    assert score.parts["environment.model"] == 0.5 and score.value == 2 * score.parts["model"] + 0.5
