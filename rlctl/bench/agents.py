"""`rlctl bench agents`: the cost of the agents' endpoint, and turns through an SDK against those of an environment."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.bench.agent_server import TURNS, ServerRow, server_rows
from rlctl.bench.frame import Bench, Line, Results, ResultTable, Say
from rlctl.bench.generation import GenerationBench, GenerationResults, GenerationRow
from rlctl.config.errors import Problem

_LEGEND = (
    f"body: the first request of a session, half of it tools, followed by {TURNS - 1} longer ones; server, driver: CPU "
    "time of a request in the agents' process and on the driver's event loop; median, longest: time of a request whose "
    "turn takes none; MiB: by which the process grew"
)


@dataclass(frozen=True)
class AgentsBench(Bench):
    """Requests of several sizes; then rollouts of both players, on the same engines."""

    bodies: Sequence[int]  # bytes
    sessions: int
    generation: GenerationBench | None  # None: without engines

    def check(self) -> list[Problem]:
        return self.generation.check() if self.generation else []

    def measure(self, folder: Path, say: Say) -> "AgentsResults":
        (own := folder / "server").mkdir()
        server = server_rows(self.bodies, self.sessions, own, say)
        if self.generation is None:
            return AgentsResults(server, None)
        (own := folder / "generation").mkdir()
        return AgentsResults(server, self.generation.measure(own, say))


@dataclass(frozen=True)
class AgentsResults(Results):
    """Rows of all sizes, and the results of both players."""

    rows: list[ServerRow]
    generation: GenerationResults | None

    @property
    def share(self) -> float | None:
        """Tokens a second of agents over those of environments, both of several turns; None where one is missing."""
        rows: list[GenerationRow] = self.generation.rows if self.generation else []
        rates = {row.player: row.rate for row in rows}
        return rates["agent"] / rates["environment"] if {"agent", "environment"} <= set(rates) else None

    def report(self, wide: bool) -> list[Line | ResultTable]:
        lines: list[Line | ResultTable] = [ResultTable([row.cells() for row in self.rows]), Line(_LEGEND, "dim")]
        if self.generation is not None:
            lines += self.generation.report(wide)
        if self.share is not None:
            lines.append(Line(f"agents sample {self.share:.1%} of the tokens/s of environments"))
        return lines

    def as_json(self) -> Any:
        generation = None if self.generation is None else self.generation.as_json()
        return {**super().as_json(), "generation": generation, "share": self.share}
