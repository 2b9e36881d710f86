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

# Up to this number of nodes each node has a row. More nodes share rows.
_MAX_NODES = 8


def format_plan(plan: RunPlan) -> Group:
    """Return the tables of a plan: placement, batch, memory, where each state is kept, chosen values, schedule."""
    parts = [format_rows("where", _placement_rows(plan)), format_rows("one step", _step_rows(plan))]
    if plan.memory:
        parts.append(_format_part("memory a device", _memory_table(plan.memory)))
        parts.append(_format_part("state of a rank", _state_table(plan.memory)))
    if plan.chosen:
        parts.append(_format_part("chosen, where the config says auto", _choice_table(plan.chosen)))
    parts.append(format_rows("whole run", _run_rows(plan.schedule)))
    notes = [Text.assemble(("note: ", "yellow"), note) for note in plan.notes]
    return Group(*parts, *notes)


def format_rows(title: str, rows: list[tuple[str, str]]) -> Group:
    """Return one part of a plan from its (label, text) rows."""
    return _format_part(title, make_table(names(width=16), texts(), rows=rows))


def _format_part(title: str, table: Table) -> Group:
    return Group(Text(title, "bold"), Padding(table, (0, 0, 0, 2)))


def data_rows(counts: dict[str, int] | None, ends: "EndTokens | None") -> list[tuple[str, str]]:
    """Return (label, text) rows on the data: the number of rows, and the tokens that end an answer.

    counts: rows by data set; None if some data set is not on this machine. ends: None if the model is not.
    """
    rows = [("rows", "not read: not all are on this machine; rlctl data preview fetches")]
    if counts is not None:
        rows = [(name, f"{count(number, 'row')}, all read and checked") for name, number in counts.items() if number]
    rows.append(("answers end at", str(ends) if ends else "not known: the model is not on this machine"))
    return rows


def _placement_rows(plan: RunPlan) -> list[tuple[str, str]]:
    parameters = f"{plan.parameters:,} parameters" if plan.parameters else "sizes unknown: not on this machine"
    rows = [("model", f"{show_path(Path(plan.model))}, {parameters}")]
    if plan.layout:
        rows.append(("layout", str(plan.layout)))
    if plan.placement is None:
        return [*rows, ("devices", f"[red]{plan.misplaced}[/red]")]
    # A placement on this machine has one node, whose name is empty.
    if len(plan.placement.nodes) > 1 or plan.placement.nodes[0]:
        return rows + _node_rows(plan.placement)
    if plan.placement.device == "cpu":
        processes = count(len(plan.placement.trainers), "trainer rank")
        if plan.placement.engines:
            engines = len(plan.placement.engines) + len(plan.placement.scoring)
            processes += f" and {count(engines, 'engine')} share the cores"
        return [*rows, ("CPU", processes)]
    rows += [(f"rank {rank}", f"GPU {slot.devices[0]}") for rank, slot in enumerate(plan.placement.trainers)]
    shared = ", shared with the trainer" if plan.placement.shared else ""
    for number, slot in enumerate(plan.placement.engines):
        rows.append((f"engine {number}", f"GPU {', '.join(map(str, slot.devices))}{shared}"))
    for number, slot in enumerate(plan.placement.scoring):
        rows.append((f"teacher's engine {number}", f"GPU {', '.join(map(str, slot.devices))}"))
    return rows


def _node_rows(placement: Placement) -> list[tuple[str, str]]:
    """Return (node, processes and reserved resources) for each node in use. More than 8 nodes share rows."""
    if len(placement.used_nodes) > _MAX_NODES:
        return _shared_node_rows(placement)
    rows = []
    for node in placement.used_nodes:
        ranks = [str(rank) for rank, slot in enumerate(placement.trainers) if slot.node == node]
        engines = [str(number) for number, slot in enumerate(placement.engines) if slot.node == node]
        processes = [f"rank {', '.join(ranks)}"] if ranks else []
        if engines:
            processes.append(f"engine {', '.join(engines)}")
        rows.append((placement.nodes[node], f"{_reserved_amount(placement, node)}: {'; '.join(processes)}"))
    return rows


