from pathlib import Path

import pytest

from rlctl.config.builtin import RECIPES, recipe_names
from rlctl.preflight.load import load
from tests.unit.cli.conftest import Rlctl


def test_list_names_every_recipe_with_what_it_is(rlctl: Rlctl) -> None:
    lines = rlctl("recipes", "list").out.splitlines()
    assert max(map(len, lines)) <= 80
    first = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert first == ["recipe", *recipe_names()]
    assert all(len(line.split()) > 1 for line in lines if not line.startswith(" "))


def test_show_prints_the_file_as_it_is(rlctl: Rlctl) -> None:
    assert rlctl("recipes", "show", "grpo-tiny").out == (RECIPES / "grpo-tiny.yaml").read_text()


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_a_copied_recipe_is_the_same_run(rlctl: Rlctl, kind: str) -> None:
    done = rlctl("recipes", "copy", f"{kind}-tiny", "mine/sums.yaml")
    assert done.out == f"mine/sums.yaml\nrun it: rlctl train {kind} mine/sums.yaml\n"
    assert load(kind, "mine/sums.yaml", []).config == load(kind, None, []).config


def test_copy_never_overwrites(rlctl: Rlctl, home: Path) -> None:
    assert rlctl("recipes", "copy", "grpo-tiny").out.startswith("grpo-tiny.yaml\n")
    done = rlctl("recipes", "copy", "grpo-tiny")
    assert (done.code, done.err.splitlines()[0]) == (2, "error: grpo-tiny.yaml: exists; name another file")


def test_an_unknown_recipe_gets_the_nearest_name(rlctl: Rlctl) -> None:
    assert "no such recipe; did you mean grpo-tiny?" in rlctl("recipes", "show", "grpo-tny").err
