"""The manifest of a checkpoint or an evaluation, `manifest.json`: sizes and digests of its files, to find damage.

A file's digest is the SHA-256 of the SHA-256s of its pieces of 64 MiB, so that all cores can hash one large file.
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
# The most threads that read files. More threads do not read faster from a disk.
_MOST_THREADS = 16


def write_manifest(
    folder: Path, names: Sequence[str] | None = None, written_files: Mapping[Path, tuple[int, str]] | None = None
) -> None:
    """Write the manifest of files in `folder`. names: their names; None: all files.

    written_files: path -> (bytes, digest), as the processes that wrote the files have reported. These files are not
    read again. Raises OSError, also if one of these files has another size or is missing.
    """
    if names is None:
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    written_files = written_files or {}
    digests = _digests([folder / name for name in names if folder / name not in written_files])
    if errors := [error for error in digests.values() if isinstance(error, OSError)]:
        raise errors[0]
    files = {}
    for name in names:
        path = folder / name
        size = path.stat().st_size
        digest = digests.get(path)
        if path in written_files:
            written_size, digest = written_files[path]
            if written_size != size:
                raise OSError(f"{path} has {size:,} bytes as seen from here, and {written_size:,} were written")
        files[name] = {"bytes": size, "digest": digest}
    if missing := [path for path in written_files if str(path.relative_to(folder)) not in files]:
        raise OSError(
            f"{missing[0]} was written, and is not there as seen from here: is run.dir the same on every node?"
        )
    content = {"digest": f"sha256 of the sha256s of pieces of {PIECE} bytes", "files": files}
    write_whole(folder / MANIFEST, json.dumps(content, indent=1))


def find_damage(folder: Path, part: str = "") -> dict[Path, str]:
    """Compare the files in `folder` with its manifest; return path -> text on the damage.

    part: compare only the files whose names begin with this text; empty: all.
    """
    try:
        listed = {name: facts for name, facts in _read_manifest(folder / MANIFEST).items() if name.startswith(part)}
    except FileNotFoundError:
        return {folder / MANIFEST: "missing, so that nothing says whether the files are as they were written"}
    except (OSError, ValueError, RecursionError) as error:
        return {folder / MANIFEST: f"cannot be read: {error}"}
    # Compare sizes first, so that a truncated file is found before any file is read.
    damage: dict[Path, str] = {}
    digests_as_written: dict[Path, str] = {}
    for name, facts in listed.items():
        path = folder / name
        if size_damage := _size_damage(path, facts):
            damage[path] = size_damage
        else:
            digests_as_written[path] = facts["digest"]
    digests = _digests(digests_as_written)
    for path, digest_as_written in digests_as_written.items():
        digest = digests[path]
        if isinstance(digest, OSError):
            damage[path] = f"cannot be read: {digest.strerror}"
        elif digest != digest_as_written:
            damage[path] = "its bytes are not those that were written"
    # A shard that is not in the manifest is damage too, because the loader reads every shard in the folder.
    shards = (path for path in (folder / "trainer").glob("*.safetensors") if f"trainer/{path.name}" not in listed)
    return damage if part else damage | dict.fromkeys(shards, "not written with this checkpoint")


def is_as_written(folder: Path, name: str) -> bool:
    """Return True if the file `name` has the size and digest of the folder's manifest. No other file is read."""
    path = folder / name
    try:
        facts = _read_manifest(folder / MANIFEST)[name]
        return not _size_damage(path, facts) and _digests([path])[path] == facts["digest"]
    except (OSError, ValueError, RecursionError, KeyError):
        return False


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Return name -> bytes and digest of each file. Raises OSError, and ValueError for a damaged manifest."""
    content = json.loads(path.read_text())
    try:
        return {
            str(name): {"bytes": int(facts["bytes"]), "digest": str(facts["digest"])}
            for name, facts in content["files"].items()
        }
    except (KeyError, TypeError, AttributeError, OverflowError):
        raise ValueError("it lists no files") from None


def _size_damage(path: Path, facts: dict[str, Any]) -> str:
    """Return a text if a file's size differs from the written size; else an empty text."""
    written_size = facts["bytes"]
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if size < written_size:
        return f"cut to {size:,} of {written_size:,} bytes" if size else f"empty, of {written_size:,} bytes"
    return f"grown from {written_size:,} to {size:,} bytes" if size > written_size else ""


def _digests(paths: Iterable[Path]) -> dict[Path, str | OSError]:
    """Return the digest of each file, or the error of reading it."""
    pieces = {path: count_pieces(path.stat().st_size) for path in paths}
    digests: dict[Path, str | OSError] = {}
    with ThreadPoolExecutor(min(_MOST_THREADS, usable_cores())) as threads:
        futures_by_path = {
            path: [threads.submit(piece_digest, path, index) for index in range(count)]
            for path, count in pieces.items()
        }
        for path, futures in futures_by_path.items():
            try:
                digests[path] = join_pieces(future.result() for future in futures)
            except OSError as error:
                digests[path] = error
    return digests
