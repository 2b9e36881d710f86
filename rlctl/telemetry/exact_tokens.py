"""Exact tokens of recorded groups: encode token rows as text in a line of rollouts.jsonl, and decode them.

The trained tokens are the sampled ones (contract 4). A rollout has one token row, or several if its history was
rewritten on the way. A group's field `exact` has the rows of all its rollouts, concatenated. Fields of `exact`:

- rows: for each rollout a list with the number of tokens of each of its rows
- tokens, sampled, log_probs, versions, turns: the arrays of `TokenRow`, each as base64 of zlib of little-endian int32,
  uint8, float32, int32, int16. Earlier versions of rlctl wrote no turns.
- keys: a `KeyUse`: whether attention keys and values were kept when the weights changed

A sampled token takes about 7.5 bytes; half is its log-prob. Encoding a million tokens takes 0.3 s of a core.
"""

import base64
import binascii
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlctl.telemetry.jsonl import Record

EXACT = "exact"
_COLUMNS = {"tokens": "<i4", "sampled": "|u1", "log_probs": "<f4", "versions": "<i4", "turns": "<i2"}
# zlib level. A higher level saves 3% and takes three times as long.
_LEVEL = 1


# Says which attention keys and values a turn reads after the weights changed during the turn.
# kept: the turn keeps those of its earlier tokens. recomputed: it computes them again with the new weights.
# reused: as kept, and later turns find them in the prefix cache too.
KeyUse = Literal["kept", "recomputed", "reused"]


@dataclass(frozen=True)
class OlderKeys:
    """Tokens of a turn that attended to keys of earlier weights, and these keys."""

    # Positions in the row of the tokens that read the keys.
    readers: range
    # (positions in the row, weight version that computed them) of the earlier keys.
    keys: tuple[tuple[range, int], ...]


@dataclass(frozen=True)
class TokenRow:
    """One sequence of T tokens, the prompt's included."""

    # int32 [T], token ids.
    tokens: NDArray[Any]
    # bool [T]: true if the policy sampled the token and this row trains on it.
    sampled: NDArray[Any]
    # float32 [T], log-probs of sampled tokens, from the engine that sampled them; 0 for others.
    log_probs: NDArray[Any]
    # int32 [T], weight version that sampled the token; -1 for tokens that were not sampled.
    versions: NDArray[Any]
    # int16 [T], turn that sampled the token; -1 for tokens that were not sampled. If no turns were recorded, every
    # sampled token has turn 0.
    turns: NDArray[Any]

    def spans(self) -> Iterator[slice]:
        """Yield the longest spans of equal version, turn and `sampled`, in order."""
        if not len(self.tokens):
            return
        changes = np.diff(self.versions) | np.diff(self.turns) | np.diff(self.sampled.astype(np.int8))
        edges = np.flatnonzero(changes) + 1
        for first, last in zip([0, *edges.tolist()], [*edges.tolist(), len(self.tokens)]):
            yield slice(first, last)

    def older_keys(self) -> Iterator[OlderKeys]:
        """Yield, for each span of a turn but its first, the keys of earlier weights that the span read.

        The result holds if keys were kept (`KeyUse`). A turn computes the keys of its prompt with the weights that it
        begins with. It computes the key of a sampled token in the step that samples the next token.
        """
        turn = -1
        keys: list[tuple[range, int]] = []
        for span in self.spans():
            if int(self.turns[span.start]) != turn:
                turn = int(self.turns[span.start])
                keys = []
            if keys:
                yield OlderKeys(range(span.start, span.stop), tuple(keys))
            if turn >= 0:
                # First token whose key no span has computed. The first span computes the keys of the prompt too.
                begin = keys[-1][0].stop if keys else 0
                # Without the span's last token: its key is computed with the next token, so by the next span's weights.
                keys.append((range(begin, span.stop - 1), int(self.versions[span.start])))

    def plain(self) -> Record:
        """Return the columns as lists of Python values."""
        return {name: getattr(self, name).tolist() for name in _COLUMNS}


