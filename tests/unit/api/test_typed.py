"""mypy finds the types of rlctl when it checks a user's program."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import rlctl

PROGRAM = """\
import rlctl

run = rlctl.train("grpo-tiny", ["grpo.num_steps=2"])
reveal_type(run)
reveal_type(run.metrics.column("reward/mean"))
rlctl.train(3)
"""


def install_sources(folder: Path) -> Path:
    """Make a Python environment with rlctl installed as by a wheel. Return the path of its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    paths = sysconfig.get_paths("venv", {"base": str(folder), "platbase": str(folder)})
    (Path(paths["purelib"]) / "rlctl").symlink_to(Path(rlctl.__file__).parent)
    return Path(paths["scripts"]) / "python"


def test_a_program_outside_gets_types_and_errors(tmp_path: Path) -> None:
    interpreter = install_sources(tmp_path / "environment")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")]
    command += ["--python-executable", str(interpreter), program.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    wrong_type = 'Argument 1 to "train" has incompatible type "int"; expected "str | Path | None"  [arg-type]'
    assert done.stdout.splitlines() == [
        'program.py:4: note: Revealed type is "rlctl.api.run_records.RecordedRun"',
        'program.py:5: note: Revealed type is "list[float]"',
        f"program.py:6: error: {wrong_type}",
        "Found 1 error in 1 file (checked 1 source file)",
    ]
