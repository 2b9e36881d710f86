"""The reward `judge`: a model at a server gives verdicts on answers, alone, in pairs, or as whole groups."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from rlctl.rewards.base import ReasonedValue, Reward, RewardError, RewardFailure, RewardInput, failure_of
from rlctl.rewards.judge.client import JudgeClient
from rlctl.rewards.judge.ledger import JudgeLedger
from rlctl.rewards.judge.metric_rows import FAILED
from rlctl.rewards.judge.prompt import make_question
from rlctl.rewards.judge.sections import JudgeSection
from rlctl.rewards.judge.verdict import PAIR_VERDICTS, read_verdicts

JudgedGroup = list[ReasonedValue | RewardFailure | None]


class JudgeReward:
    """A judge of answers. records: file of its requests; None: nothing outlives the process. Raises RewardError."""

    def __init__(self, section: JudgeSection, records: Path | None) -> None:
        self._section = section
        self._words = PAIR_VERDICTS if section.compare == "pairs" else section.verdicts
        try:
            self._template = Path(section.prompt).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RewardError(f"cannot read the prompt {section.prompt}: {error}") from error
        ledger = JudgeLedger(records, section.budget_calls, section.budget_tokens)
        self.client = JudgeClient(section, ledger)

    async def judge_answer(self, item: RewardInput) -> ReasonedValue:
        """Return the value of one rollout. Raises RewardError."""
        return await self._judge_items([item])

    async def judge_pairs(self, group: Sequence[RewardInput]) -> JudgedGroup:
        """Return for each rollout of a task its mean verdict over the pairs with each other one.

        The first of a pair is the earlier rollout in every second pair, since judges prefer a place. A rollout has
        failed if all of its pairs did.
        """
        if len(group) < 2:
            return [None] * len(group)
        pairs = []
        for first, second in combinations(range(len(group)), 2):
            pairs.append((first, second) if (first + second) % 2 else (second, first))
        judged = await asyncio.gather(*(self._try_to_judge([group[first], group[second]]) for first, second in pairs))
        results: JudgedGroup = []
        for place in range(len(group)):
            values = []
            reasons = []
            failures = []
            for pair, outcome in zip(pairs, judged):
                if place not in pair:
                    continue
                if isinstance(outcome, RewardFailure):
                    failures.append(outcome)
                    continue
                values.append(outcome.value if pair[0] == place else 1.0 - outcome.value)
                reasons.append(f"{pair[0]} (A) and {pair[1]} (B): {outcome.reason}")
            stops = [failure for failure in failures if failure.stops_run]
            if stops or not values:
                results.append((stops or failures)[0])
            else:
                results.append(ReasonedValue(sum(values) / len(values), "\n\n".join(reasons)))
        return results

    async def judge_group(self, group: Sequence[RewardInput]) -> list[ReasonedValue]:
        """Return the value of each rollout of a task, from one reply. Raises RewardError."""
        names = [str(number) for number in range(1, len(group) + 1)]
        verdicts, reply = await self._ask_for_verdicts(group, names)
        return [ReasonedValue(verdicts[name], reply) for name in names]

    async def _try_to_judge(self, items: Sequence[RewardInput]) -> ReasonedValue | RewardFailure:
        try:
            return await self._judge_items(items)
        except RewardError as error:
            return failure_of(error)

    async def _judge_items(self, items: Sequence[RewardInput]) -> ReasonedValue:
        """Return the value of one answer, or that of the first one of a pair: the weighted mean over the criteria."""
        verdicts, reply = await self._ask_for_verdicts(items, self._section.names)
        weights = self._section.criteria or {"verdict": 1.0}
        total = sum(weights[name] * value for name, value in verdicts.items())
        return ReasonedValue(total / sum(weights.values()), reply)

    async def _ask_for_verdicts(
        self, items: Sequence[RewardInput], names: Sequence[str]
    ) -> tuple[dict[str, float], str]:
        """Return (name -> value of each verdict, the judge's reply).

        Raises RewardError if the reply has no verdict, or lacks the ticket that the prompt has.
        """
        section = self._section
        question = make_question(self._template, section.compare, items, list(section.criteria))
        reply = await self.client.ask(question.text)
        try:
            if question.ticket not in reply:
                raise RewardError("the judge's reply is to another question: it lacks the ticket of its prompt")
            return read_verdicts(reply, names, self._words, section.scale), reply
        except RewardError:
            self.client.count(FAILED.name)
            raise


def judge_reward(section: JudgeSection, records: Path | None) -> Reward:
    """Return the reward of a judge. Raises RewardError if its prompt cannot be read or its key is not set."""
    judge = JudgeReward(section, records)
    function: Callable[[Any], Any] = judge.judge_answer
    if section.compare is not None:
        function = judge.judge_pairs if section.compare == "pairs" else judge.judge_group
    return Reward(
        function,
        function,
        may_abstain=section.compare is not None,
        form=section.form,
        take_counts=judge.client.take_counts,
        connect=judge.client.connect,
    )
