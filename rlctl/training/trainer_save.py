"""The driver's side of a checkpoint's trainer part: waits for every rank, and joins the digests of written files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlctl.training.rank_checkpoint import FilesWritten, PiecesRead, SaveBegun
from rlctl.training.trainer_worker import TrainerWorker
from rlctl.utils.digests import join_pieces
from rlctl.workers.group import DEADLINE_KNOB, WorkerGroup

# Slowest rate of writing that the deadline allows, bytes/s of a rank.
_SLOWEST = 50e6


@dataclass(frozen=True)
class TrainerSave:
    """A save that ranks have begun."""

    group: WorkerGroup
    folder: Path
    export: Path | None
    # Bytes of the rank that writes most, without its part of the export.
    largest_bytes: int
    # Reason why steps must wait until the save is written; empty if they may train meanwhile.
    wait_cause: str

    @classmethod
    def from_answers(
        cls, group: WorkerGroup, folder: Path, export: Path | None, answers: Sequence[SaveBegun]
    ) -> "TrainerSave":
        """Return the save that all ranks have begun."""
        return cls(
            group=group,
            folder=folder,
            export=export,
            largest_bytes=max(answer.nbytes for answer in answers),
            wait_cause=next((answer.wait_cause for answer in answers if answer.wait_cause), ""),
        )

    @property
    def deadline_s(self) -> float:
        """Seconds that writing may take: the deadline of every call, or more if there are many bytes."""
        return self.group.deadline_s + self.largest_bytes / _SLOWEST

    def finish(self) -> dict[Path, tuple[int, str]]:
        """Wait until every file is on the disk; return path -> (bytes, digest) of large files. May run on any thread.

        Raises the errors of `Pending.wait`, RuntimeError if the folder is empty as seen from here, and OSError if the
        export's bytes are not those that were written.
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
    """Return path -> (bytes, digest) of the export's files from the pieces that ranks read.

    Raises OSError if the sum of the bytes read is not the sum of the bytes written: a file system lost some.
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
