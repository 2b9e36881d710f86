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
from rlctl.data.unwritten_messages import UnwrittenMessages
from rlctl.environments.contract import Message
from rlctl.environments.tool_calls import parse_tool_calls
from rlctl.environments.tool_schema import Schema
from rlctl.rollout.players.episode_state import EpisodeState
from rlctl.rollout.players.episode_tries import EpisodeTries
from rlctl.rollout.policy import Policy
from rlctl.utils.user_code import shorten_text


@dataclass(frozen=True)
class ToolLoop:
    """Turns of one conversation after another."""

    chat: Chat
    # None: there are no tools to call.
    tries: EpisodeTries | None
    # Parser of tool calls, see `tool_formats.PARSERS`; None: no text is a call.
    tool_format: str | None
    # Takes each message of the policy and of a tool as it comes.
    tell: Callable[[Message], None] = lambda message: None
    # Takes control tokens that were spelled to the policy.
    note_spelled: Callable[[EpisodeState, list[str]], None] = lambda episode, spelled: None
    # Takes the number of messages that the chat template leaves out.
    note_unwritten: Callable[[EpisodeState, int], None] = lambda episode, count: None
    trials: UnwrittenMessages = field(default_factory=UnwrittenMessages)

    def add(self, episode: EpisodeState, messages: list[Message]) -> None:
        """Say something to the policy."""
        episode.added += messages
        if episode.leaf >= 0:
            self.note_spelled(episode, self.chat.find_spelled(messages))

    async def answer(self, episode: EpisodeState, tools: list[Schema], policy: Policy) -> str | None:
        """Play until a turn has no call, and return it; None where a budget ended the episode, which has the ending.

        Raises DataError for messages that the chat template refuses, EpisodeFailed if a tool's process fails.
        """
        while episode.conversation.turns < episode.limits.max_turns:
            tokens = self._extend_prompt(episode, tools)
            turn = episode.conversation.turns
            if ending := episode.used_up(turn, len(tokens), asyncio.get_running_loop().time()):
                episode.ending = ending
                return None
            completion = await policy.sample(episode.request(turn, tokens))
            episode.leaf = episode.conversation.add_turn(completion, episode.leaf)
            text = self.chat.turn_text(completion.tokens.tolist())
            message: Message = {"role": "assistant", "content": text}
            episode.conversation.messages.append(message)
            self.tell(message | {"cut": True} if completion.finish == "length" else message)
            calls = parse_tool_calls(text, self.tool_format, tools).calls if self.tool_format and tools else []
            if not calls or self.tries is None:
                return text
            episode.count_calls(calls)
            results = await self.tries.ask(episode, self.tries.pool.call(episode.start.id, calls))
            episode.tool_errors += sum(result.failed for result in results)
            episode.tool_raised += sum(bool(result.raised) for result in results)
            tool_messages = [result.message() for result in results]
            self.add(episode, tool_messages)
            for tool_message in tool_messages:
                self.tell(tool_message)
        episode.ending = "max_turns"
        return None

    def _extend_prompt(self, episode: EpisodeState, tools: list[Schema]) -> list[int]:
        """Move the added messages into the conversation, and return the tokens of the next turn's prompt."""
        conversation = episode.conversation
        chat = chat_of_row(self.chat, episode.start.task.row)
        earlier_messages = list(conversation.messages)
        added = episode.added
        episode.added = []
        conversation.messages += added
        if episode.leaf < 0:
            episode.leaf = conversation.add_context(self._render_conversation(episode, tools), None)
            self.note_unwritten(episode, len(self.trials.find_roles(chat, added, tools)))
            return conversation.tokens(episode.leaf)
        last_turn = conversation.completions[-1].tokens.tolist()
        link = chat.link(earlier_messages[:-1], added, tools).tokens_after(last_turn, frozenset(chat.ends.stops))
        self.note_unwritten(episode, len(self.trials.find_roles(chat, added, tools, follows_turn=True)))
        tokens = conversation.tokens(episode.leaf) + link
        if episode.limits.history == "strip":
            rendered = self._render_conversation(episode, tools)
            if rendered != tokens:
                episode.leaf = conversation.add_context(rendered, None)
                return rendered
        episode.leaf = conversation.add_context(link, episode.leaf)
        return tokens

    def _render_conversation(self, episode: EpisodeState, tools: list[Schema]) -> list[int]:
        """Return the whole conversation as the template writes it. Raises DataError for messages that it refuses."""
        try:
            chat = chat_of_row(self.chat, episode.start.task.row)
            prompt = chat.prompt(episode.conversation.messages, tools)
        except DataError:
            raise
        except Exception as error:  # any error of a template, or of a tokenizer that refuses the text
            reason = shorten_text(f"{type(error).__name__}: {error}")
            raise DataError(f"the chat template refuses the messages of this episode: {reason}") from error
        if episode.leaf < 0:
            self.note_spelled(episode, prompt.spelled)
        return prompt.tokens
