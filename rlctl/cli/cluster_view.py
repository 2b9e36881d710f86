"""The output of `rlctl cluster`: a line a host while it works, a table a cluster, the next command."""

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
    """Printed lines on finished work, and on a terminal a spinner for the work in hand."""

    def __init__(self) -> None:
        self._console = console(stderr=True)
        self._status = self._console.status("") if self._console.is_terminal else None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, sign: str, text: str) -> None:
        """Print a line. sign: ok, bad, warning, or doing, which a spinner shows until the next line."""
        if sign == "doing":
            if self._status is not None:
                self._status.update(text)
                self._status.start()
            return
        word, style = _SIGNS[sign]
        if self._console.is_terminal:
            # Continued lines are below the text, not below the sign.
            row = Text(word, style=style), Text(text)
            self._console.print(make_table(names(style="", width=7), texts(), rows=[row], gap=1))
        else:
            self._console.print(Text(f"{word:7} {text}"))


def next_steps(state: ClusterState) -> str:
    """Return the commands to type next, aligned."""
    steps = [(f"rlctl cluster status {state.name}", "what it has and has free")]
    if state.dashboard:
        steps.append((f"rlctl train grpo --cluster {state.name}", "a run that lives on it"))
    dashboard = launcher_of(state).dashboard(state)
    if dashboard:
        steps.append(dashboard)
    if dashboard or not state.head.host:
        steps.append((f'eval "$(rlctl cluster env {state.name})"', "Ray programs in this shell use it"))
    steps.append((f"rlctl cluster down {state.name}", "stop it"))
    width = max(len(command) for command, _ in steps)
    if width > 44:
        return "\n".join(f"  {command}\n      {what}" for command, what in steps)
    return "\n".join(f"  {command:{width}}   {what}" for command, what in steps)


def render(state: ClusterState, seen: ClusterStatus) -> RenderableType:
    """Return a cluster in 80 columns: its kind, nodes, listeners, and warnings."""
    style = _COLOURS.get(seen.condition, "bold red")
    head = Text.assemble((state.name, "bold"), " ", (seen.condition, style), f": {summary(state, seen)}")
    parts: list[RenderableType] = [head, Text(""), _nodes_table(seen)]
    if ports := open_ports(seen):
        parts += [
            Text(""),
            Text("other machines can reach, with the token:", style="bold"),
            *(Text(f"  {line}") for line in ports),
        ]
    elif seen.head_alive and seen.nodes[0].facts:
        parts += [Text(""), Text("everything listens on loopback alone", style="dim")]
    dashboard = launcher_of(state).dashboard(state)
    if state.head.host and dashboard and seen.head_alive:
        parts += [Text(""), Text.assemble(("dashboard: ", "bold"), dashboard[0])]
    if seen.runs:
        parts += [Text(""), runs_table(seen.runs)]
    for warning in seen.warnings:
        parts.append(Text.assemble(("warning: ", "yellow"), warning))
    return Group(*parts)


def runs_table(runs: list[dict[str, Any]]) -> Table:
    """Return the runs on a cluster, a row each, with the devices that each of its pools has."""
    titles = ("status", "step", "tok/s/device", "train", "generate")
    table = make_table(texts("run"), *map(figures, titles), titles="bold")
    for run in runs:
        step = f"{run['step']}/{run['num_steps']}" if run.get("num_steps") else "–"
        status = run.get("status", "starting")
        devices = [str(run.get("devices", {}).get(pool, "–")) for pool in ("trainer", "generator")]
        rate = number(run.get("throughput"))
        table.add_row(Text(run["name"]), "starting" if status == "new" else status, step, rate, *devices)
    return table


def clusters_table(entries: list[dict[str, Any]]) -> Table:
    """Return all clusters, a row each."""
    table = make_table(*map(texts, ("cluster", "kind", "state", "nodes", "address")), titles="bold")
    for each in entries:
        colour = _COLOURS.get(each["condition"], "dim" if each["condition"] == "down" else "red")
        state = Text(each["condition"], style=colour)
        table.add_row(Text(each["name"], style="cyan"), each["kind"], state, str(each["nodes"] or ""), each["address"])
    return table


def _nodes_table(seen: ClusterStatus) -> Table:
    free = (Column(title, justify="right") for title in ("CPUs free", "GPUs free", "GiB free", "disk"))
    table = make_table(texts("node"), names("state", ""), *free, texts("versions"), titles="bold")
    for each in seen.nodes:
        state = Text(each.condition, style=_COLOURS.get(each.condition, "bold red"))
        name = Text(each.node.name + (" *" if each.node.head and len(seen.nodes) > 1 else ""), style="cyan")
        versions = ""
        if each.facts:
            driver = f", driver {each.facts['driver']}" if each.facts["driver"] else ""
            versions = f"Ray {each.facts['ray']}, Python {each.facts['python']}{driver}"
        table.add_row(name, state, *_amounts(each), versions)
    return table


def _amounts(each: NodeStatus) -> list[str]:
    """Return the free share: CPUs and GPUs as Ray gives them out, memory and disk as the host has them."""
    ray = [f"{each.free.get(name, 0):g}/{each.total.get(name, 0):g}" if each.in_ray else "–" for name in ("CPU", "GPU")]
    if not each.facts:
        return [*ray, "–", "–"]
    memory = f"{each.facts['memory_free'] / GIB:.0f}/{each.facts['memory'] / GIB:.0f}"
    return [*ray, memory, f"{each.facts['disk_free'] / GIB:.0f}"]