def pack(rollouts: Sequence[Sequence[TokenRow]], keys: KeyUse) -> Record:
    """Return the field `exact` of a group. rollouts: for each rollout its token rows."""
    rows = list(chain.from_iterable(rollouts))
    texts = dict[str, str]()
    for name, dtype in _COLUMNS.items():
        column = b"".join(np.ascontiguousarray(getattr(row, name), dtype).tobytes() for row in rows)
        texts[name] = base64.b64encode(zlib.compress(column, _LEVEL)).decode()
    lengths = [[len(row.tokens) for row in rollout_rows] for rollout_rows in rollouts]
    return {"rows": lengths, **texts, "keys": keys}


def unpack(group: Record) -> list[list[TokenRow]] | None:
    """Return the token rows of each rollout of a group; None if none were recorded.

    Raises ValueError if the field `exact` is damaged.
    """
    if EXACT not in group:
        return None
    try:
        exact = group[EXACT]
        lengths = [int(length) for length in chain.from_iterable(exact["rows"])]
        num_tokens = sum(lengths)
        columns = {
            name: np.frombuffer(zlib.decompress(base64.b64decode(exact[name])), dtype)
            for name, dtype in _COLUMNS.items()
            if name != "turns" or name in exact
        }
        columns["sampled"] = columns["sampled"].astype(bool)
        # Without recorded turns: 0 for sampled tokens, -1 for others.
        columns.setdefault("turns", columns["sampled"].astype(np.int16) - 1)
        has_all_tokens = all(len(column) == num_tokens for column in columns.values())
        if len(exact["rows"]) != len(group["rollouts"]) or not has_all_tokens:
            raise ValueError("columns and rows differ in length")
    except (KeyError, TypeError, ValueError, binascii.Error, zlib.error) as error:
        raise ValueError(f"{EXACT}: {error}") from None
    cuts = np.cumsum(lengths)[:-1]
    parts = {name: np.split(column, cuts) for name, column in columns.items()}
    rows = iter([TokenRow(**{name: parts[name][place] for name in _COLUMNS}) for place in range(len(lengths))])
    return [[next(rows) for _ in row_lengths] for row_lengths in exact["rows"]]


def key_use(group: Record) -> KeyUse | None:
    """Return the recorded `KeyUse` of a group; None if it was not recorded."""
    uses: dict[Any, KeyUse] = {"kept": "kept", "recomputed": "recomputed", "reused": "reused"}
    return uses.get(str(group.get(EXACT, {}).get("keys")))


def without_tokens(group: Record) -> Record:
    """Return the group without its exact tokens."""
    return {name: value for name, value in group.items() if name != EXACT}


def with_lists(group: Record) -> Record:
    """Return the group with its exact tokens as plain lists: each rollout has a field `rows`.

    The group's field `keys` is its `KeyUse`. If keys were kept, each row has `older_keys`: a list of
    [[first reader, end], [[first key, end, version], ...]], which are positions in the row.

    Raises ValueError if the field `exact` is damaged.
    """
    rows = unpack(group)
    if rows is None:
        return group
    use = key_use(group)
    rollouts = [
        {**rollout, "rows": [_plain_row(row, use) for row in rollout_rows]}
        for rollout, rollout_rows in zip(group["rollouts"], rows)
    ]
    return {**without_tokens(group), "keys": use, "rollouts": rollouts}


def _plain_row(row: TokenRow, use: KeyUse | None) -> Record:
    """Return a row's columns as lists, with `older_keys` if its turns kept earlier keys."""
    if use not in ("kept", "reused"):
        return row.plain()
    older_keys = []
    for older in row.older_keys():
        keys = [[positions.start, positions.stop, version] for positions, version in older.keys]
        older_keys.append([[older.readers.start, older.readers.stop], keys])
    return {**row.plain(), "older_keys": older_keys}
