"""The tool loop: turns of the policy, and the tools that it calls, until a turn calls none (contract 4).

A turn's prompt is the conversation's tokens so far and the tokens of the messages since (`Chat.link`). Nothing sampled
is encoded again.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from rlctl.data.chat import Chat
from rlctl.data.files import DataError
from rlctl.data.row_chat import chat_of_row
from rlctl.data.unwritten import UnwrittenMessages
from rlctl.environments.contract import Message
from rlctl.environments.tool_calls import parse_tool_calls
from rlctl.environments.tool_schema import Schema
from rlctl.rollout.players.course import Course
from rlctl.rollout.players.episodes import Episodes
from rlctl.rollout.policy import Policy
from rlctl.utils.user_code import shortened


@dataclass(frozen=True)
class ToolLoop:
    """Turns of one conversation after another."""

    chat: Chat
    # None: there are no tools to call.
    episodes: Episodes | None
    # Parser of tool calls, see `tool_formats.PARSERS`; None: no text is a call.
    tool_format: str | None
    # Takes each message of the policy and of a tool as it comes.
    tell: Callable[[Message], None] = lambda message: None
    # Takes control tokens that were spelled to the policy, and the number of messages that it does not see.
    spelled: Callable[[Course, list[str]], None] = lambda course, spelled: None
    unwritten: Callable[[Course, int], None] = lambda course, count: None
    trials: UnwrittenMessages = field(default_factory=UnwrittenMessages)

    def add(self, course: Course, messages: list[Message]) -> None:
        """Say something to the policy."""
        course.added += messages
        if course.leaf >= 0:
            self.spelled(course, self.chat.spelled(messages))

    async def answer(self, course: Course, tools: list[Schema], policy: Policy) -> str | None:
        """Play until a turn has no call, and return it; None where a budget ended the course, which has the ending.

        Raises DataError for messages that the chat template refuses, EpisodeFailed if a tool's process fails.
        """
        while course.conversation.turns < course.limits.max_turns:
            tokens, turn = self._prompt(course, tools), course.conversation.turns
            if ending := course.used_up(turn, len(tokens), asyncio.get_running_loop().time()):
                course.ending = ending
                return None
            completion = await policy.sample(course.request(turn, tokens))
            course.leaf = course.conversation.add_turn(completion, course.leaf)
            text = self.chat.turn_text(completion.tokens.tolist())
            message: Message = {"role": "assistant", "content": text}
            course.conversation.messages.append(message)
            self.tell(message | {"cut": True} if completion.finish == "length" else message)
            calls = parse_tool_calls(text, self.tool_format, tools).calls if self.tool_format and tools else []
            if not calls or self.episodes is None:
                return text
            course.count_calls(calls)
            results = await self.episodes.ask(course, self.episodes.pool.call(course.start.id, calls))
            course.tool_errors += sum(each.failed for each in results)
            course.tool_raised += sum(bool(each.raised) for each in results)
            self.add(course, answers := [each.message() for each in results])
            for each in answers:
                self.tell(each)
        course.ending = "max_turns"
        return None

    def _prompt(self, course: Course, tools: list[Schema]) -> list[int]:
        """Move the added messages into the conversation, and return the tokens of the next turn's prompt."""
        one, added, course.added = course.conversation, course.added, []
        chat = chat_of_row(self.chat, course.start.task.row)
        before = list(one.messages)
        one.messages += added
        if course.leaf < 0:
            course.leaf = one.add_context(self._rendered(course, tools), None)
            self.unwritten(course, len(self.trials.find_roles(chat, added, tools)))
            return one.tokens(course.leaf)
        last = one.completions[-1].tokens.tolist()
        link = chat.link(before[:-1], added, tools).after(last, frozenset(chat.ends.stops))
        self.unwritten(course, len(self.trials.find_roles(chat, added, tools, follows_turn=True)))
        tokens = one.tokens(course.leaf) + link
        if course.limits.history == "strip" and (rendered := self._rendered(course, tools)) != tokens:
            course.leaf = one.add_context(rendered, None)
            return rendered
        course.leaf = one.add_context(link, course.leaf)
        return tokens

    def _rendered(self, course: Course, tools: list[Schema]) -> list[int]:
        """Return the whole conversation as the template writes it. Raises DataError for messages that it refuses."""
        try:
            chat = chat_of_row(self.chat, course.start.task.row)
            prompt = chat.prompt(course.conversation.messages, tools)
        except DataError:
            raise
        except Exception as error:  # any error of a template, or of a tokenizer that refuses the text
            reason = shortened(f"{type(error).__name__}: {error}")
            raise DataError(f"the chat template refuses the messages of this episode: {reason}") from error
        if course.leaf < 0:
            self.spelled(course, prompt.spelled)
        return prompt.tokens
