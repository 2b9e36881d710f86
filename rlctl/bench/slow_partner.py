"""The environment of `rlctl bench generation`: it answers after a delay, with the same text each time."""

import asyncio

ANSWER = "w5 w6 w7 w8"


class SlowPartner:
    """Environment that answers every message after `seconds`. An episode ends at `environment.max_turns`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def reset(self, **row: object) -> None:
        """Begin an episode. The first message is the row's prompt."""

    async def step(self, message: object) -> str:
        """Wait for `seconds`, then answer."""
        await asyncio.sleep(self.seconds)
        return ANSWER

    def get_reward(self) -> float:
        return 0.0
