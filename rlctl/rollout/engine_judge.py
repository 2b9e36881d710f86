"""Replies to a judge's questions, sampled by engines of the run that serve the judge's model."""

from dataclasses import dataclass, field
from itertools import count
from typing import Any

from rlctl.data.chat import Chat
from rlctl.data.files import DataError
from rlctl.generation.requests import RequestId, RolloutId, TurnRequest
from rlctl.rewards.coroutine_calls import TakeAnswer
from rlctl.rollout.dispatcher import RolloutDispatcher


@dataclass
class EngineJudge:
    """Engines of one judge; an `Answerer` of its reward. The policy's training sees none of their tokens."""

    dispatcher: RolloutDispatcher
    # Role of the judge's model, for the ids of requests.
    name: str
    # Tokenizer and chat template of the judge's model.
    chat: Chat
    # Most tokens of a question and its reply.
    longest: int
    seed: int
    _numbers: "count[int]" = field(default_factory=count)

    def ask(self, question: str, max_tokens: int, temperature: float, take_answer: TakeAnswer) -> None:
        events = self.dispatcher.events
        events.call(lambda: events.spawn(self._answer_question(question, max_tokens, temperature, take_answer)))

    def look_after(self) -> None:
        if self.dispatcher.has_lost:
            self.dispatcher.repair()

    def close(self) -> None:
        """Stop answering for good."""
        self.dispatcher.close()

    async def _answer_question(
        self, question: str, max_tokens: int, temperature: float, take_answer: TakeAnswer
    ) -> None:
        try:
            tokens = self.chat.prompt([{"role": "user", "content": question}]).tokens
        except DataError as error:
            take_answer({"problem": f"judge cannot be asked: {error}"})
            return
        room = self.longest - len(tokens)
        if room < 1:
            problem = f"judge cannot be asked: the question has {len(tokens)} tokens, at most {self.longest - 1}"
            take_answer({"problem": problem})
            return
        number = next(self._numbers)
        request = TurnRequest(
            id=RequestId(RolloutId("train", self.name, number, 0)),
            prompt_tokens=list(tokens),
            max_new_tokens=min(max_tokens, room),
            temperature=temperature,
            seed=self.seed,
        )
        completion = await self.dispatcher.sample_turn(request)
        sampled: list[int] = completion.tokens.tolist()
        answer: dict[str, Any] = {"text": self.chat.turn_text(sampled)}
        take_answer({**answer, "input_tokens": len(tokens), "output_tokens": len(sampled)})
