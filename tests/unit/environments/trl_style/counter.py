"""Environments written from the description of TRL's `environment_factory` alone: nothing here knows rlctl."""

import random


class SelfSampling:
    """Draws its task with the module's own generator."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        self.target = random.randint(1, 1000)
        return f"Bring the counter to {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Add to the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        if self.counter >= self.target:
            raise ValueError("Game over.")
        self.counter += step
        return self.counter

    async def peek(self) -> str:
        """
        Look at the counter.

        Returns:
            The counter as a sentence.
        """
        return f"The counter is {self.counter}."


class FromRow:
    """Reads its task from the columns of the data set."""

    def reset(self, target, **kwargs) -> None:
        self.counter = 0
        self.target = target

    async def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Add to the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter
