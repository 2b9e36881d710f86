"""Environment of a maze, which the model walks through by the tool `move`. It sees the open ways at its place alone."""

import random
from collections import deque
from collections.abc import Iterator
from itertools import product
from typing import Any, Literal

# Row and column of the maze, each from 0.
Place = tuple[int, int]
_MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


class Maze:
    """One walk from the top left to the bottom right. moves: most moves of the walk."""

    def __init__(self, moves: int = 60) -> None:
        self._most_moves = moves

    def reset(self, size: int = 4, maze: int = 0, **row: Any) -> str:
        """Build a maze of `size` rows and columns from the seed `maze`; return the user's message."""
        self._ways = build(size, maze)
        self._place = (0, 0)
        self._goal = (size - 1, size - 1)
        self._shortest = distance(self._ways, self._place, self._goal)
        self._moves = 0
        return f"Walk through a maze of {size} rows and {size} columns, to row {size}, column {size}. {self._view()}"

    def move(self, direction: Literal["up", "down", "left", "right"]) -> str:
        """Walk one place on.

        Args:
            direction: The way to go; up is towards row 1.

        Returns:
            The place, and the ways that are open there.
        """
        if self._place == self._goal or self._moves >= self._most_moves:
            raise ValueError("The walk has ended.")
        self._moves += 1
        next_place = _neighbour(self._place, direction)
        if next_place not in self._ways[self._place]:
            return f"There is a wall. {self._view()}"
        self._place = next_place
        return self._view()

    def get_reward(self) -> dict[str, float]:
        """Return `goal`, 1 at the goal, else 0, and `short`, up to 0.1 for a short way to the goal."""
        has_arrived = self._place == self._goal
        short = 0.1 * self._shortest / self._moves if has_arrived and self._moves else 0.0
        return {"goal": float(has_arrived), "short": short}

    def _view(self) -> str:
        if self._place == self._goal:
            return "You have arrived."
        open_ways = ", ".join(name for name in _MOVES if _neighbour(self._place, name) in self._ways[self._place])
        return f"You are in row {self._place[0] + 1}, column {self._place[1] + 1}. Open: {open_ways}."


def build(size: int, seed: int) -> dict[Place, set[Place]]:
    """Build a maze by depth-first search; return the neighbours that are open from each place.

    Exactly one way joins any two places.
    """
    draw = random.Random(seed)
    ways: dict[Place, set[Place]] = {place: set() for place in product(range(size), range(size))}
    path: list[Place] = [(0, 0)]
    seen = {path[0]}
    while path:
        neighbours = [_neighbour(path[-1], name) for name in _MOVES]
        unseen = [place for place in neighbours if place in ways and place not in seen]
        if not unseen:
            path.pop()
            continue
        place = draw.choice(unseen)
        ways[path[-1]].add(place)
        ways[place].add(path[-1])
        path.append(place)
        seen.add(place)
    return ways


def distance(ways: dict[Place, set[Place]], start: Place, goal: Place) -> int:
    """Return the number of moves of the shortest way from `start` to `goal`."""
    moves = {start: 0}
    reached = deque([start])
    while goal not in moves:
        place = reached.popleft()
        for next_place in ways[place] - moves.keys():
            moves[next_place] = moves[place] + 1
            reached.append(next_place)
    return moves[goal]


def _neighbour(place: Place, direction: str) -> Place:
    down, right = _MOVES[direction]
    return place[0] + down, place[1] + right


def tasks(seed: int, held_out: bool = False, size: int = 4) -> Iterator[dict[str, Any]]:
    """Yield random rows without end. Held-out rows and training rows have no maze in common.

    held_out: yield only mazes whose seed is a multiple of 5. False yields only the others.
    """
    draw = random.Random(seed)
    while True:
        maze = draw.randrange(1_000_000)
        is_held_out = maze % 5 == 0
        if is_held_out == held_out:
            yield {"size": size, "maze": maze}
