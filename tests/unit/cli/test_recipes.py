from pathlib import Path

import pytest
import yaml

from rlctl.config.builtin import ALGORITHMS, RECIPES, algorithm_names, recipe_names
from rlctl.preflight.load import load
from tests.unit.cli.conftest import Rlctl


def test_list_names_every_recipe_with_what_it_is(rlctl: Rlctl) -> None:
    lines = rlctl("recipes", "list").out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if line and not line.startswith(" ")]
    names = [row[0] for row in rows]
    algorithms = [f"algorithms/{name}" for name in algorithm_names()]
    assert names[: 2 + len(recipe_names() + algorithms)] == ["recipe", *recipe_names(), "algorithm", *algorithms]
    assert all(len(row) > 1 for row in rows)
    assert "defaults: [my.yaml, algorithms/NAME]" in " ".join(lines)


@pytest.mark.parametrize("name", algorithm_names())
def test_an_algorithm_is_a_few_keys_of_the_grpo_section_and_a_tiny_recipe_is_little_more(name: str) -> None:
    text = (ALGORITHMS / f"{name}.yaml").read_text()
    assert list(yaml.safe_load(text)) == ["grpo"] and len(text.splitlines()) <= 12
    recipe = "grpo-tiny" if name == "grpo" else f"{name}-tiny"
    recipe_text = (RECIPES / f"{recipe}.yaml").read_text()
    if name != "grpo":
        assert yaml.safe_load(recipe_text)["defaults"] == ["grpo-tiny", f"algorithms/{name}"]
        assert len(recipe_text.splitlines()) <= 12
    assert load("grpo", recipe, []).config.grpo.num_steps <= 240  # type: ignore[union-attr]


def test_the_algorithm_grpo_is_what_a_recipe_does_unless_told_otherwise(home: Path) -> None:
    (home / "both.yaml").write_text("defaults: [grpo-tiny, algorithms/grpo]")
    assert load("grpo", "both.yaml", []).config == load("grpo", "grpo-tiny", []).config


def test_a_copied_algorithm_says_where_it_goes(rlctl: Rlctl) -> None:
    done = rlctl("recipes", "copy", "algorithms/rloo", "mine.yaml")
    assert done.out.startswith("mine.yaml\nAn algorithm goes over a recipe: ")


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
