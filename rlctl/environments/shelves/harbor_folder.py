"""Task folders of Harbor: `instruction.md`, `task.toml`, `environment/`, `tests/`, and `solution/`, read as plain data.

A folder is refused with the reason if the sandbox would run another task than the one that it describes.
"""

import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

# Images that this machine's system and Python stand for, without their tags.
BASES = ("ubuntu", "debian", "python")
# Folders of the system in the sandbox. A task has no files of its own there.
_SYSTEM = (
    "/bin",
    "/boot",
    "/dev",
    "/etc",
    "/home/program",
    "/lib",
    "/proc",
    "/python",
    "/sbin",
    "/sys",
    "/tmp",
    "/usr",
)
# Folders that the shelf mounts for the tests.
TEST_FOLDERS = ("/tests", "/logs")
# Programs that load something from the network.
_LOADERS = re.compile(r"(?<![\w./-])(apt|apt-get|apk|conda|curl|git clone|npm|pip|pip3|uv|uvx|wget)(?=\s)")
# Section of task.toml -> keys that ask for something that the sandbox does not have.
_ABSENT = {
    "environment": ("gpus", "tpu", "mcp_servers", "healthcheck", "skills_dir"),
    "verifier": ("environment", "collect", "user"),
    "agent": ("user",),
}


class RefusedTaskError(ValueError):
    """A task folder that the sandbox cannot run. The text is one line: the place and the reason."""


@dataclass(frozen=True)
class HarborTask:
    """A task that runs on the sandbox."""

    folder: Path
    instruction: str
    # Working folder of the commands, an absolute path.
    workdir: str
    # (file or folder on this machine, absolute path in the sandbox; a file's has its name) in the order of COPY.
    copies: list[tuple[Path, str]]
    # Environment variables of all commands, and those of the tests besides.
    variables: Mapping[str, str]
    test_variables: Mapping[str, str]
    # Seconds that the tests may take, and the memory of a command in MiB; None: the shelf's own.
    tests_s: float
    memory_mib: int | None = None
    # Image in which a container runs the task; empty on the sandbox.
    image: str = ""

    @property
    def roots(self) -> list[str]:
        """Folders of the task in the sandbox, without those inside another."""
        folders = {self.workdir}
        for source, target in self.copies:
            folders.add(target if source.is_dir() else str(PurePosixPath(target).parent))
        paths = sorted(PurePosixPath(folder) for folder in folders)
        outer_paths = [path for path in paths if not any(parent in paths for parent in path.parents)]
        return [str(path) for path in outer_paths]


@dataclass
class _Dockerfile:
    workdir: str = "/"
    copies: list[tuple[Path, str]] = field(default_factory=list)


def read_task(folder: Path, bases: tuple[str, ...] = (), image_prefix: str | None = None) -> HarborTask:
    """Return the task of a folder. Raises RefusedTaskError.

    bases: further images that this machine stands for. image_prefix: None for the sandbox. Otherwise a container runs
    the task, in the image that task.toml names, or in one named by this prefix and the folder.
    """
    has_image = image_prefix is not None
    config = _read_config(folder / "task.toml", has_image)
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise RefusedTaskError(f"{folder.name} has no {name}")
    if has_image:
        dockerfile = _read_workdir(folder)
    else:
        dockerfile = _read_dockerfile(folder, config, (*BASES, *bases))
        _check_scripts(folder)
    environment = config.get("environment", {})
    verifier = config.get("verifier", {})
    task = HarborTask(
        folder=folder,
        instruction=(folder / "instruction.md").read_text(),
        workdir=environment.get("workdir") or dockerfile.workdir,
        copies=dockerfile.copies,
        variables=_read_variables(folder, "environment", environment),
        test_variables=_read_variables(folder, "verifier", verifier),
        tests_s=float(verifier.get("timeout_sec", 600.0)),
        memory_mib=environment.get("memory_mb"),
        image=environment.get("docker_image") or f"{image_prefix}{folder.name}" if has_image else "",
    )
    for root in task.roots:
        path = PurePosixPath(root)
        taken_folders = TEST_FOLDERS if has_image else (*_SYSTEM, *TEST_FOLDERS)
        if root == "/" or any(path.is_relative_to(taken) for taken in taken_folders):
            raise RefusedTaskError(f"{folder.name} works in {root}: WORKDIR and COPY need a folder of the task's own")
    return task


def _read_config(path: Path, has_image: bool) -> dict[str, Any]:
    name = path.parent.name
    if not path.is_file():
        raise RefusedTaskError(f"{name} has no task.toml")
    try:
        config = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RefusedTaskError(f"{name}/task.toml: {error}") from error
    version = str(config.get("schema_version", config.get("version", "1.0")))
    if version.partition(".")[0] != "1":
        raise RefusedTaskError(f"{name}/task.toml: schema_version {version}: this shelf reads 1.x")
    if config.get("steps"):
        raise RefusedTaskError(f"{name}/task.toml: steps: a task of several steps")
    for section, keys in _ABSENT.items():
        for key in keys:
            if config.get(section, {}).get(key):
                raise RefusedTaskError(f"{name}/task.toml: [{section}] {key}: the sandbox has none")
    environment = config.get("environment", {})
    if str(environment.get("os", "linux")).lower() != "linux":
        raise RefusedTaskError(f"{name}/task.toml: [environment] os is {environment['os']}, and the sandbox is Linux")
    for section in ("environment", "agent", "verifier"):
        settings = config.get(section, {})
        wants_network = settings.get("network_mode", "no-network") != "no-network" or settings.get("allow_internet")
        if wants_network and not has_image:
            raise RefusedTaskError(f"{name}/task.toml: [{section}] asks for a network, and the sandbox has none")
    if config.get("verifier", {}).get("environment_mode", "shared") != "shared":
        raise RefusedTaskError(f"{name}/task.toml: [verifier] environment_mode: the tests need an image of their own")
    return config


