"""The plan of a run as tables that fit 80 columns."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rlctl.config.provenance import show_path
from rlctl.dashboard.console import figures, make_table, names, texts
from rlctl.dashboard.formats import count
from rlctl.preflight.memory import Memory, PlacedState
from rlctl.preflight.placement import Placement
from rlctl.preflight.plan import RunPlan, Schedule
from rlctl.preflight.trainer_settings import Choice

if TYPE_CHECKING:
    from rlctl.data.end_tokens import EndTokens

# More nodes than these share rows.
_MOST_NODES = 8


def format_plan(plan: RunPlan) -> Group:
    """Return placement, batch, memory, the place of each state and the schedule, one under the other."""
    parts = {"where": _two_columns(_where(plan)), "one step": _two_columns(_step(plan))}
    if plan.memory:
        parts["memory a device"] = _memory(plan.memory)
        parts["state of a rank"] = _placed_states(plan.memory)
    if plan.chosen:
        parts["chosen, where the config says auto"] = _chosen(plan.chosen)
    parts["whole run"] = _two_columns(_run_rows(plan.schedule))
    shown = [each for title, table in parts.items() for each in (Text(title, "bold"), Padding(table, (0, 0, 0, 2)))]
    return Group(*shown, *(Text.assemble(("note: ", "yellow"), note) for note in plan.notes))


def format_rows(title: str, rows: list[tuple[str, str]]) -> Group:
    """Return one more part of a plan."""
    return Group(Text(title, "bold"), Padding(_two_columns(rows), (0, 0, 0, 2)))


def data_rows(counts: dict[str, int] | None, ends: "EndTokens | None") -> list[tuple[str, str]]:
    """Return the number of rows, and the tokens at which an answer ends. Both are None where they are a hub's."""
    known = str(ends) if ends else "not known: the model is not on this machine"
    if counts is None:
        return [
            ("rows", "not read: not all are on this machine; rlctl data preview fetches"),
            ("answers end at", known),
        ]
    shown = [(name, f"{count(number, 'row')}, all read and checked") for name, number in counts.items() if number]
    return [*shown, ("answers end at", known)]


def _two_columns(rows: list[tuple[str, str]]) -> Table:
    return make_table(names(width=16), texts(), rows=rows)


def _where(plan: RunPlan) -> list[tuple[str, str]]:
    size = f", {plan.parameters:,} parameters" if plan.parameters else ", sizes unknown: not on this machine"
    rows = [("model", show_path(Path(plan.model)) + size)]
    if plan.layout:
        rows.append(("layout", str(plan.layout)))
    if plan.placement is None:
        return [*rows, ("devices", f"[red]{plan.misplaced}[/red]")]
    if len(plan.placement.nodes) > 1 or plan.placement.nodes[0]:
        return [*rows, *_on_nodes(plan.placement)]
    if plan.placement.device == "cpu":
        ranks, engines = len(plan.placement.trainers), len(plan.placement.engines)
        share = f"{count(ranks, 'trainer rank')}" + (f" and {count(engines, 'engine')} share the cores" * bool(engines))
        return [*rows, ("CPU", share)]
    rows += [(f"rank {i}", f"GPU {slot.devices[0]}") for i, slot in enumerate(plan.placement.trainers)]
    shared = ", shared with the trainer" if plan.placement.shared else ""
    for i, slot in enumerate(plan.placement.engines):
        rows.append((f"engine {i}", f"GPU {', '.join(map(str, slot.devices))}{shared}"))
    return rows


def _on_nodes(placement: Placement) -> list[tuple[str, str]]:
    """Return a row for each node in use: processes and their reserved resources. Many nodes share rows."""
    if len(placement.used_nodes) > _MOST_NODES:
        return _many_nodes(placement)
    rows = []
    for node in placement.used_nodes:
        ranks = [str(i) for i, slot in enumerate(placement.trainers) if slot.node == node]
        engines = [str(i) for i, slot in enumerate(placement.engines) if slot.node == node]
        who = [f"rank {', '.join(ranks)}"] * bool(ranks) + [f"engine {', '.join(engines)}"] * bool(engines)
        rows.append((placement.nodes[node], f"{_amount(placement, node)}: {'; '.join(who)}"))
    return rows


