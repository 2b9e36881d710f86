"""Files and config for a cluster that does not share a file system with this machine.

Paths below the working directory, or among the shipped recipes, become relative, and mean the same there. Any other
path is one of the cluster's.
"""

import base64
import io
import os
import subprocess
import zipfile
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

from rlctl.cluster.state import ClusterError

MOST_BYTES = 64 << 20
_IGNORED_NAMES = {"runs", "__pycache__", "node_modules"}
_SHOWN = 3


def portable(value: Any, folders: list[Path]) -> Any:
    """Return a config's values with paths below any of `folders` made relative to that folder."""
    if isinstance(value, dict):
        return {key: portable(each, folders) for key, each in value.items()}
    if isinstance(value, list):
        return [portable(each, folders) for each in value]
    if isinstance(value, str):
        for folder in folders:
            if value.startswith(f"{folder}/"):
                return value.removeprefix(f"{folder}/")
    return value


def named_files(value: Any, home: Path) -> list[Path]:
    """Return the files and folders below `home` that a config's values name."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return [path for each in parts for path in named_files(each, home)]
    if isinstance(value, str) and value.startswith(f"{home}/"):
        path = Path(value.partition(":")[0])
        return [path] if path.exists() else [Path(each) for each in glob(value, recursive=True)]
    return []


def pack(home: Path, named: list[Path]) -> str:
    """Return a zip in base64 of the files below `home` that git tracks or would add, and of files named in the config.

    Without git: of all but hidden files and runs. Raises ClusterError with the largest when it is too much.
    """
    found = set(_files(home))
    for path in named:
        if path.is_relative_to(home) and path != home:
            found |= set(path.rglob("*")) if path.is_dir() else {path}
    files = {path: path.stat().st_size for path in found if path.is_file()}
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
        folders[:] = [name for name in folders if name not in _IGNORED_NAMES and not name.startswith(".")]
        yield from (Path(folder) / name for name in names if not name.startswith("."))
