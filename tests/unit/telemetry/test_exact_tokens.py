"""The record of a turn names the weights that computed the keys of each token, also where weights changed in it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.telemetry.exact_tokens import TokenRow, key_use, pack, unpack, with_lists

# Turns of a row: (tokens given before, weight versions of the sampled tokens).
TURNS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=6)), min_size=1, max_size=4
)


def make_row(turns: list[tuple[int, list[int]]]) -> tuple[TokenRow, list[dict[int, int]]]:
    """Return a row, and for each sampled token the versions of the keys before it, as an engine computes them."""
    versions = [-1]
    turn_numbers = [-1]
    keys_before = list[dict[int, int]]()
    version = 0
    for turn_number, (num_given, changes) in enumerate(turns):
        versions += [-1] * num_given
        turn_numbers += [-1] * num_given
        # A turn computes its whole prompt with the weights of its beginning.
        version += changes[0]
        keys = dict.fromkeys(range(len(versions)), version)
        for place, change in enumerate(changes):
            if place:
                version += change
                keys[len(versions) - 1] = version
            keys_before.append(dict(keys))
            versions.append(version)
            turn_numbers.append(turn_number)
    row = TokenRow(
        tokens=np.zeros(len(versions), np.int32),
        sampled=np.array(turn_numbers) >= 0,
        log_probs=np.zeros(len(versions), np.float32),
        versions=np.array(versions, np.int32),
        turns=np.array(turn_numbers, np.int16),
    )
    return row, keys_before


@given(TURNS)
def test_older_keys_are_those_that_an_engine_kept(turns: list[tuple[int, list[int]]]) -> None:
    row, keys_before = make_row(turns)
    older_keys = {}
    for older in row.older_keys():
        older_keys |= dict.fromkeys(older.readers, older.keys)
    for reader, keys in zip(np.flatnonzero(row.sampled).tolist(), keys_before, strict=True):
        version = int(row.versions[reader])
        expected_versions = {position: key_version for position, key_version in keys.items() if key_version != version}
        recorded_versions = dict[int, int]()
        for positions, older_version in older_keys.get(reader, ()):
            recorded_versions |= dict.fromkeys(positions, older_version)
        assert recorded_versions == expected_versions


@pytest.mark.parametrize("use", ["kept", "recomputed"])
def test_keys_come_back_and_are_lists_for_a_script(use: str) -> None:
    row, _ = make_row([(1, [0, 0, 1]), (2, [1, 1])])
    group = {"rollouts": [{"index": 0}], "exact": pack([[row]], use)}  # type: ignore[arg-type]
    ((unpacked_row,),) = unpack(group) or []
    assert unpacked_row.turns.tolist() == row.turns.tolist() == [-1, -1, 0, 0, 0, -1, -1, 1, 1]
    assert key_use(group) == use
    plain_group = with_lists(group)
    (plain_row,) = plain_group["rollouts"][0]["rows"]
    older_keys = [[[4, 5], [[0, 3, 0]]], [[8, 9], [[0, 7, 2]]]]
    assert plain_group["keys"] == use
    assert plain_row.get("older_keys") == (older_keys if use == "kept" else None)


def test_a_record_of_an_earlier_version_has_one_turn_and_says_nothing_of_keys() -> None:
    row, _ = make_row([(1, [0]), (0, [1])])
    group = {"rollouts": [{"index": 0}], "exact": pack([[row]], "kept")}
    del group["exact"]["turns"], group["exact"]["keys"]  # type: ignore[attr-defined]
    ((unpacked_row,),) = unpack(group) or []
    assert unpacked_row.turns.tolist() == [-1, -1, 0, 0] and key_use(group) is None
    assert "older_keys" not in with_lists(group)["rollouts"][0]["rows"][0]
