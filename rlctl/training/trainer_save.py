"""Driver's side of saving the trainer's state: waits until every rank has written, and joins the digests of files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlctl.training.rank_checkpoint import FilesWritten, PiecesRead, SaveBegun
from rlctl.training.trainer_worker import TrainerWorker
from rlctl.utils.digests import join_pieces
from rlctl.workers.group import DEADLINE_KNOB, WorkerGroup

# Slowest write rate that the deadline allows, bytes/s for each rank.
_SLOWEST = 50e6


@dataclass(frozen=True)
class TrainerSave:
    """A save of the trainer's state that all ranks have begun."""

    group: WorkerGroup
    # Folder of the training state.
    folder: Path
    # Folder of the exported model; None without an export.
    export: Path | None
    # Bytes of state that one rank writes, the largest of all ranks. The export is not counted.
    largest_bytes: int
    # Reason why training must wait until the save is written. Empty if training may go on.
    wait_cause: str

    @classmethod
    def from_answers(
        cls, group: WorkerGroup, folder: Path, export: Path | None, answers: Sequence[SaveBegun]
    ) -> "TrainerSave":
        """Return the save, from the answers of all ranks to `begin_save`."""
        return cls(
            group=group,
            folder=folder,
            export=export,
            largest_bytes=max(answer.nbytes for answer in answers),
            wait_cause=next((answer.wait_cause for answer in answers if answer.wait_cause), ""),
        )

    @property
    def deadline_s(self) -> float:
        """Seconds that writing may take: the deadline of a call, plus the time for the bytes at the slowest rate."""
        return self.group.deadline_s + self.largest_bytes / _SLOWEST

    def finish(self) -> dict[Path, tuple[int, str]]:
        """Wait until all ranks have written their files. Return path -> (size in bytes, digest) of state and weights.

        May run on any thread. Raises the errors of `Pending.wait`, RuntimeError if the driver sees an empty folder, and
        OSError if the export on disk has other bytes than the ranks wrote.
        """
        knob = f"{DEADLINE_KNOB}, and the bytes at {_SLOWEST / 1e6:.0f} MB/s"
        written = self.group.outcomes(TrainerWorker.wait_for_files, self.deadline_s, knob)
        if not any(self.folder.iterdir()):
            raise RuntimeError(f"the ranks wrote no state into {self.folder}: do their nodes see another run.dir?")
        files: dict[Path, tuple[int, str]] = {}
        for rank_files in written:
            files |= {Path(path): size_and_digest for path, size_and_digest in rank_files.files.items()}
        if self.export:
            read = self.group.outcomes(TrainerWorker.wait_for_pieces, self.deadline_s, knob)
            files |= join_export(self.export, written, read)
        return files


def join_export(
    export: Path, written: Sequence[FilesWritten], read: Sequence[PiecesRead]
) -> dict[Path, tuple[int, str]]:
    """Return path -> (size in bytes, digest) of the export's weight files, from the pieces that ranks read back.

    Raises OSError if the checksum of the bytes read differs from that of the bytes written, because the file system
    lost some.
    """
    pieces: dict[str, dict[int, bytes]] = {}
    for rank_pieces in read:
        for path, digests in rank_pieces.pieces.items():
            pieces.setdefault(path, {}).update(digests)
    if sum(rank_pieces.read_sum for rank_pieces in read) != sum(rank_files.export_sum for rank_files in written):
        raise OSError(f"{export} does not hold the bytes that the ranks wrote")
    files = {}
    for path, digests in pieces.items():
        digest = join_pieces(digests[number] for number in sorted(digests))
        files[Path(path)] = Path(path).stat().st_size, digest
    return files
