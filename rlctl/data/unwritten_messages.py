"""Search for messages whose text a chat template leaves out, so that the model does not see them."""

import re
from collections.abc import Sequence
from typing import Any

from rlctl.config.errors import one_line
from rlctl.data.chat import Chat
from rlctl.data.files import DataError
from rlctl.data.rows import Messages

# Most shapes of chats (roles and keys of the messages) whose result is kept.
_SHAPES = 512
# Stand-in for the chat before messages that follow a turn.
_EARLIER = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
_TEXT = "the-text-of-message-{}-"


class UnwrittenMessages:
    """Finder of messages that a template leaves out. It renders one chat of each shape (roles and keys of messages).

    Most chats of a data set have one of a few shapes, so few chats are rendered.
    """

    def __init__(self) -> None:
        # Roles by the hash of a shape. Only the hash is kept, because a chat may have thousands of messages.
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
        """Return the roles of the messages whose text the template leaves out.

        The template must have rendered these messages without an error. follows_turn: the messages stand behind a turn
        of the assistant and do not begin the chat.
        """
        if chat.template is None:
            return []
        keys = tuple((message["role"], bool(message["content"].strip()), *sorted(message)) for message in messages)
        shape = hash((str(chat.template_kwargs), generation, follows_turn, bool(tools), keys))
        roles = self._roles.get(shape)
        if roles is None:
            earlier = _EARLIER if follows_turn else []
            roles = _try_texts(chat, [*earlier, *messages], tools, generation)
            # Several threads may use this object, so the whole dictionary is cleared at once.
            if len(self._roles) >= _SHAPES:
                self._roles.clear()
            self._roles[shape] = roles
        return roles


def _try_texts(chat: Chat, messages: Messages, tools: Sequence[dict[str, Any]], generation: bool) -> list[str]:
    """Render the messages with unique texts; return the roles of the messages whose text is missing in the result."""
    marked = list(messages)
    roles = dict[str, str]()
    for index, message in enumerate(messages):
        if message["content"].strip():
            text = _TEXT.format(index)
            marked[index] = {**message, "content": text}
            roles[text] = message["role"]
    try:
        written = chat.render(marked, generation, tools)
    except Exception:  # The template takes only the row's real texts, which it has rendered before.
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
