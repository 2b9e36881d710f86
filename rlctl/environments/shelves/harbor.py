"""Environment of Harbor's task folders: the model has a shell in a sandbox, and the task's tests value the result.

`rlctl env tasks harbor --folder FOLDER` writes the rows: each task that the sandbox can run, and whose own solution
passes its tests. The sandbox is bubblewrap: a task's files are at their own absolute paths, such as `/app`.
"""

import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlctl.environments.outcomes import InfrastructureError
from rlctl.environments.shelves.harbor_folder import HarborTask, RefusedTaskError, read_task
from rlctl.sandbox.base import Limits, Program, Result, Sandbox, SandboxError
from rlctl.sandbox.command import CONTAINER_PLACES, CommandSandbox
from rlctl.sandbox.open_sandbox import open_sandbox

REWARD_TEXT = "logs/verifier/reward.txt"
REWARD_JSON = "logs/verifier/reward.json"
_PATH = "/python/bin:/usr/local/bin:/usr/bin:/bin"
_IN_FOLDER = 'cd "$1" && exec bash -c "$2"'
# Most characters of a command's output that the model reads.
_MAX_OUTPUT = 16_384


class Harbor:
    """One episode in a task's folder.

    bases: further images that this machine stands for. command: words that run a program in a container, in place of
    the sandbox; stop_command: run after each (`rlctl/sandbox/command.py`). image_prefix: begins the name of a task's
    image, unless task.toml names one. command_s: seconds of a command of the model. tests_s: most seconds of the tests.
    Both are below environment.timeout_s. memory_mib: memory of a command, unless the task names its own. reward_key:
    the reward among those of reward.json.
    """

    def __init__(
        self,
        bases: tuple[str, ...] = (),
        command: str | None = None,
        stop_command: str | None = None,
        image_prefix: str = "harbor-",
        command_s: float = 20.0,
        tests_s: float = 25.0,
        memory_mib: int = 512,
        reward_key: str = "reward",
    ) -> None:
        self._bases = tuple(bases)
        self._image_prefix = None if command is None else image_prefix
        self._sandbox = _open_sandbox(command, stop_command)
        self._command_s = command_s
        self._tests_s = tests_s
        self._memory_mib = memory_mib
        self._reward_key = reward_key
        self._folder: Path | None = None

    @classmethod
    def _served_tools(cls, **arguments: Any) -> list[dict[str, Any]]:
        """Open the sandbox before a run. Raises InfrastructureError if this machine has none."""
        cls(**arguments)
        return []

    def reset(self, task: str, **row: Any) -> str | None:
        """Copy the files of a task. task: its folder. Return the instruction, unless the row's prompt has it."""
        try:
            self._task = read_task(Path(task), self._bases, self._image_prefix)
        except (RefusedTaskError, OSError) as error:
            raise InfrastructureError(str(error)) from error
        self._folder = Path(tempfile.mkdtemp(prefix="rlctl-harbor-"))
        for number, root in enumerate(self._task.roots):
            (self._folder / f"root{number}").mkdir()
            if self._task.image:
                self._copy_from_image(root, f"root{number}")
            else:
                _copy_files(self._task, root, self._folder / f"root{number}")
        return None if row.get("prompt") else self._task.instruction

    def bash(self, command: str) -> str:
        """Run a command in the working folder of the task, by bash, without a network. Files stay, processes do not.

        Args:
            command: The command.
        """
        result = self._run_in_folder(command, self._limits(self._command_s))
        text = (result.stdout + result.stderr).decode(errors="replace")
        if len(text) > _MAX_OUTPUT:
            text = f"{text[:_MAX_OUTPUT]}... [cut]"
        if result.exit_code is None:
            return f"{text}\n[ended at the limit: {result.ending}]"
        return text if result.exit_code == 0 else f"{text}\n[exit code {result.exit_code}]"

    def get_reward(self) -> float:
        """Run the tests of the task. Return the reward that they write."""
        assert self._folder is not None
        for name in ("tests", "logs"):
            # The model's commands see the whole folder, and may have put something there.
            _remove(self._folder / name)
        shutil.copytree(self._task.folder / "tests", self._folder / "tests")
        limits = self._limits(min(self._tests_s, self._task.tests_s))
        result = self._run_in_folder("bash /tests/test.sh", limits, with_tests=True)
        return self._read_reward(result)

    def close(self) -> None:
        """Remove the files of the episode."""
        if self._folder is not None:
            _remove(self._folder)

    def _solve(self) -> float:
        """Run the task's own solution, then its tests. Return the reward."""
        assert self._folder is not None
        shutil.copytree(self._task.folder / "solution", self._folder / "solution")
        self._run_in_folder(
            "bash /solution/solve.sh", self._limits(self._task.tests_s), mounts={"/solution": "solution"}
        )
        return self.get_reward()

    def _limits(self, wall_s: float) -> Limits:
        return Limits(wall_s=wall_s, cpu_s=wall_s, memory_mib=self._task.memory_mib or self._memory_mib)

    def _run_in_folder(
        self, command: str, limits: Limits, with_tests: bool = False, mounts: dict[str, str] | None = None
    ) -> Result:
        """Run a command with the files of the episode at their paths. Raises InfrastructureError."""
        task = self._task
        variables = dict(task.variables) if task.image else {"PATH": _PATH, **task.variables}
        all_mounts = {root: f"root{number}" for number, root in enumerate(task.roots)} | (mounts or {})
        if with_tests:
            variables |= task.test_variables
            all_mounts |= {"/tests": "tests", "/logs": "logs"}
        program = Program(
            argv=("bash", "-c", _IN_FOLDER, "bash", task.workdir, command),
            # Makes the folder of the reward, which the program owns. The model's commands own no file of the tests.
            files={"logs/verifier/.made": b""} if with_tests else {},
            outputs=(REWARD_TEXT, REWARD_JSON) if with_tests else (),
            variables=variables,
            folder=self._folder,
            mounts=all_mounts,
            image=task.image,
        )
        return self._run_program(program, limits)

    def _copy_from_image(self, root: str, name: str) -> None:
        """Copy a folder of the task's image into the folder `name` of the episode. Raises InfrastructureError."""
        argv = ("cp", "-a", f"{root}/.", "/rlctl-files/")
        program = Program(argv=argv, folder=self._folder, mounts={"/rlctl-files": name}, image=self._task.image)
        result = self._run_program(program, Limits())
        if not result.has_passed:
            reason = result.stderr.decode(errors="replace").strip()[-200:] or result.ending
            raise InfrastructureError(f"{root} of the image {self._task.image} cannot be copied: {reason}")

    def _run_program(self, program: Program, limits: Limits) -> Result:
        try:
            return self._sandbox.run(program, limits)
        except (SandboxError, ValueError) as error:
            raise InfrastructureError(f"the sandbox of {self._task.folder.name} failed: {error}") from error

    def _read_reward(self, result: Result) -> float:
        """Return the reward in the files of the tests. Raises InfrastructureError: tests without one are no 0."""
        name = self._task.folder.name
        if result.exit_code is None:
            raise InfrastructureError(f"the tests of {name} ended at the limit: {result.ending}")
        try:
            if REWARD_JSON in result.files:
                rewards = json.loads(result.files[REWARD_JSON])
                reward = float(rewards[self._reward_key])
            else:
                reward = float(result.files[REWARD_TEXT])
        except (KeyError, TypeError, ValueError) as error:
            output = (result.stdout + result.stderr).decode(errors="replace").strip()[-200:]
            raise InfrastructureError(f"the tests of {name} wrote no reward ({error!r}): {output}") from error
        if not math.isfinite(reward):
            raise InfrastructureError(f"the tests of {name} wrote a reward that is no finite number")
        return reward


