"""A partner who takes a while to answer, and says the same each time: an environment, and an agent that talks to it.

`rlctl bench generation` plays the environment; `rlctl bench agents` both.
"""

import asyncio
import time
from typing import Any

ANSWER = "w5 w6 w7 w8"
# Seconds that a turn may take.
_PATIENCE_S = 3600.0


class SlowPartner:
    """Answers every message after `seconds`. An episode ends where its budget of turns does."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def reset(self, **row: object) -> None:
        """Begin with the row's prompt."""

    async def step(self, message: object) -> str:
        """Answer after a while."""
        await asyncio.sleep(self.seconds)
        return ANSWER

    def get_reward(self) -> float:
        return 0.0


_CLIENTS: list[Any] = []


def converse(task: Any, base_url: str, api_key: str) -> float:
    """Ask for the row's `turns` by the `openai` SDK, with the same answers between them as `SlowPartner` gives."""
    if not _CLIENTS:
        from openai import OpenAI

        # One client a process: another one costs 26 ms of CPU.
        _CLIENTS.append(OpenAI(base_url=base_url, api_key=api_key, timeout=_PATIENCE_S))
    ask = _CLIENTS[0].with_options(base_url=base_url, api_key=api_key).chat.completions.create
    messages: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
    for turn in range(task.row["turns"]):
        if turn:
            time.sleep(task.row["pause"])
            messages.append({"role": "user", "content": ANSWER})
        messages.append(ask(model="policy", messages=messages).choices[0].message)
    return 0.0
