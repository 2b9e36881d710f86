"""`rlctl cluster logs`: the ends of every node's logs, live or left behind."""

import subprocess

from rlctl.cluster.fleet.down import not_standing
from rlctl.cluster.fleet.hosts import Host, end
from rlctl.cluster.fleet.launchers import LogPlace, launcher_of
from rlctl.cluster.fleet.state import NoSuchCluster, Store
from rlctl.config.errors import did_you_mean


def show_logs(name: str, node: str | None, follow: bool, lines: int) -> int:
    """Prints them; returns the exit code. Without follow one node after the other, with it all at once."""
    store = Store(name)
    state = store.load()
    if state is not None:
        places = launcher_of(state.kind).logs(store, state)
    elif store.logs.is_dir():
        places = [LogPlace(path.name, "", Host(""), str(path)) for path in sorted(store.logs.iterdir())]
    else:
        raise NoSuchCluster(not_standing(name))
    if node is not None:
        names = [each.node for each in places]
        if node not in names:
            hint = did_you_mean(node, names) or f"; there are {', '.join(names)}"
            raise NoSuchCluster(f"{name} has no node {node}{hint}")
        places = [each for each in places if each.node == node]
    running: list[subprocess.Popen[str]] = []
    try:
        for each in places:
            request = {"folder": each.folder, "keep": each.keep, "cluster": name, "node": each.node, "lines": lines}
            running.append(each.host.follow("logs", {**request, "follow": follow and state is not None}))
            if not follow:
                running[-1].wait()
        return max((process.wait() for process in running), default=0)
    finally:
        for process in running:
            end(process)
