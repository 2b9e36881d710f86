"""Stand-in for a tokenizer and chat template whose tokens are the bytes of the text, for trials without a model."""

import json
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from rlctl.data.chat import Prompt, TurnLink
from rlctl.environments.contract import Message

# Format of the tool calls in its texts.
PLAIN_FORMAT = "hermes"
# Text before the tools of a prompt.
TOOLS_MARK = "\n[tools] "


class PlainChat:
    """The methods of `Chat` that an agent's session calls. The template writes the messages' texts and nothing else."""

    ends = SimpleNamespace(stops=())
    template = None

    def unknown_kwargs(self, names: Collection[str]) -> dict[str, str]:
        """Return a reason against every argument, because there is no template."""
        return dict.fromkeys(names, "needs a chat template")

    def with_kwargs(self, arguments: Mapping[str, Any]) -> "PlainChat":
        """Return this chat unchanged."""
        return self

    def prompt(self, messages: list[Message], tools: Any = ()) -> Prompt:
        """Return the prompt: the texts of all messages, then the tools as JSON."""
        text = "".join(str(message.get("content") or "") for message in messages)
        text += f"{TOOLS_MARK}{json.dumps(list(tools))}" if tools else ""
        return Prompt(text, list(text_bytes(text)), [])

    def find_spelled(self, messages: list[Message], tools: Any = ()) -> list[str]:
        """Return an empty list, because there are no control tokens."""
        return []

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text_bytes(text))

    def turn_text(self, tokens: Sequence[int]) -> str:
        """Return the text of a turn."""
        return bytes(tokens).decode(errors="surrogatepass")

    decode = turn_text

    def link(self, messages: list[Message], added: list[Message], tools: Any = ()) -> TurnLink:
        """Return the tokens of the added messages."""
        return TurnLink([], self.prompt(added).tokens)


def text_bytes(text: str) -> bytes:
    """Return a text as bytes, lone surrogates included."""
    return text.encode(errors="surrogatepass")
