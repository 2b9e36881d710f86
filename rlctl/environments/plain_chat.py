"""Chat whose tokens are the bytes of the text, for trials without a model."""

import json
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from rlctl.data.chat import Prompt, TurnLink
from rlctl.environments.contract import Message

# Parser of the calls in its texts.
PLAIN_FORMAT = "hermes"
# Text before the tools of a prompt.
TOOLS_MARK = "\n[tools] "


class PlainChat:
    """`Chat`, as far as a player calls it, whose template writes nothing but the texts."""

    ends = SimpleNamespace(stops=())
    template = None

    def unknown_kwargs(self, names: Collection[str]) -> dict[str, str]:
        """Refuse every argument: there is no template."""
        return dict.fromkeys(names, "needs a chat template")

    def with_kwargs(self, arguments: Mapping[str, Any]) -> "PlainChat":
        """Return this chat."""
        return self

    def prompt(self, messages: list[Message], tools: Any = ()) -> Prompt:
        """Return the texts of all messages, and the tools behind them."""
        text = "".join(str(message.get("content") or "") for message in messages)
        text += f"{TOOLS_MARK}{json.dumps(list(tools))}" if tools else ""
        return Prompt(text, list(text_bytes(text)), [])

    def find_spelled(self, messages: list[Message], tools: Any = ()) -> list[str]:
        """Return no control token: there is none."""
        return []

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text_bytes(text))

    def turn_text(self, tokens: Sequence[int]) -> str:
        """Return the text of a turn."""
        return bytes(tokens).decode(errors="surrogatepass")

    decode = turn_text

    def link(self, messages: list[Message], added: list[Message], tools: Any = ()) -> TurnLink:
        """Return the texts of the added messages."""
        return TurnLink([], self.prompt(added).tokens)


def text_bytes(text: str) -> bytes:
    """Return a text as bytes, halves of characters included."""
    return text.encode(errors="surrogatepass")
