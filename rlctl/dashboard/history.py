"""The records of a run's steps (or validations) in order, with each metric's course at hand."""

from collections.abc import Sequence

from rlctl.telemetry.jsonl import Record


class History:
    """Records by step. Adding the newest is cheap; adding an older one, as after a reread, costs a rebuild."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        self._courses: dict[str, tuple[list[int], list[float]]] = {}

    def __len__(self) -> int:
        return len(self._records)

    @property
    def steps(self) -> list[int]:
        return list(self._records)

    @property
    def last(self) -> Record:
        """The newest record; empty before the first."""
        return next(reversed(self._records.values()), {})

    def add(self, record: Record) -> None:
        """Takes the record of `record["step"]`, in place of an earlier one of that step."""
        step = int(record["step"])
        if not self._records or step > next(reversed(self._records)):
            self._take(step, record)
        elif self._records.get(step) != record:
            self._rebuild({**self._records, step: record})

    def drop_after(self, step: int) -> None:
        self._rebuild({each: record for each, record in self._records.items() if each <= step})

    def recent(self, count: int) -> list[Record]:
        """The last `count` records, oldest first."""
        newest = reversed(self._records.values())
        return [record for _, record in zip(range(count), newest)][::-1]

    def course(self, name: str) -> Sequence[tuple[int, float]]:
        """(step, value) wherever the metric was recorded, in order."""
        steps, values = self._courses.get(name, ((), ()))
        return list(zip(steps, values))

    def values(self, name: str) -> Sequence[float]:
        """The values of `course`, without a copy."""
        return self._courses.get(name, ((), ()))[1]

    def _rebuild(self, records: dict[int, Record]) -> None:
        self._records, self._courses = {}, {}
        for step in sorted(records):
            self._take(step, records[step])

    def _take(self, step: int, record: Record) -> None:
        self._records[step] = record
        for name, value in record.items():
            if isinstance(value, (int, float)):
                steps, values = self._courses.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
