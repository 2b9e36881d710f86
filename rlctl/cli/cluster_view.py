"""The output of `rlctl cluster`: a line for each host that starts, tables of clusters, and the next commands."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from rlctl.cli.output import console
from rlctl.cluster.launcher import ClusterStatus, NodeStatus, launcher_of
from rlctl.cluster.requirements import GIB
from rlctl.cluster.state import ClusterState
from rlctl.cluster.status import open_ports, summary
from rlctl.dashboard.console import figures, make_table, names, texts
from rlctl.dashboard.formats import number

_SIGNS = {"ok": ("ok", "green"), "bad": ("failed", "bold red"), "warning": ("warning", "yellow")}
_COLOURS = {"up": "green", "partly up": "yellow", "not joined": "yellow", "waiting": "yellow"}


class Progress:
    """Progress on stderr: a line for each finished piece of work, and on a terminal a spinner for the current one."""

    def __init__(self) -> None:
        self._console = console(stderr=True)
        self._status = self._console.status("") if self._console.is_terminal else None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, sign: str, text: str) -> None:
        """Print a line with its sign: ok, bad or warning. With the sign doing, show `text` at the spinner instead."""
        if sign == "doing":
            if self._status is not None:
                self._status.update(text)
                self._status.start()
            return
        word, style = _SIGNS[sign]
        if self._console.is_terminal:
            # In a table, the further lines of a long text are below the text, not below the sign.
            row = Text(word, style=style), Text(text)
            self._console.print(make_table(names(style="", width=7), texts(), rows=[row], gap=1))
        else:
            self._console.print(Text(f"{word:7} {text}"))


def next_steps(state: ClusterState) -> str:
    """Return the commands to type next with their purposes, in two aligned columns."""
    steps = [(f"rlctl cluster status {state.name}", "what it has and has free")]
    if state.dashboard:
        steps.append((f"rlctl train grpo --cluster {state.name}", "a run that lives on it"))
    dashboard = launcher_of(state).dashboard(state)
    if dashboard:
        steps.append(dashboard)
    # Programs on this machine reach a head on it directly (no host), and any other head by its dashboard's port.
    if dashboard or not state.head.host:
        steps.append((f'eval "$(rlctl cluster env {state.name})"', "Ray programs in this shell use it"))
    steps.append((f"rlctl cluster down {state.name}", "stop it"))
    width = max(len(command) for command, _ in steps)
    if width > 44:
        return "\n".join(f"  {command}\n      {purpose}" for command, purpose in steps)
    return "\n".join(f"  {command:{width}}   {purpose}" for command, purpose in steps)


def render(state: ClusterState, status: ClusterStatus) -> RenderableType:
    """Return the screen of one cluster, 80 columns wide: state, nodes, listeners, runs, and warnings."""
    style = _COLOURS.get(status.condition, "bold red")
    head = Text.assemble((state.name, "bold"), " ", (status.condition, style), f": {summary(state, status)}")
    parts: list[RenderableType] = [head, Text(""), _nodes_table(status)]
    if ports := open_ports(status):
        parts += [Text(""), Text("other machines can reach, with the token:", style="bold")]
        parts += [Text(f"  {line}") for line in ports]
    elif status.head_alive and status.nodes[0].facts:
        parts += [Text(""), Text("everything listens on loopback alone", style="dim")]
    dashboard = launcher_of(state).dashboard(state)
    if state.head.host and dashboard and status.head_alive:
        command, _ = dashboard
        parts += [Text(""), Text.assemble(("dashboard: ", "bold"), command)]
    if status.runs:
        parts += [Text(""), runs_table(status.runs)]
    for warning in status.warnings:
        parts.append(Text.assemble(("warning: ", "yellow"), warning))
    return Group(*parts)


def runs_table(runs: list[dict[str, Any]]) -> Table:
    """Return a table of the runs on a cluster, with the number of devices that train and that generate."""
    titles = ("status", "step", "tok/s/device", "train", "generate")
    table = make_table(texts("run"), *map(figures, titles), titles="bold")
    for run in runs:
        step = f"{run['step']}/{run['num_steps']}" if run.get("num_steps") else "–"
        status = run.get("status", "starting")
        devices = [str(run.get("devices", {}).get(pool, "–")) for pool in ("trainer", "generator")]
        rate = number(run.get("throughput"))
        table.add_row(Text(run["name"]), "starting" if status == "new" else status, step, rate, *devices)
    return table


def clusters_table(clusters: list[dict[str, Any]]) -> Table:
    """Return a table with one row for each cluster."""
    table = make_table(*map(texts, ("cluster", "kind", "state", "nodes", "address")), titles="bold")
    for cluster in clusters:
        condition = cluster["condition"]
        colour = _COLOURS.get(condition, "dim" if condition == "down" else "red")
        name = Text(cluster["name"], style="cyan")
        nodes = str(cluster["nodes"] or "")
        table.add_row(name, cluster["kind"], Text(condition, style=colour), nodes, cluster["address"])
    return table


def _nodes_table(status: ClusterStatus) -> Table:
    free = (Column(title, justify="right") for title in ("CPUs free", "GPUs free", "GiB free", "disk"))
    table = make_table(texts("node"), names("state", ""), *free, texts("versions"), titles="bold")
    for node in status.nodes:
        state = Text(node.condition, style=_COLOURS.get(node.condition, "bold red"))
        head_mark = " *" if node.node.head and len(status.nodes) > 1 else ""
        versions = ""
        if node.facts:
            driver = f", driver {node.facts['driver']}" if node.facts["driver"] else ""
            versions = f"Ray {node.facts['ray']}, Python {node.facts['python']}{driver}"
        table.add_row(Text(node.node.name + head_mark, style="cyan"), state, *_free_amounts(node), versions)
    return table


def _free_amounts(node: NodeStatus) -> list[str]:
    """Return the free amounts of a node as four cells: CPUs, GPUs, memory and disk.

    CPUs and GPUs are those that Ray can still assign. Memory and disk are measured on the host, in GiB.
    """
    amounts = ["–", "–"]
    if node.in_ray:
        amounts = [f"{node.free.get(name, 0):g}/{node.total.get(name, 0):g}" for name in ("CPU", "GPU")]
    if not node.facts:
        return [*amounts, "–", "–"]
    memory = f"{node.facts['memory_free'] / GIB:.0f}/{node.facts['memory'] / GIB:.0f}"
    return [*amounts, memory, f"{node.facts['disk_free'] / GIB:.0f}"]
