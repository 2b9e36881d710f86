"""Chat of one row, with the arguments of the chat template that the row names."""

from collections.abc import Mapping
from typing import Any

from rlctl.data.chat import Chat
from rlctl.data.row_columns import template_arguments


def chat_of_row(chat: Chat, values: Mapping[str, Any]) -> Chat:
    """Return the chat with a row's arguments of the template. Names that the template does not take are left out.

    Raises DataError.
    """
    arguments = template_arguments(values)
    if not arguments:
        return chat
    unknown = chat.unknown_kwargs(arguments)
    return chat.with_kwargs({name: value for name, value in arguments.items() if name not in unknown})
