"""An environment and its rewards as TRL's guide shows them: no `get_reward`, a tool named `step`."""


class EchoToolEnv:
    """Echoes, and values the longest echo."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return None

    def step(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        self.reward = len(message) / 10
        return message


def reward_func(environments, **kwargs) -> list[float]:
    return [env.reward for env in environments]


async def is_expected_text(environments, prompts, completions, expected_text) -> list[float | None]:
    if expected_text == [None]:
        return [None]
    return [float(completions[0][-1]["content"] == expected_text[0] and prompts[0][0]["role"] == "user")]


def batch(environments, **kwargs) -> list[float]:
    return [1.0, 2.0]


def needs_state(environments, trainer_state) -> list[float]:
    return [trainer_state.step]


def plain(prompts, completions, answer, **kwargs) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer)]
