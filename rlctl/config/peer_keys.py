"""Keys of other tools and former keys of rlctl, with the equal key of rlctl. They are read once from `peer_keys.yaml`.

Errors about unknown keys, the page `configs/COMING_FROM.md` and `rlctl config import` all use these rows.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

# Value of `PeerKey.tool` for a former key of rlctl itself.
FORMERLY = "rlctl"
_FORMER_VALUES = "former values"
_SAME_NAMES = "same names"


class PeerKey(NamedTuple):
    """A key of another tool (or a former key of rlctl), and its equal in rlctl."""

    tool: str
    key: str
    # Key of rlctl, or several joined by `and` or `or`; empty if rlctl has no equal.
    rlctl_key: str
    note: str = ""
    # Rule that translates the value. None: the value is copied if there is no note. The head of peer_keys.yaml
    # describes rules.
    rule: Any = None

    @property
    def rlctl_keys(self) -> list[str]:
        """Keys of rlctl in `rlctl_key`."""
        return re.split(" and | or ", self.rlctl_key) if self.rlctl_key else []


@cache
def _read_tables() -> dict[str, Any]:
    tables: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("peer_keys.yaml").read_text(encoding="utf-8"))
    return tables


def _read_rows(tool: str, rows: dict[str, Any]) -> list[PeerKey]:
    peers = list[PeerKey]()
    for key, row in rows.items():
        columns = [row] if isinstance(row, str) else row
        note = columns[1] if len(columns) > 1 else ""
        rule = columns[2] if len(columns) > 2 else None
        peers.append(PeerKey(tool=tool, key=key, rlctl_key=columns[0], note=note, rule=rule))
    return peers


@cache
def peer_keys() -> tuple[PeerKey, ...]:
    """Return the rows that answer unknown keys: other tools' keys and rlctl's former keys."""
    peers = list[PeerKey]()
    for tool, rows in _read_tables().items():
        if tool not in (_FORMER_VALUES, _SAME_NAMES):
            peers += _read_rows(tool, rows)
    return tuple(peers)


@cache
def same_name_keys() -> tuple[PeerKey, ...]:
    """Return the rows of other tools' keys whose last word is the same in rlctl. Answers to unknown keys do not need
    them.
    """
    peers = list[PeerKey]()
    for tool, rows in _read_tables()[_SAME_NAMES].items():
        peers += _read_rows(tool, rows)
    return tuple(peers)


def rows_of_tool(tool: str) -> list[PeerKey]:
    """Return all rows of a tool."""
    rows = peer_keys() + same_name_keys()
    return [row for row in rows if row.tool == tool]


def renamed_value(key: str, value: object) -> str:
    """Return `; X is now Y` if `value` is a former name of a value of `key`, else an empty text."""
    new_value = _read_tables()[_FORMER_VALUES].get(key, {}).get(str(value))
    return f"; {value} is now {new_value}" if new_value else ""
