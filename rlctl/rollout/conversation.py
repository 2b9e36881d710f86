"""Conversation of one rollout: an append-only tree of messages, each with its exact tokens (contract 4).

    prompt -- turn 0 -- answer of the environment -- turn 1 -- ...
                   \
                    history rewritten    -- turn 1 -- ...

A node's tokens follow the tokens of all nodes above it. Sampled tokens are never decoded and encoded again: the prompt
of the next turn is the path's tokens followed by the tokens of the new messages. If the history is rewritten, for
example by a chat template that drops earlier thinking, a new branch begins. Each path from the root to a leaf is a
training row. A sampled token on several paths is trained in the first row only, so exactly once.
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
    """One path of a conversation: the T tokens of a training row, with their columns."""

    # int32 [T], token ids.
    tokens: NDArray[np.int32]
    # bool [T]: true where the policy sampled the token and this row trains the token.
    sampled: NDArray[np.bool_]
    # float32 [T], log-probs under the distribution that was sampled from; 0 where `sampled` is false.
    log_probs: NDArray[np.float32]
    # int32 [T], weight version that sampled the token; -1 where `sampled` is false.
    versions: NDArray[np.int32]
    # int16 [T], number of the turn that sampled the token; -1 where `sampled` is false.
    turns: NDArray[np.int16]


@dataclass(frozen=True)
class MessageNode:
    """One message, or a part of the prompt, as tokens."""

    # Index of the parent node; None for a root.
    parent: int | None
    # int32 [n], token ids.
    tokens: NDArray[np.int32]
    # The completion of a sampled turn; None for a node that was not sampled.
    completion: Completion | None = None
    # Number of the sampled turn; -1 for a node that was not sampled.
    turn: int = -1


@dataclass
class Conversation:
    """Tree of one rollout: its nodes in the order in which they were added."""

    nodes: list[MessageNode] = field(default_factory=list)
    # The conversation as text, in order.
    messages: list[Message] = field(default_factory=list)
    # Number of sampled turns.
    turns: int = 0

    def add_context(self, tokens: Sequence[int], parent: int | None) -> int:
        """Add a node of tokens that were not sampled; return the node's index. parent: None for a root."""
        self.nodes.append(MessageNode(parent, np.array(tokens, np.int32)))
        return len(self.nodes) - 1

    def add_turn(self, completion: Completion, parent: int) -> int:
        """Add a sampled turn below the node `parent`; return the new node's index."""
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
        """Return the tokens of the path to `leaf`. They are the prompt of a turn below `leaf`."""
        tokens: list[int] = []
        for index in self.path(leaf):
            tokens += self.nodes[index].tokens.tolist()
        return tokens

    def longest_beginning(self, tokens: list[int]) -> tuple[int, int | None]:
        """Find the longest path whose tokens are the beginning of `tokens`.

        Return (number of its tokens, index of its last node); (0, None) if there is no such path.
        """
        # Node whose path is a beginning of `tokens` -> number of tokens in the path. None is the empty path.
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
        """Return the training rows, each cut after its last sampled token. A path without sampled tokens has no row."""
        parents = {node.parent for node in self.nodes}
        # Indices of the nodes that an earlier row trains.
        trained: set[int] = set()
        rows = []
        for leaf in range(len(self.nodes)):
            if leaf in parents:
                # Not a leaf: another node follows it.
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
        # Sampled tokens that another row trains count as given here, so that no token is trained twice.
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
