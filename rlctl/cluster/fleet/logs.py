"""`rlctl cluster logs`: the ends of every node's logs, live or left behind."""

import subprocess

from rlctl.cluster.fleet.down import not_standing
from rlctl.cluster.fleet.hosts import Host, end
from rlctl.cluster.fleet.state import NoSuchCluster, Store
from rlctl.config.errors import did_you_mean


def show_logs(name: str, node: str | None, follow: bool, lines: int) -> int:
    """Prints them; returns the exit code. Without follow one node after the other, with it all at once."""
    store = Store(name)
    state = store.load()
    if state is not None:
        nodes = [(each.name, each.folder, state.host_of(each), bool(each.host)) for each in state.nodes]
    elif store.logs.is_dir():
        nodes = [(path.name, "", Host(""), False) for path in sorted(store.logs.iterdir())]
    else:
        raise NoSuchCluster(not_standing(name))
    if node is not None:
        names = [each[0] for each in nodes]
        if node not in names:
            hint = did_you_mean(node, names) or f"; there are {', '.join(names)}"
            raise NoSuchCluster(f"{name} has no node {node}{hint}")
        nodes = [each for each in nodes if each[0] == node]
    running: list[subprocess.Popen[str]] = []
    try:
        for title, folder, host, remote in nodes:
            keep = None if remote else str(store.logs / title)
            request = {"folder": folder, "keep": keep, "cluster": name, "node": title, "lines": lines}
            running.append(host.follow("logs", {**request, "follow": follow and state is not None}))
            if not follow:
                running[-1].wait()
        return max(process.wait() for process in running)
    finally:
        for process in running:
            end(process)