def _shared_node_rows(placement: Placement) -> list[tuple[str, str]]:
    """Return one row for each sequence of consecutive nodes with the same number of ranks and of engines."""
    rows = []
    sequences = groupby(
        placement.used_nodes, key=lambda node: (_reserved_amount(placement, node), placement.processes_on(node))
    )
    for (amount, (num_ranks, num_engines)), nodes in sequences:
        node_names = [placement.nodes[node] for node in nodes]
        processes = [count(num_ranks, "rank")] if num_ranks else []
        if num_engines:
            processes.append(count(num_engines, "engine"))
        text = f"{amount}, {' and '.join(processes)} on each"
        if len(node_names) == 1:
            rows.append((node_names[0], text))
        else:
            rows.append((f"{len(node_names)} nodes", f"{text}, {node_names[0]} to {node_names[-1]}"))
    return rows


def _reserved_amount(placement: Placement, node: int) -> str:
    gpus = placement.gpus_on(node)
    return count(gpus, "GPU") if gpus else f"{placement.cpus_on(node):g} CPUs"


def _step_rows(plan: RunPlan) -> list[tuple[str, str]]:
    batch = plan.batch
    unit = "shard" if plan.layout else "rank"
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


def _choice_table(choices: Sequence[Choice]) -> Table:
    """Return a table of the values that rlctl chose for `auto`, each with its reason.

    The cells are KEY=VALUE, so that a user can copy them into a recipe to use the same values on other machines.
    """
    table = make_table(names(), texts())
    for choice in choices:
        value = str(choice.value).lower() if isinstance(choice.value, bool | str) else f"{choice.value:g}"
        table.add_row(f"{choice.key}={value}", choice.why)
    return table


def _memory_table(memory: Memory) -> Table:
    table = make_table(names(width=36), figures())
    for part, amounts in (("trainer: ", memory.trainer), ("engine: ", memory.engine)):
        for name, amount in amounts.items():
            # On a CPU a name says by itself that the bytes are those of all engines.
            table.add_row(name if name.startswith("engines: ") else part + name, size(amount))
    for name, amount in memory.host.items():
        table.add_row(f"host, a rank: {name}", size(amount))
    limit = f" of {size(memory.capacity)}" if memory.capacity else ""
    table.add_row("peak", f"{size(memory.peak)}{limit}", style="bold")
    if memory.kv_sequences is not None:
        table.add_row("full sequences cached", f"{memory.kv_sequences:,}")
    return table


def _state_table(memory: Memory) -> Table:
    """Return a table of where each state (such as optimizer state) is in each phase, and the sum on the device."""
    has_device = memory.state_peak > 0
    titles: list[str] = list(next(iter(memory.placed_states.values())))
    if has_device:
        titles.append("on the device")
    table = make_table(names(), *map(figures, titles), titles="")
    for phase, states in memory.placed_states.items():
        cells = [_place_text(state) for state in states.values()]
        if has_device:
            cells.append(size(sum(state.device for state in states.values())))
        table.add_row(phase, *cells)
    return table


def _place_text(state: PlacedState) -> str:
    """Return a text such as "device 3.2 GiB". A state is on host and device if the host updates only some weights."""
    amounts = {"host": state.host, "device": state.device}
    return "\n".join(f"{place} {size(amount)}" for place, amount in amounts.items() if amount) or state.place


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


def size(num_bytes: int) -> str:
    """Return bytes in the unit that fits: 512 KiB, 12.3 MiB, 1.50 GiB."""
    for unit, unit_bytes in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= unit_bytes:
            amount = num_bytes / unit_bytes
            return f"{amount:.1f} {unit}" if amount >= 10 else f"{amount:.2f} {unit}"
    return f"{num_bytes / 1024:.0f} KiB"
