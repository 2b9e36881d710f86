"""Requests of one turn for tests."""

from rlctl.generation.requests import Purpose, RequestId, RolloutId, TurnRequest


def turn(
    group: int,
    index: int = 0,
    prompt: list[int] | None = None,
    longest: int = 8,
    temperature: float = 1.0,
    seed: int = 0,
    purpose: Purpose = "train",
) -> TurnRequest:
    """Return a turn's request for rollout `index` of a group. Its seed is `seed + index`."""
    rollout = RolloutId(purpose, f"t{group}", group, index)
    return TurnRequest(RequestId(rollout), prompt or [1], longest, temperature, seed + index)


def turns(group: int, count: int, prompt: list[int], longest: int, seed: int = 0) -> list[TurnRequest]:
    """Return one request for each of the `count` rollouts of a group."""
    return [turn(group, index, prompt, longest, 1.0, seed) for index in range(count)]
