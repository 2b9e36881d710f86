"""Conversation of one rollout: a tree of messages that only grows, each with its exact tokens (contract 4).

    prompt -- turn 0 -- answer of the environment -- turn 1 -- ...
                   \
                    history rewritten    -- turn 1 -- ...

A node's tokens follow those of all nodes above it. Nothing that was sampled is decoded and encoded again: the prompt of
the next turn is the path of tokens so far and the tokens of the messages in between. A rewritten history, as by a
template that drops earlier thinking, is a separate branch. The rows that train are the paths from the root to each
leaf; a sampled token counts in the first row alone, and trains exactly once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.environments.contract import Message
from rlctl.generation.requests import Completion


@dataclass(frozen=True)
class TrajectoryRow:
    """One path of a conversation: T tokens to train on, with their columns."""

    # int32 [T].
    tokens: NDArray[np.int32]
    # bool [T]: true where the policy sampled the token, and this row is the one that trains it.
    sampled: NDArray[np.bool_]
    # float32 [T], of the distribution that was sampled from; 0 where nothing was sampled.
    log_probs: NDArray[np.float32]
    # int32 [T], weight version that sampled the token; -1 where nothing was sampled.
    versions: NDArray[np.int32]
    # int16 [T], number of the turn that sampled the token; -1 where nothing was sampled.
    turns: NDArray[np.int16]


@dataclass(frozen=True)
class MessageNode:
    """One message, or a part of the prompt, as tokens."""

    # Index of the node before it; None for a root.
    parent: int | None
    # int32 [n].
    tokens: NDArray[np.int32]
    # None where nothing was sampled.
    completion: Completion | None = None
    # Number of the sampled turn; -1 where nothing was sampled.
    turn: int = -1


@dataclass
class Conversation:
    """Nodes of one rollout in the order in which they came."""

    nodes: list[MessageNode] = field(default_factory=list)
    # The conversation, as a person reads it, in order.
    messages: list[Message] = field(default_factory=list)
    turns: int = 0

    def add_context(self, tokens: Sequence[int], parent: int | None) -> int:
        """Add tokens that nobody sampled after the node `parent`, None for a root; return the new node's index."""
        self.nodes.append(MessageNode(parent, np.array(tokens, np.int32)))
        return len(self.nodes) - 1

    def add_turn(self, completion: Completion, parent: int) -> int:
        """Add a turn that was sampled after the node `parent`; return the new node's index."""
        self.nodes.append(MessageNode(parent, completion.tokens, completion, self.turns))
        self.turns += 1
        return len(self.nodes) - 1

    def path(self, leaf: int) -> list[int]:
        """Return the indices of the nodes from the root to `leaf`."""
        indices: list[int] = []
        index: int | None = leaf
        while index is not None:
            indices.append(index)
            index = self.nodes[index].parent
        return indices[::-1]

    def tokens(self, leaf: int) -> list[int]:
        """Return the tokens of the path to `leaf`: the prompt of a turn that follows it."""
        tokens: list[int] = []
        for index in self.path(leaf):
            tokens += self.nodes[index].tokens.tolist()
        return tokens

    def longest_beginning(self, tokens: list[int]) -> tuple[int, int | None]:
        """Return the length of the longest path that `tokens` begin with, and its last node; (0, None) for none."""
        ends: dict[int | None, int] = {None: 0}
        for index, node in enumerate(self.nodes):
            start = ends.get(node.parent)
            if start is None:
                continue
            node_tokens = node.tokens.tolist()
            if tokens[start : start + len(node_tokens)] == node_tokens:
                ends[index] = start + len(node_tokens)
        last = max(ends, key=ends.__getitem__)
        return ends[last], last

    @property
    def completions(self) -> list[Completion]:
        """Sampled turns, in order."""
        return [node.completion for node in self.nodes if node.completion]

    def rows(self) -> list[TrajectoryRow]:
        """Return the rows that train, each up to its last sampled token; none without a sampled token."""
        parents = {node.parent for node in self.nodes}
        # Nodes that an earlier row trains.
        trained: set[int] = set()
        rows = []
        for leaf in range(len(self.nodes)):
            if leaf in parents:
                continue
            path = self.path(leaf)
            sampled = [index for index in path if self.nodes[index].turn >= 0 and len(self.nodes[index].tokens)]
            new = set(sampled) - trained
            if new:
                rows.append(self._make_row(path[: path.index(sampled[-1]) + 1], new))
                trained |= new
        return rows

    def _make_row(self, path: list[int], trains: set[int]) -> TrajectoryRow:
        """Return the row of a path. trains: indices of the nodes that this row trains."""
        nodes = [(self.nodes[index], index in trains) for index in path]
        return TrajectoryRow(
            tokens=np.concatenate([node.tokens for node, _ in nodes]),
            sampled=np.concatenate([np.full(len(node.tokens), is_trained) for node, is_trained in nodes]),
            log_probs=np.concatenate(
                [_read_column(node, is_trained, "log_probs", np.float32(0)) for node, is_trained in nodes]
            ),
            versions=np.concatenate(
                [_read_column(node, is_trained, "versions", np.int32(-1)) for node, is_trained in nodes]
            ),
            turns=np.concatenate(
                [np.full(len(node.tokens), node.turn if is_trained else -1, np.int16) for node, is_trained in nodes]
            ),
        )


def _read_column(node: MessageNode, is_trained: bool, name: str, default: Any) -> NDArray[Any]:
    """Return a completion's column, or `default` for each token of a node that this row does not train."""
    return getattr(node.completion, name) if is_trained else np.full(len(node.tokens), default)
