"""Upload of files and config to a cluster that does not share this machine's file system.

Paths in the working directory or among the shipped recipes become relative, so that they are valid on the cluster too.
Any other path must exist on the cluster.
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
# Number of files that the error about a too large upload lists.
_NUM_NAMED_FILES = 3


def portable(config_value: Any, folders: list[Path]) -> Any:
    """Return a config value in which each path inside one of `folders` is relative to that folder."""
    if isinstance(config_value, dict):
        return {key: portable(inner_value, folders) for key, inner_value in config_value.items()}
    if isinstance(config_value, list):
        return [portable(inner_value, folders) for inner_value in config_value]
    if isinstance(config_value, str):
        for folder in folders:
            if config_value.startswith(f"{folder}/"):
                return config_value.removeprefix(f"{folder}/")
    return config_value


def named_files(config_value: Any, home: Path) -> list[Path]:
    """Return the existing files and folders inside `home` that a config value names."""
    if isinstance(config_value, dict | list):
        inner_values = config_value.values() if isinstance(config_value, dict) else config_value
        paths = []
        for inner_value in inner_values:
            paths += named_files(inner_value, home)
        return paths
    if isinstance(config_value, str) and config_value.startswith(f"{home}/"):
        # A value may be file.py:Class.
        path = Path(config_value.partition(":")[0])
        if path.exists():
            return [path]
        return [Path(match) for match in glob(config_value, recursive=True)]
    return []


def pack(home: Path, config_files: list[Path]) -> str:
    """Return a zip in base64 of the files in `home` that git tracks or would add, and of `config_files`.

    Without git the zip has all files except hidden ones and runs. Raises ClusterError with the largest files if the
    files exceed `MOST_BYTES`.
    """
    paths = set(_project_files(home))
    for path in config_files:
        if path.is_relative_to(home) and path != home:
            paths |= set(path.rglob("*")) if path.is_dir() else {path}
    sizes = {path: path.stat().st_size for path in paths if path.is_file()}
    if sum(sizes.values()) > MOST_BYTES:
        largest_paths = sorted(sizes, key=lambda path: -sizes[path])[:_NUM_NAMED_FILES]
        largest = ", ".join(f"{path.relative_to(home)} {sizes[path] / 2**20:.0f} MiB" for path in largest_paths)
        total_mib = sum(sizes.values()) / 2**20
        problem = f"{home} has {total_mib:.0f} MiB to ship, at most {MOST_BYTES >> 20}: {largest}"
        raise ClusterError(f"{problem}; leave them to .gitignore, or put them on the cluster and name them there")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(sizes):
            archive.write(path, path.relative_to(home))
    return base64.b64encode(packed.getvalue()).decode()


def _project_files(home: Path) -> Iterator[Path]:
    """Yield the files in `home` that git tracks or would add; without git, all except hidden ones and runs."""
    listing = ["git", "-C", str(home), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(listing, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        listed = None
    if listed is not None and listed.returncode == 0:
        yield from (home / name for name in listed.stdout.split("\0") if name)
        return
    for folder, subfolders, names in os.walk(home):
        # Changed in place, so that os.walk does not enter the removed subfolders.
        subfolders[:] = [name for name in subfolders if name not in _IGNORED_NAMES and not name.startswith(".")]
        yield from (Path(folder) / name for name in names if not name.startswith("."))