def _many_nodes(placement: Placement) -> list[tuple[str, str]]:
    """Return a row for each run of nodes with equally many ranks and engines."""
    rows = []
    alike = groupby(placement.used_nodes, key=lambda node: (_amount(placement, node), placement.processes_on(node)))
    for (amount, (ranks, engines)), nodes in alike:
        names = [placement.nodes[node] for node in nodes]
        who = [count(ranks, "rank")] * bool(ranks) + [count(engines, "engine")] * bool(engines)
        shown = names[0] if len(names) == 1 else f"{len(names)} nodes"
        between = f", {names[0]} to {names[-1]}" if len(names) > 1 else ""
        rows.append((shown, f"{amount}, {' and '.join(who)} on each{between}"))
    return rows


def _amount(placement: Placement, node: int) -> str:
    gpus = placement.gpus_on(node)
    return f"{gpus} GPU{'s' * (gpus != 1)}" if gpus else f"{placement.cpus_on(node):g} CPUs"


def _step(plan: RunPlan) -> list[tuple[str, str]]:
    batch, unit = plan.batch, "shard" if plan.layout else "rank"
    if plan.kind == "sft":
        arithmetic = f"{batch.prompts} samples, {batch.per_rank} a {unit}"
    else:
        shared = f"{batch.per_update} an update x {count(batch.updates, 'update')}, {batch.per_rank} a {unit}"
        arithmetic = f"{batch.prompts} prompts x {batch.group} = {batch.rollouts} rollouts = {shared}"
    rows = [("batch", arithmetic)]
    if batch.longest and batch.tokens:
        rows.append(("tokens", f"at most {batch.longest:,} a sequence, {batch.tokens:,} a step"))
        rows.append(("micro-batches", f"at most {batch.micro_batches} of {batch.full_sequences} full sequences a rank"))
    if plan.refit is not None:
        way = f", by {plan.refit_way}" if plan.refit_way else ""
        rows.append(("refit", f"{size(plan.refit)} to each engine{way}"))
    return rows


def _chosen(choices: Sequence[Choice]) -> Table:
    """Return each value with its reason. Writing it into the recipe keeps it on any machine."""
    table = make_table(names(), texts())
    for each in choices:
        value = str(each.value).lower() if isinstance(each.value, bool) else f"{each.value:g}"
        table.add_row(f"{each.key}={value}", each.why)
    return table


def _memory(memory: Memory) -> Table:
    table = make_table(names(width=36), figures())
    for part, items in (("trainer: ", memory.trainer), ("engine: ", memory.engine)):
        for name, amount in items.items():
            table.add_row(name if name.startswith("engines: ") else part + name, size(amount))
    for name, amount in memory.host.items():
        table.add_row(f"host, a rank: {name}", size(amount))
    limit = f" of {size(memory.capacity)}" if memory.capacity else ""
    table.add_row("peak", f"{size(memory.peak)}{limit}", style="bold")
    if memory.kv_sequences is not None:
        table.add_row("full sequences cached", f"{memory.kv_sequences:,}")
    return table


def _placed_states(memory: Memory) -> Table:
    """Return the place of each state in each phase, and the sum on the device."""
    on_device, columns = memory.state_peak > 0, next(iter(memory.placed_states.values()))
    table = make_table(names(), *map(figures, (*columns, *["on the device"] * on_device)), titles="")
    for phase, states in memory.placed_states.items():
        total = size(sum(each.device for each in states.values()))
        table.add_row(phase, *map(_place, states.values()), *[total] * on_device)
    return table


def _place(placed_states: PlacedState) -> str:
    """Return `device 3.2 GiB`; a state that the host updates may be in both places."""
    parts = {"host": placed_states.host, "device": placed_states.device}
    return "\n".join(f"{place} {size(amount)}" for place, amount in parts.items() if amount) or placed_states.place


def _run_rows(schedule: Schedule) -> list[tuple[str, str]]:
    saved = f"{count(schedule.checkpoints, 'checkpoint')}, {schedule.kept} kept"
    if schedule.checkpoint_bytes:
        saved += f", {size(schedule.checkpoint_bytes)} each"
    if schedule.checkpoint_bytes and schedule.disk_free:
        saved += f"; {size(schedule.disk_free)} free"
    return [
        ("steps", f"{schedule.steps:,}, {count(schedule.updates, 'update')}"),
        ("stops", f"{count(schedule.validations, 'validation')}; {saved}"),
    ]


def size(count: int) -> str:
    """Return bytes in the unit that fits: 512 KiB, 12.3 MiB, 1.50 GiB."""
    for unit, width in (("GiB", 30), ("MiB", 20)):
        if count >= 1 << width:
            value = count / (1 << width)
            return f"{value:.1f} {unit}" if value >= 10 else f"{value:.2f} {unit}"
    return f"{count / 1024:.0f} KiB"