def _read_dockerfile(folder: Path, config: Mapping[str, Any], bases: tuple[str, ...]) -> _Dockerfile:
    """Return the files and the working folder of a task's image. Raises RefusedTaskError."""
    context = folder / "environment"
    place = f"{folder.name}/environment/Dockerfile"
    read = _Dockerfile()
    _refuse_further_images(folder)
    image = config.get("environment", {}).get("docker_image")
    if image is not None:
        # A built image has further files than its Dockerfile's base.
        _check_base(image, bases, f"{folder.name}/task.toml: [environment] docker_image")
        return read
    if not (context / "Dockerfile").is_file():
        raise RefusedTaskError(f"{folder.name} has no environment/Dockerfile")
    for number, line in _logical_lines((context / "Dockerfile").read_text()):
        instruction, _, rest = line.partition(" ")
        words = rest.split()
        match instruction.upper():
            case "FROM" if len(words) == 1:
                _check_base(words[0], bases, f"{place}:{number}")
            case "WORKDIR" if len(words) == 1:
                read.workdir = str(PurePosixPath(read.workdir) / words[0])
            case "COPY" if len(words) >= 2 and not words[0].startswith(("-", "[")):
                read.copies += _copied_files(context, read.workdir, words, f"{place}:{number}")
            case _:
                reason = "the sandbox stands for one FROM, COPY and WORKDIR alone"
                raise RefusedTaskError(f"{place}:{number}: {line[:80]}: {reason}")
    return read


def _read_workdir(folder: Path) -> _Dockerfile:
    """Return the working folder of a task's image, whose files a container has. Raises RefusedTaskError."""
    _refuse_further_images(folder)
    path = folder / "environment/Dockerfile"
    read = _Dockerfile()
    for _, line in _logical_lines(path.read_text() if path.is_file() else ""):
        instruction, _, rest = line.partition(" ")
        if instruction.upper() == "WORKDIR":
            read.workdir = str(PurePosixPath(read.workdir) / rest.strip())
    return read


def _refuse_further_images(folder: Path) -> None:
    """Raise RefusedTaskError if a task has several containers, or its tests an image of their own."""
    for compose in ("docker-compose.yaml", "docker-compose.yml", "compose.yaml"):
        if (folder / "environment" / compose).exists():
            raise RefusedTaskError(f"{folder.name}/environment/{compose}: a task of several containers")
    if (folder / "tests/Dockerfile").exists():
        raise RefusedTaskError(f"{folder.name}/tests/Dockerfile: the tests need an image of their own")


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Return (number, text) of each instruction, without comments. A line that ends with a backslash goes on."""
    lines: list[tuple[int, str]] = []
    is_open = False
    for number, line in enumerate(text.splitlines(), start=1):
        part = line.strip()
        if part.startswith("#") or not part:
            continue
        first_number, earlier_text = lines.pop() if is_open else (number, "")
        is_open = part.endswith("\\")
        lines.append((first_number, f"{earlier_text} {part.removesuffix(chr(92))}".strip()))
    return lines


def _check_base(image: str, bases: tuple[str, ...], place: str) -> None:
    """Raise RefusedTaskError unless this machine stands for an image."""
    name, _, tag = image.partition(":")
    if name not in bases and image not in bases:
        raise RefusedTaskError(f"{place}: {image}: this machine stands for {', '.join(bases)}")
    version = re.match(r"3\.\d+", tag)
    here = f"3.{sys.version_info.minor}"
    if name == "python" and version is not None and version[0] != here and image not in bases:
        raise RefusedTaskError(f"{place}: {image}: the sandbox has Python {here}")


def _copied_files(context: Path, workdir: str, words: list[str], place: str) -> list[tuple[Path, str]]:
    """Return the files and folders of a COPY. Raises RefusedTaskError."""
    *sources, target = words
    destination = PurePosixPath(workdir) / target
    copies: list[tuple[Path, str]] = []
    for source in sources:
        pattern = source.removeprefix("/").removeprefix("./") or "."
        found = [context] if pattern == "." else sorted(context.glob(pattern))
        inside = [path for path in found if path.resolve().is_relative_to(context.resolve())]
        if not inside:
            raise RefusedTaskError(f"{place}: there is no {source} in environment/")
        for path in inside:
            names_file = path.is_file() and not target.endswith(("/", ".")) and len(inside) == len(sources) == 1
            is_whole = path.is_dir() or names_file
            copies.append((path, str(destination if is_whole else destination / path.name)))
    return copies


def _check_scripts(folder: Path) -> None:
    """Raise RefusedTaskError if the tests load something from a network: without one they would count as failed."""
    script = folder / "tests/test.sh"
    for number, line in enumerate(script.read_text().splitlines(), start=1):
        loader = _LOADERS.search(line.partition("#")[0] + " ")
        if loader is not None:
            reason = f"{loader[1]} needs a network, and the sandbox has none"
            raise RefusedTaskError(f"{folder.name}/tests/test.sh:{number}: {reason}")


def _read_variables(folder: Path, section: str, settings: Mapping[str, Any]) -> dict[str, str]:
    variables = {name: str(text) for name, text in settings.get("env", {}).items()}
    for name, text in variables.items():
        if "${" in text:
            place = f"{folder.name}/task.toml: [{section}.env] {name}"
            raise RefusedTaskError(f"{place}: {text} is a variable of this machine, which the sandbox does not have")
    return variables
