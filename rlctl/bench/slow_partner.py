"""An environment that takes a while to answer, and says the same each time, for `rlctl bench generation`."""

import asyncio

ANSWER = "w5 w6 w7 w8"


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
