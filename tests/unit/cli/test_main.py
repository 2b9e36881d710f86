import json
import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

import rlctl as rlctl_package
from rlctl.cli import main
from rlctl.cluster.state import ClusterError
from rlctl.config.errors import UserError
from rlctl.data.files import DataError
from tests.unit.cli.conftest import Rlctl
from tests.unit.dashboard.synthetic import write_run

COMMAND = [sys.executable, "-m", "rlctl"]
SOURCE = Path(rlctl_package.__file__).parents[1]
VERSION = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]["version"]


def list_loaded_modules(code: str) -> set[str]:
    """Run a program. Return the modules that are loaded at its end."""
    program = f"{code}\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_loads_hardly_more_than_the_library_that_shows_it() -> None:
    """Bound the imports of `rlctl --help`, which take all of its 0.45 s on two cores."""
    library = list_loaded_modules("import sys, typer, typer.rich_utils, rich.markdown")
    main_program = "import sys\nsys.argv = ['rlctl', '--help']\nfrom rlctl.cli.main import main"
    added = list_loaded_modules(f"{main_program}\ntry:\n    main()\nexcept SystemExit:\n    pass") - library
    packages = {name.partition(".")[0] for name in added} - set(sys.stdlib_module_names)
    assert packages <= {"rlctl", "typer", "rich"}
    assert len(added) < 60


def test_no_command_imports_what_is_slow_before_it_needs_it() -> None:
    slow = "('torch', 'ray', 'vllm', 'omegaconf', 'psutil')"
    code = f"import sys, rlctl.cli.main; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_command_has_help_with_an_example(rlctl: Rlctl) -> None:
    commands = ["train grpo", "train sft", "config show", "config check", "config diff", "doctor", "eval", "export"]
    commands += ["loss check", "recipes list", "recipes show", "recipes copy", "runs list", "runs show", "runs dash"]
    commands += ["env check", "env tasks", "examples list", "examples copy"]
    for command in commands:
        done = rlctl(*command.split(), "--help")
        assert done.code == 0
        assert f"rlctl {command}" in done.out.split("Example")[1], command


def test_version(rlctl: Rlctl) -> None:
    assert rlctl("--version").out == f"rlctl {VERSION}\n"


@pytest.mark.parametrize(("error", "code"), [(DataError("no rows"), 2), (ClusterError("no answer"), 1)])
def test_an_error_of_the_user_that_no_command_expects_is_one_line(
    error: UserError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(SystemExit) as exit_info:
        main.answer()
    assert exit_info.value.code == code
    assert capsys.readouterr().err.splitlines()[0] == f"error: {error}"


def test_a_source_tree_that_pip_knows_nothing_of_runs_as_a_module(home: Path) -> None:
    """Run with a folder instead of site-packages, which has all packages except rlctl's metadata and the engines."""
    packages = home / "packages"
    packages.mkdir()
    left_out = ("rlctl", "_rlctl", "torch", "vllm", "transformers", "__pycache__")
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if path.suffix != ".pth" and not path.name.startswith(left_out):
            (packages / path.name).symlink_to(path)
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}:{packages}"}

    def run_from_source(*words: str) -> str:
        command = [sys.executable, "-S", "-m", "rlctl", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout

    assert run_from_source("--version") == f"rlctl {VERSION}\n"
    checks = {check["name"]: check for check in json.loads(run_from_source("doctor", "--json"))}
    assert checks["rlctl"]["found"] == f"{VERSION}, from a source tree"
    # Requirements are read from pyproject.toml: torch is pinned, Ray has a range.
    assert checks["torch"]["found"] == "not installed" and checks["ray"]["state"] == "ok"


def test_an_unknown_command_or_option_is_bad_input(rlctl: Rlctl) -> None:
    assert rlctl("trian").code == 2
    assert rlctl("train", "grpo", "--fast").code == 2


def test_problems_go_to_stderr_one_line_each_uncoloured_in_a_pipe(home: Path) -> None:
    name = "/".join(["long"] * 40)
    done = subprocess.run(
        [*COMMAND, "train", "grpo", "grpo.recipe.yaml", "grpo.num_step=3", f"run.name={name}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "40"},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "error: override 1: grpo.num_step=3: unknown key; did you mean num_steps?",
        f"error: override 2: run.name={name}: must be letters, digits and any of . _ - + =, not '{name}'",
        "2 problems; nothing was started",
    ]


def test_a_reader_that_stops_early_gets_no_traceback(home: Path) -> None:
    shell = f"{sys.executable} -m rlctl.cli.main config show grpo.recipe.yaml | head -1"
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        # torch is the first package of the process that derives facts; others take it 3 s to find.
        ("torch", ("train", "grpo", "grpo.recipe.yaml", "--dry-run")),
        ("transformers", ("data", "preview")),
    ],
)
def test_without_the_engines_packages_a_command_says_what_to_install(
    home: Path, missing: str, command: tuple[str, ...]
) -> None:
    (home / "absent").mkdir()
    absent = f"raise ModuleNotFoundError(\"No module named '{missing}'\", name='{missing}')\n"
    (home / f"absent/{missing}.py").write_text(absent)
    # The package is missing in the processes that a command starts too. The empty cache knows no model.
    environment = {**os.environ, "PYTHONPATH": f"{home}/absent:{SOURCE}", "XDG_CACHE_HOME": str(home / "cache")}
    done = subprocess.run([*COMMAND, *command], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    error, count = done.stderr.splitlines()
    assert error.startswith(f"error: {missing} is not installed: rlctl doctor --fix installs")
    assert count == "1 problem; nothing was started"


ENDING = """
import atexit, sys
from rlctl.cli import main as command_line

def app():
    atexit.register(print, "handlers are called")
    sys.stdout.write("and what was written is there; ")
    sys.exit(130)

class Large:
    def __del__(self):
        print("it is not taken apart")

kept = Large()
command_line.app = app
command_line.main()
"""


def test_a_process_ends_with_its_code_after_its_handlers_and_frees_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")
    assert done.stdout == "and what was written is there; handlers are called\n"


def test_output_that_cannot_be_written_is_one_line_and_no_traceback() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


def test_a_terminal_without_utf8_gets_question_marks_and_no_traceback(tmp_path: Path) -> None:
    write_run(tmp_path, "a", ended="done")
    command = [*COMMAND, "runs", "show", "a", "--dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "POSIX"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0 and "? 80.0%" in done.stdout
