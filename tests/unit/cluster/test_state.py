"""The stored state of a cluster: files are private and written atomically, and the token is checked before its use."""

import json
import os
import stat
from pathlib import Path

import pytest

from rlctl.cluster.state import ClusterError, ClusterNode, ClusterState, ClusterStore, known_clusters, running_clusters


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def save_a_state(store: ClusterStore) -> ClusterState:
    digest = store.new_token()
    node = ClusterNode("head", "", "/tmp/rlctl-0", True, "127.0.0.1", 7, "boot:8")
    state = ClusterState(store.name, "local", "up", "python", digest, False, 1.0, address="127.0.0.1:1", nodes=[node])
    store.save(state)
    return state


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_saved_is_loaded_and_nobody_else_can_read_it() -> None:
    store = ClusterStore("lab")
    assert store.load() is None
    state = save_a_state(store)
    assert ClusterStore("lab").load() == state
    assert (mode(store.folder), mode(store.folder.parent), mode(store.token_path)) == (0o700, 0o700, 0o600)
    assert running_clusters() == ["lab"]
    assert store.token_path.read_text() not in (store.folder / "state.json").read_text()


def test_a_write_that_fails_leaves_the_old_state(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ClusterStore("lab")
    state = save_a_state(store)

    def find_no_room(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", find_no_room)
    with pytest.raises(OSError, match="No space"):
        store.save(ClusterState("lab", "local", "starting", "python", "", False, 2.0))
    assert store.load() == state


def test_a_file_of_the_version_that_knew_starts_by_the_wall_clock_is_read_without_them() -> None:
    store = ClusterStore("lab")
    state = save_a_state(store)
    record = json.loads((store.folder / "state.json").read_text())
    del record["nodes"][0]["start_id"]
    record |= {"version": 1, "nodes": [{**record["nodes"][0], "create_time": 8.5}]}
    (store.folder / "state.json").write_text(json.dumps(record))
    loaded_state = store.load()
    assert loaded_state and (loaded_state.head.pid, loaded_state.head.start_id) == (7, "")
    assert loaded_state.address == state.address


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', '{"version": 1, "nodes": [{}]}', "\0"])
def test_a_damaged_file_is_named(text: str) -> None:
    store = ClusterStore("lab")
    save_a_state(store)
    (store.folder / "state.json").write_text(text)
    with pytest.raises(ClusterError, match=r"state\.json is damaged"):
        store.load()


def test_the_token_must_be_there_private_and_the_right_one() -> None:
    store = ClusterStore("lab")
    state = save_a_state(store)
    store.check_token(state)
    store.token_path.chmod(0o644)
    with pytest.raises(ClusterError, match="open to other users: chmod 600"):
        store.check_token(state)
    store.token_path.chmod(0o600)
    store.token_path.write_text("another")
    with pytest.raises(ClusterError, match=r"wrong token: .* is not what lab was started with"):
        store.check_token(state)
    store.token_path.unlink()
    with pytest.raises(ClusterError, match="cannot be read: No such file"):
        store.check_token(state)


def test_one_command_at_a_time_changes_a_cluster() -> None:
    store = ClusterStore("lab")
    other = ClusterStore("lab")
    with (
        store.hold_lock(),
        pytest.raises(ClusterError, match="another rlctl is starting or stopping lab"),
        other.hold_lock(),
    ):
        pass
    with other.hold_lock():
        pass


def test_logs_of_nodes_that_are_no_more_go() -> None:
    store = ClusterStore("lab")
    store.keep_logs_of(["head"])
    for name in ("head", "node-1"):
        (store.logs / name).mkdir(parents=True)
    store.keep_logs_of(["head"])
    assert os.listdir(store.logs) == ["head"]


def test_nothing_is_left_but_logs() -> None:
    store = ClusterStore("lab")
    save_a_state(store)
    (store.logs / "head").mkdir(parents=True)
    store.clear()
    assert os.listdir(store.folder) == ["logs"]
    assert (known_clusters(), running_clusters()) == (["lab"], [])
    other = ClusterStore("other")
    save_a_state(other)
    other.clear()
    assert not other.folder.exists()
