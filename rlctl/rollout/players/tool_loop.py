"""The tool loop: samples turns and calls the tools that they ask for, until a turn calls no tool (contract 4).

A turn's prompt is the exact tokens of the conversation so far, followed by the tokens of newer messages (`Chat.link`).
Sampled tokens are never decoded and encoded again.
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
    """Plays the policy's turns in episodes. One tool loop serves many episodes, and keeps no state of them."""

    chat: Chat
    # Calls the tools; None if there are no tools.
    tries: EpisodeTries | None
    # Parser of tool calls, a key of `tool_formats.PARSERS`; None: no text is read as a call.
    tool_format: str | None
    # Called with each message of the policy and of a tool as it comes.
    tell: Callable[[Message], None] = lambda message: None
    # Called with the control tokens that the text of messages to the policy contains.
    note_spelled: Callable[[EpisodeState, list[str]], None] = lambda episode, spelled: None
    # Called with the number of messages that the chat template leaves out.
    note_unwritten: Callable[[EpisodeState, int], None] = lambda episode, count: None
    # Finds messages that the chat template leaves out.
    trials: UnwrittenMessages = field(default_factory=UnwrittenMessages)

    def add(self, episode: EpisodeState, messages: list[Message]) -> None:
        """Add messages to the policy's next prompt."""
        episode.added += messages
        if episode.leaf >= 0:
            self.note_spelled(episode, self.chat.find_spelled(messages))

    async def answer(self, episode: EpisodeState, tools: list[Schema], policy: Policy) -> str | None:
        """Play until a turn calls no tool; return this turn's text. Return None if a budget ended the episode.

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
        """Move the episode's added messages into its conversation; return the tokens of the next turn's prompt."""
        conversation = episode.conversation
        chat = chat_of_row(self.chat, episode.start.task.row)
        earlier_messages = list(conversation.messages)
        added = episode.added
        episode.added = []
        conversation.messages += added
        if episode.leaf < 0:
            # The first prompt: no turn was sampled yet.
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
                # The template has rewritten earlier turns: begin a new branch, which is another training row.
                episode.leaf = conversation.add_context(rendered, None)
                return rendered
        episode.leaf = conversation.add_context(link, episode.leaf)
        return tokens

    def _render_conversation(self, episode: EpisodeState, tools: list[Schema]) -> list[int]:
        """Return the tokens of the whole conversation, rendered by the chat template. Raises DataError if the template
        refuses a message."""
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
