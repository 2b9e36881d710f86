"""A maze that the model walks through by a tool; it sees which ways are open where it stands."""

import random
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

Place = tuple[int, int]
_MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


class Maze:
    """One walk from the top left to the bottom right. moves: the most that count."""

    def __init__(self, moves: int = 60) -> None:
        self._most = moves

    def reset(self, size: int = 4, maze: int = 0, **row: Any) -> str:
        """Build the maze with the number `maze`."""
        self._ways, self._here, self._goal = build(size, maze), (0, 0), (size - 1, size - 1)
        self._shortest, self._moves = distance(self._ways, self._here, self._goal), 0
        return f"Walk through a maze of {size} rows and {size} columns, to row {size}, column {size}. {self._view()}"

    def move(self, direction: Literal["up", "down", "left", "right"]) -> str:
        """Walk one place on.

        Args:
            direction: The way to go; up is towards row 1.

        Returns:
            The place, and the ways that are open there.
        """
        if self._here == self._goal or self._moves >= self._most:
            raise ValueError("The walk has ended.")
        self._moves += 1
        there = _neighbour(self._here, direction)
        if there not in self._ways[self._here]:
            return f"There is a wall. {self._view()}"
        self._here = there
        return self._view()

    def get_reward(self) -> dict[str, float]:
        """Return 1 for the goal, and up to 0.1 for a short way there."""
        arrived = self._here == self._goal
        return {"goal": float(arrived), "short": 0.1 * self._shortest / self._moves if arrived and self._moves else 0.0}

    def _view(self) -> str:
        if self._here == self._goal:
            return "You have arrived."
        ways = ", ".join(name for name in _MOVES if _neighbour(self._here, name) in self._ways[self._here])
        return f"You are in row {self._here[0] + 1}, column {self._here[1] + 1}. Open: {ways}."


def build(size: int, seed: int) -> dict[Place, set[Place]]:
    """Return the places that each place leads to. There is one way between any two, by depth-first search."""
    draw = random.Random(seed)
    ways: dict[Place, set[Place]] = {(row, column): set() for row in range(size) for column in range(size)}
    path: list[Place] = [(0, 0)]
    seen = {path[0]}
    while path:
        ahead = [there for name in _MOVES if (there := _neighbour(path[-1], name)) in ways and there not in seen]
        if not ahead:
            path.pop()
            continue
        there = draw.choice(ahead)
        ways[path[-1]].add(there)
        ways[there].add(path[-1])
        path.append(there)
        seen.add(there)
    return ways


def distance(ways: dict[Place, set[Place]], start: Place, goal: Place) -> int:
    """Return the moves of the shortest way."""
    moves, ahead = {start: 0}, deque([start])
    while goal not in moves:
        here = ahead.popleft()
        for there in ways[here] - moves.keys():
            moves[there] = moves[here] + 1
            ahead.append(there)
    return moves[goal]


def _neighbour(place: Place, direction: str) -> Place:
    down, right = _MOVES[direction]
    return place[0] + down, place[1] + right


def tasks(seed: int, held_out: bool = False, size: int = 4) -> Iterator[dict[str, Any]]:
    """Yield rows without end. Mazes with a number that is a multiple of 5 are held out: never among the others."""
    draw = random.Random(seed)
    while True:
        maze = draw.randrange(1_000_000)
        if (maze % 5 == 0) == held_out:
            yield {"size": size, "maze": maze}