def read_rows(folder: Path, **arguments: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (row, "") for each task below a folder that runs here, or (empty row, reason).

    A task runs if the sandbox stands for its image, and if its own solution is worth more than its untouched files.
    arguments: those of `Harbor`.
    """
    for path in sorted(path.parent for path in folder.glob("**/instruction.md")):
        try:
            row, refusal = _try_task(path.resolve(), arguments)
        except (OSError, InfrastructureError) as error:
            row, refusal = {}, str(error)
        yield row, refusal


def _try_task(folder: Path, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the row of a task, or an empty one and the reason why the tests cannot value it here.

    Raises InfrastructureError.
    """
    instruction = ""
    rewards: list[float] = []
    for is_solved in (False, True):
        episode = Harbor(**arguments)
        try:
            instruction = episode.reset(str(folder)) or ""
            if not (folder / "solution/solve.sh").is_file():
                break
            rewards.append(episode._solve() if is_solved else episode.get_reward())
        finally:
            episode.close()
    if rewards and rewards[1] <= rewards[0]:
        values = f"its own solution is worth {rewards[1]:g}, and its untouched files {rewards[0]:g}"
        return {}, f"{folder.name}: {values}"
    return {"prompt": instruction, "task": str(folder)}, ""


@cache
def _open_sandbox(command: str | None, stop_command: str | None) -> Sandbox:
    """Return the sandbox bwrap, or that of a command. Raises InfrastructureError."""
    try:
        return open_sandbox("bwrap") if command is None else CommandSandbox(command, stop_command, CONTAINER_PLACES)
    except SandboxError as error:
        needed = "the sandbox bwrap" if command is None else "a command"
        raise InfrastructureError(f"harbor needs {needed}: {error}") from error


def _copy_files(task: HarborTask, root: str, folder: Path) -> None:
    """Copy the files of a task that belong below `root` into a folder of this machine."""
    for source, target in task.copies:
        if not Path(target).is_relative_to(root):
            continue
        destination = folder / Path(target).relative_to(root)
        destination.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            ignored = shutil.ignore_patterns("Dockerfile", ".dockerignore")
            shutil.copytree(source, destination, dirs_exist_ok=True, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(source, destination)
    workdir = Path(task.workdir)
    if workdir.is_relative_to(root):
        (folder / workdir.relative_to(root)).mkdir(parents=True, exist_ok=True)


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder, whoever owns it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
