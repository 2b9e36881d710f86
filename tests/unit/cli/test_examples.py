"""`rlctl examples` lists and copies examples, and refuses mistakes. A wheel contains the examples' folders."""

import shlex
import tomllib
from pathlib import Path

from rlctl.config.builtin import CONFIGS, EXAMPLES, RECIPES, example_names
from rlctl.preflight.load import load
from tests.unit.cli.conftest import Rlctl

ROOT = Path(__file__).parents[3]


def test_list_names_every_example_with_what_it_shows(rlctl: Rlctl) -> None:
    lines = rlctl("examples", "list").out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if line and not line.startswith(" ")]
    assert [row[0] for row in rows] == ["example", *example_names()]
    assert all(len(row) > 3 for row in rows)


def test_a_copied_example_is_the_folder_and_its_commands_are_printed(rlctl: Rlctl, home: Path) -> None:
    done = rlctl("examples", "copy", "loss", "my loss")
    assert {path.name for path in (home / "my loss").iterdir()} == {"README.md", "recipe.yaml", "topr.py"}
    enter, check, train = (shlex.split(line, comments=True) for line in done.out.splitlines())
    assert enter == ["cd", "my loss"]
    assert rlctl(*check[1:-2], "my loss/topr.py:Topr", check[-1]).code == 0
    assert train == ["rlctl", "train", "grpo", "recipe.yaml"]
    config = load("grpo", "my loss/recipe.yaml", []).config
    assert config.grpo.loss.name == str(home / "my loss/topr.py:Topr")  # type: ignore[union-attr]


def test_a_copy_leaves_runs_out_and_never_overwrites(rlctl: Rlctl, home: Path) -> None:
    assert rlctl("examples", "copy", "reward").out.startswith("cd reward\n")
    done = rlctl("examples", "copy", "reward")
    assert (done.code, done.err.splitlines()[0]) == (2, "error: reward: exists; name another folder")
    done = rlctl("examples", "copy", "reward", "/proc/mine")
    assert done.code == 2 and done.err.startswith("error: /proc/mine: cannot be written: ")


def test_an_unknown_example_gets_the_nearest_name(rlctl: Rlctl) -> None:
    assert "no such example; did you mean tracker?" in rlctl("examples", "copy", "traker").err
    assert "no such example; see `rlctl examples list`" in rlctl("examples", "copy", "../recipes").err


def test_a_wheel_carries_every_folder_that_the_program_looks_for() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    folders = {ROOT / source: ROOT / "rlctl" / "share" / source for source in wheel["force-include"]}
    assert set(folders) == {CONFIGS, RECIPES, EXAMPLES}
    assert {str(target.relative_to(ROOT)) for target in folders.values()} == set(wheel["force-include"].values())
