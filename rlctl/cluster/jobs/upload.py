"""What travels to a cluster with a file system of its own: the working directory's files, and a config that names them.

Paths below the working directory, or among the shipped recipes, become relative, and mean the same there. Any other
path is one of the cluster's.
"""

import base64
import io
import os
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlctl.cluster.state import ClusterError

MOST_BYTES = 64 << 20
_LEFT_OUT = {"runs", "__pycache__", "node_modules"}
_SHOWN = 3


def portable(value: Any, folders: list[Path]) -> Any:
    """A config's values with paths below any of `folders` made relative to it."""
    if isinstance(value, dict):
        return {key: portable(each, folders) for key, each in value.items()}
    if isinstance(value, list):
        return [portable(each, folders) for each in value]
    if isinstance(value, str):
        for folder in folders:
            if value.startswith(f"{folder}/"):
                return value.removeprefix(f"{folder}/")
    return value


def pack(home: Path, named: list[Path]) -> str:
    """A zip in base64 of what git knows or would take in below `home` (without git: of all but hidden files and runs),
    and of what the config names there. Raises ClusterError with the largest when it is too much."""
    files = {path: path.stat().st_size for path in {*_files(home), *_named(home, named)} if path.is_file()}
    if sum(files.values()) > MOST_BYTES:
        largest = sorted(files, key=lambda path: -files[path])[:_SHOWN]
        shown = ", ".join(f"{path.relative_to(home)} {files[path] / 2**20:.0f} MiB" for path in largest)
        total, most = sum(files.values()) / 2**20, MOST_BYTES >> 20
        what = f"{home} has {total:.0f} MiB to ship, at most {most}: {shown}"
        raise ClusterError(f"{what}; leave them to .gitignore, or put them on the cluster and name them there")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(files):
            archive.write(path, path.relative_to(home))
    return base64.b64encode(packed.getvalue()).decode()


def _named(home: Path, named: list[Path]) -> Iterator[Path]:
    for path in named:
        if path.is_relative_to(home) and path != home:
            yield from (each for each in path.rglob("*")) if path.is_dir() else (path,)


def _files(home: Path) -> Iterator[Path]:
    listing = ["git", "-C", str(home), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(listing, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        listed = None
    if listed is not None and listed.returncode == 0:
        yield from (home / name for name in listed.stdout.split("\0") if name)
        return
    for folder, folders, names in os.walk(home):
        folders[:] = [name for name in folders if name not in _LEFT_OUT and not name.startswith(".")]
        yield from (Path(folder) / name for name in names if not name.startswith("."))
