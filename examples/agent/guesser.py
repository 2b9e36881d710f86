"""An agent without an SDK: it plays higher or lower, and knows an address and a key, but nothing of rlctl."""

import json
import re
from typing import Any
from urllib.request import Request, urlopen

GUESSES = 5
PROMPT = "I am thinking of a number from {low} to {high}. You have {guesses} guesses. Answer with one number."
Message = dict[str, Any]


def run(task: Any, base_url: str, api_key: str) -> float:
    """Play one game. Return 0 for a lost one, 1 for a win, and 0.1 more for each guess that is left."""
    game = task.row
    prompt = PROMPT.format(low=game["low"], high=game["high"], guesses=GUESSES)
    messages: list[Message] = [{"role": "user", "content": prompt}]
    for guesses_left in reversed(range(GUESSES)):
        message = ask(messages, base_url, api_key)
        number = re.search(r"\d{1,9}", message["content"] or "")
        if number is None:
            return 0.0
        guess = int(number[0])
        if guess == game["secret"]:
            return 1 + 0.1 * guesses_left
        hint = "higher" if guess < game["secret"] else "lower"
        messages += [message, {"role": "user", "content": hint}]
    return 0.0


def ask(messages: list[Message], base_url: str, api_key: str) -> Message:
    """Return the model's next message."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urlopen(Request(f"{base_url}/chat/completions", body, headers)) as response:
        message: Message = json.load(response)["choices"][0]["message"]
    return message
