"""The driver's side of a checkpoint's trainer part: it asks every rank, and joins the digests of what they wrote."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlctl.training.rank_checkpoint import FilesWritten, PiecesRead, SaveBegun
from rlctl.training.trainer_worker import TrainerWorker
from rlctl.utils.digests import join_pieces
from rlctl.workers.group import DEADLINE_KNOB, WorkerGroup

# Slowest writing that is waited for, bytes/s a rank.
_SLOWEST = 50e6


@dataclass(frozen=True)
class TrainerSave:
    """A save that ranks have begun."""

    group: WorkerGroup
    folder: Path
    export: Path | None
    # Bytes of the rank that writes most, its export left out.
    most: int
    # Reason why no step may train before it is written; empty if one may.
    uncopied: str

    @classmethod
    def from_answers(
        cls, group: WorkerGroup, folder: Path, export: Path | None, begun: Iterable[SaveBegun]
    ) -> "TrainerSave":
        """Return the save that all ranks have begun."""
        answers = list(begun)
        uncopied = next((each.uncopied for each in answers if each.uncopied), "")
        return cls(group, folder, export, max(each.nbytes for each in answers), uncopied)

    @property
    def deadline_s(self) -> float:
        """Seconds that writing may take: those of every call, and more for more bytes."""
        return self.group.deadline_s + self.most / _SLOWEST

    def finish(self) -> dict[Path, tuple[int, str]]:
        """Wait until all is on the disk; return path -> (bytes, digest) of large files. May run on any thread.

        Raises the errors of `Pending.wait`, RuntimeError if the folder is empty as seen from here, and OSError if the
        export's bytes are not those that were written.
        """
        knob = f"{DEADLINE_KNOB}, and the bytes at {_SLOWEST / 1e6:.0f} MB/s"
        written = self.group.outcomes(TrainerWorker.save_written, self.deadline_s, knob)
        if not any(self.folder.iterdir()):
            raise RuntimeError(f"the ranks wrote no state into {self.folder}: do their nodes see another run.dir?")
        known = {Path(path): facts for each in written for path, facts in each.files.items()}
        if self.export:
            read = self.group.outcomes(TrainerWorker.export_pieces, self.deadline_s, knob)
            known |= join_export(self.export, written, read)
        return known


def join_export(
    export: Path, written: Iterable[FilesWritten], read: Iterable[PiecesRead]
) -> dict[Path, tuple[int, str]]:
    """Return path -> (bytes, digest) of the export's files from the pieces that ranks read.

    Raises OSError if the sum of all bytes is another one than that written: a file system lost some.
    """
    pieces: dict[str, dict[int, bytes]] = {}
    read = list(read)
    for each in read:
        for path, found in each.pieces.items():
            pieces.setdefault(path, {}).update(found)
    if sum(each.read_sum for each in read) != sum(each.export_sum for each in written):
        raise OSError(f"{export} does not hold the bytes that the ranks wrote")
    return {
        Path(path): (Path(path).stat().st_size, join_pieces(found[number] for number in sorted(found)))
        for path, found in pieces.items()
    }
