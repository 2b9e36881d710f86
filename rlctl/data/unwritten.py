"""Messages whose text a chat template leaves out: the model does not see them."""

from collections.abc import Sequence
from typing import Any

from rlctl.config.errors import one_line
from rlctl.data.chat import Chat
from rlctl.data.files import DataError
from rlctl.data.rows import Messages

# Most shapes of chats that are kept.
_SHAPES = 512


class UnwrittenMessages:
    """Trials of a template by the shape of a chat: few chats of a data set differ in their roles and keys."""

    def __init__(self) -> None:
        self._roles: dict[object, list[str]] = {}

    def find_roles(
        self, chat: Chat, messages: Messages, tools: Sequence[dict[str, Any]], *, generation: bool
    ) -> list[str]:
        """Return the roles of the messages whose text the template leaves out. It must have written these messages."""
        if chat.template is None:
            return []
        keys = tuple((message["role"], bool(message["content"].strip()), *sorted(message)) for message in messages)
        shape = (str(chat.template_kwargs), generation, bool(tools), keys)
        if shape not in self._roles:
            while len(self._roles) >= _SHAPES:
                self._roles.pop(next(iter(self._roles)))
            self._roles[shape] = _try_texts(chat, messages, tools, generation)
        return self._roles[shape]


def _try_texts(chat: Chat, messages: Messages, tools: Sequence[dict[str, Any]], generation: bool) -> list[str]:
    """Write the messages with other texts, and return the roles of the absent ones."""
    others = list(messages)
    for index, message in enumerate(messages):
        if message["content"].strip():
            others[index] = {**message, "content": f"the-text-of-message-{index}-"}
    try:
        written = chat.render(others, generation, tools)
    except Exception:  # The template takes the row's own text alone, and has written it.
        return []
    return [other["role"] for other in others if other["content"].strip() and other["content"] not in written]


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
