"""Messages whose text a chat template leaves out: the model does not see them."""

import re
from collections.abc import Sequence
from typing import Any

from rlctl.config.errors import one_line
from rlctl.data.chat import Chat
from rlctl.data.files import DataError
from rlctl.data.rows import Messages

# Most shapes of chats that are kept.
_SHAPES = 512
# Stands for the chat before messages that follow a turn.
_EARLIER = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
_TEXT = "the-text-of-message-{}-"


class UnwrittenMessages:
    """Trials of a template by the shape of a chat: few chats of a data set differ in their roles and keys."""

    def __init__(self) -> None:
        # By the hash of a shape: a chat may have thousands of messages.
        self._roles: dict[int, list[str]] = {}

    def find_roles(
        self,
        chat: Chat,
        messages: Messages,
        tools: Sequence[dict[str, Any]],
        *,
        generation: bool = True,
        follows_turn: bool = False,
    ) -> list[str]:
        """Return the roles of the messages whose text the template leaves out. It must have written these messages.

        follows_turn: the messages do not begin the chat. They come behind a turn of the assistant.
        """
        if chat.template is None:
            return []
        keys = tuple((message["role"], bool(message["content"].strip()), *sorted(message)) for message in messages)
        shape = hash((str(chat.template_kwargs), generation, follows_turn, bool(tools), keys))
        roles = self._roles.get(shape)
        if roles is None:
            earlier = _EARLIER if follows_turn else []
            roles = _try_texts(chat, [*earlier, *messages], tools, generation)
            # Sessions of several threads share these trials.
            if len(self._roles) >= _SHAPES:
                self._roles.clear()
            self._roles[shape] = roles
        return roles


def _try_texts(chat: Chat, messages: Messages, tools: Sequence[dict[str, Any]], generation: bool) -> list[str]:
    """Write the messages with other texts, and return the roles of the absent ones."""
    marked = list(messages)
    roles = dict[str, str]()
    for index, message in enumerate(messages):
        if message["content"].strip():
            text = _TEXT.format(index)
            marked[index] = {**message, "content": text}
            roles[text] = message["role"]
    try:
        written = chat.render(marked, generation, tools)
    except Exception:  # The template takes the row's own text alone, and has written it.
        return []
    written_texts = set(re.findall(_TEXT.format("[0-9]+"), written))
    return [role for text, role in roles.items() if text not in written_texts]


def require_system_message(chat: Chat, text: str) -> None:
    """Raise DataError unless the template writes a system message with this text."""
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "question"}]
    try:
        chat.render(messages, generation=True)
    except Exception as error:  # Any error of a template.
        raise DataError(f"data.system_prompt: the chat template refuses a system message: {one_line(error)}") from error
    if "system" in _try_texts(chat, messages, (), generation=True):
        reason = "the chat template leaves out a system message, so that the model would not see it"
        raise DataError(f"data.system_prompt: {reason}; set another data.chat_template")
