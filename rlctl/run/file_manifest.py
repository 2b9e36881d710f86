"""The manifest of a checkpoint or an evaluation: sizes and digests of its files in `manifest.json`; damage is found.

A file's digest is the SHA-256 of the SHA-256s of its pieces of 64 MiB, so that all cores work on one large file.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlctl.utils.devices import usable_cores
from rlctl.utils.digests import PIECE, count_pieces, join_pieces, piece_digest
from rlctl.utils.files import write_whole

MANIFEST = "manifest.json"
# More readers get no more out of a disk.
_MOST_THREADS = 16


def write_manifest(
    folder: Path, names: Sequence[str] | None = None, known: Mapping[Path, tuple[int, str]] | None = None
) -> None:
    """Write the manifest of these files in `folder`, of all for None.

    known: path -> (bytes, digest) of files whose writers say so; the others are read. Raises OSError, also for a known
    file of another size.
    """
    if names is None:
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    told = known or {}
    digests = _digests([folder / name for name in names if folder / name not in told])
    if failed := [error for error in digests.values() if isinstance(error, OSError)]:
        raise failed[0]
    files = {}
    for name in names:
        path, size = folder / name, (folder / name).stat().st_size
        if path in told and told[path][0] != size:
            raise OSError(f"{path} has {size:,} bytes as seen from here, and {told[path][0]:,} were written")
        files[name] = {"bytes": size, "digest": told[path][1] if path in told else digests[path]}
    if lost := [path for path in told if str(path.relative_to(folder)) not in files]:
        raise OSError(f"{lost[0]} was written, and is not there as seen from here: is run.dir the same on every node?")
    content = {"digest": f"sha256 of the sha256s of pieces of {PIECE} bytes", "files": files}
    write_whole(folder / MANIFEST, json.dumps(content, indent=1))


def find_damage(folder: Path, part: str = "") -> dict[Path, str]:
    """Compare the files in `folder`, or in its folder `part` alone, with its manifest; return the damage by path."""
    try:
        listed = {name: facts for name, facts in _read_manifest(folder / MANIFEST).items() if name.startswith(part)}
    except FileNotFoundError:
        return {folder / MANIFEST: "missing, so that nothing says whether the files are as they were written"}
    except (OSError, ValueError, RecursionError) as error:
        return {folder / MANIFEST: f"cannot be read: {error}"}
    # Sizes first: a file that was cut is found before any file is read.
    wrong = {folder / name: what for name, facts in listed.items() if (what := _wrong_size(folder / name, facts))}
    rest = {folder / name: facts["digest"] for name, facts in listed.items() if folder / name not in wrong}
    found = _digests(rest)
    for path, digest in rest.items():
        now = found[path]
        if isinstance(now, OSError):
            wrong[path] = f"cannot be read: {now.strerror}"
        elif now != digest:
            wrong[path] = "its bytes are not those that were written"
    # The loader reads every shard in the folder.
    shards = (path for path in (folder / "trainer").glob("*.safetensors") if f"trainer/{path.name}" not in listed)
    return wrong if part else wrong | dict.fromkeys(shards, "not written with this checkpoint")


def is_as_written(folder: Path, name: str) -> bool:
    """Return True if one file of `folder` has the bytes that its manifest lists; no other is read."""
    path = folder / name
    try:
        facts = _read_manifest(folder / MANIFEST)[name]
        return not _wrong_size(path, facts) and _digests([path])[path] == facts["digest"]
    except (OSError, ValueError, RecursionError, KeyError):
        return False


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    content = json.loads(path.read_text())
    try:
        return {
            str(name): {"bytes": int(f["bytes"]), "digest": str(f["digest"])} for name, f in content["files"].items()
        }
    except (KeyError, TypeError, AttributeError, OverflowError):
        raise ValueError("it lists no files") from None


def _wrong_size(path: Path, facts: dict[str, Any]) -> str:
    try:
        size, whole = path.stat().st_size, facts["bytes"]
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if size < whole:
        return f"cut to {size:,} of {whole:,} bytes" if size else f"empty, of {whole:,} bytes"
    return f"grown from {whole:,} to {size:,} bytes" if size > whole else ""


def _digests(paths: Iterable[Path]) -> dict[Path, str | OSError]:
    """Return the digest of each file, or the error of reading it."""
    pieces = {path: count_pieces(path.stat().st_size) for path in paths}
    found: dict[Path, str | OSError] = {}
    with ThreadPoolExecutor(min(_MOST_THREADS, usable_cores())) as threads:
        parts = {path: [threads.submit(piece_digest, path, n) for n in range(count)] for path, count in pieces.items()}
        for path, futures in parts.items():
            try:
                found[path] = join_pieces(future.result() for future in futures)
            except OSError as error:
                found[path] = error
    return found
