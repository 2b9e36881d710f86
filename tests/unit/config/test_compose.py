from pathlib import Path

import pytest

from rlctl.config.builtin import find_recipe
from rlctl.config.compose import compose
from rlctl.config.errors import ConfigError
from rlctl.config.provenance import ConfigNode, leaves, node_at, plain
from rlctl.config.schema import GrpoConfig
from rlctl.preflight.load import load


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path.resolve()


def origin_of(root: ConfigNode, key: str) -> str:
    return str(dict(leaves(root))[key].origin)


def collect_problem_lines(path: Path, overrides: list[str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(path, overrides or [])
    return str(caught.value).splitlines()


def test_a_file_wins_over_its_parents_and_the_right_parent_over_the_left(home: Path) -> None:
    write(home / "a.yaml", "x: {p: 1, q: 1, r: 1}\n")
    write(home / "b.yaml", "x: {q: 2, r: 2}\n")
    path = write(home / "c.yaml", "defaults: [a, b.yaml]\nx:\n  r: 3\n")
    assert plain(compose(path, [])) == {"x": {"p": 1, "q": 2, "r": 3}}


def compose_advantage(path: Path, *overrides: str) -> tuple[object, str | None]:
    """Return the section of the advantage, and the note of its name."""
    section = node_at(compose(path, list(overrides)), ["grpo", "advantage"])
    assert section is not None
    name = node_at(section, ["name"])
    assert name is not None
    return plain(section), name.note


LEAVE_ONE_OUT = {"name": "leave_one_out", "normalize_std": False}


def test_a_section_that_names_another_loss_or_advantage_begins_anew_and_says_what_it_left_out(home: Path) -> None:
    parent = write(home / "a.yaml", "defaults: grpo.yaml\ngrpo:\n  advantage: {normalize_std: true}\n")
    assert compose_advantage(parent) == ({"name": "group_mean", "normalize_std": True}, None)
    note = "left out, since they were for group_mean: grpo.advantage.normalize_std (a.yaml:3)"
    child = write(home / "b.yaml", "defaults: a.yaml\ngrpo: {advantage: leave_one_out}\n")
    assert compose_advantage(child) == (LEAVE_ONE_OUT, note)
    assert compose_advantage(parent, "grpo.advantage=leave_one_out") == (LEAVE_ONE_OUT, note)
    assert compose_advantage(child, "grpo.advantage.name=leave_one_out") == (LEAVE_ONE_OUT, note)


@pytest.mark.parametrize("naming", ["grpo.advantage=leave_one_out", "grpo.advantage.name=leave_one_out"])
def test_the_order_of_overrides_does_not_matter_to_a_section_that_begins_anew(home: Path, naming: str) -> None:
    recipe = home / "grpo.recipe.yaml"
    normalizing = "grpo.advantage.normalize_std=true"
    expected = ({**LEAVE_ONE_OUT, "normalize_std": True}, None)
    assert compose_advantage(recipe, naming, normalizing) == expected
    assert compose_advantage(recipe, normalizing, naming) == expected


def test_a_list_replaces_the_list_it_overrides(home: Path) -> None:
    write(home / "a.yaml", "x: [1, 2, 3]\n")
    path = write(home / "b.yaml", "defaults: a\nx: [4]\n")
    assert plain(compose(path, [])) == {"x": [4]}


def test_a_parent_beside_the_file_wins_over_a_shipped_one_of_the_same_name(home: Path) -> None:
    write(home / "base.yaml", "mine: true\n")
    path = write(home / "b.yaml", "defaults: base.yaml\n")
    assert plain(compose(path, [])) == {"mine": True}


@pytest.mark.parametrize("name", ["sft.yaml", "sft"])
def test_a_recipe_may_have_the_name_of_the_shipped_one_that_it_inherits(home: Path, name: str) -> None:
    path = write(home / "sft.yaml", f"defaults: {name}\nsft: {{batch_size: 7}}\n")
    assert find_recipe(name) == path
    root = compose(path, [])
    assert origin_of(root, "sft.batch_size") == "sft.yaml:2"
    assert origin_of(root, "sft.num_steps").startswith("configs/sft.yaml:")
    # Other files in its folder mean this parent.
    other_path = write(home / "x.yaml", f"defaults: {name}\n")
    assert origin_of(compose(other_path, []), "sft.batch_size") == "sft.yaml:2"


def test_files_that_inherit_from_each_other_are_refused(home: Path) -> None:
    write(home / "grpo.yaml", "defaults: x\n")
    path = write(home / "x.yaml", "defaults: grpo.yaml\n")
    assert collect_problem_lines(path) == ["grpo.yaml:1: defaults: x inherits from itself"]


def test_every_value_knows_the_line_or_the_override_that_wrote_it(home: Path) -> None:
    root = compose(home / "grpo.recipe.yaml", ["run.seed=3", "trainer.optimizer.lr=1e-4"])
    assert origin_of(root, "model.path") == "grpo.recipe.yaml:3"
    assert origin_of(root, "generation.max_new_tokens") == "grpo.recipe.yaml:11"
    assert origin_of(root, "rewards.0.name") == "grpo.recipe.yaml:9"
    assert origin_of(root, "rewards.0.timeout_s") == "configs/reward.yaml:15"
    assert origin_of(root, "run.dir") == "configs/base.yaml:4"
    assert origin_of(root, "run.seed") == "override 1: run.seed=3"
    assert origin_of(root, "trainer.optimizer.lr") == "override 2: trainer.optimizer.lr=1e-4"


def test_overrides_are_yaml(home: Path) -> None:
    path = write(home / "x.yaml", "a: 0\n")
    values = {
        "a=1": 1,
        "a=1e-6": 1e-6,
        "a=null": None,
        "a=": None,
        "a=true": True,
        "a=off": "off",
        "a=[1, x]": [1, "x"],
        "a={b: 1}": {"b": 1},
        "a='1'": "1",
        "a=b=c": "b=c",
        "a=[0-9]+": "[0-9]+",
        "a.b.c=1": {"b": {"c": 1}},
    }
    for override, expected_value in values.items():
        assert plain(compose(path, [override])) == {"a": expected_value}, override


def test_an_override_reaches_into_a_list(home: Path) -> None:
    overrides = ["rewards=[exact, {name: regex}]", "rewards.1.pattern=[0-9]", "rewards.0={name: math_verify}"]
    rewards = plain(compose(home / "grpo.recipe.yaml", overrides))["rewards"]
    unset = {"correct_at": None, "pattern": None}
    assert rewards[0] == {"name": "math_verify", "weight": 1.0, "timeout_s": 5.0, "concurrency": 64, **unset}
    assert rewards[1]["name"] == "regex"


def test_a_section_given_whole_keeps_the_keys_it_leaves_out(home: Path) -> None:
    path = write(home / "x.yaml", "a: {b: 1, c: 2}\n")
    assert plain(compose(path, ["a={c: 3}"])) == {"a": {"b": 1, "c": 3}}


def test_interpolation_copies_the_final_value_and_keeps_its_type(home: Path) -> None:
    path = write(home / "x.yaml", "a: 1\nb: ${a}\nc: n-${a}\nd: ${e}\ne: [1, 2]\n")
    assert plain(compose(path, ["a=7"])) == {"a": 7, "b": 7, "c": "n-7", "d": [1, 2], "e": [1, 2]}


def test_a_variable_of_the_environment_is_text_and_may_have_a_default(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDS", "8")
    monkeypatch.delenv("NIX", raising=False)
    text = "a: ${oc.env:SHARDS}\nb: 'x-${oc.env: SHARDS }'\nc: ${oc.env:NIX, 'y z'}\nd: ${oc.env:NIX,null}\n"
    root = compose(write(home / "x.yaml", text + "e: ${oc.env:NIX,${f}}\nf: 1\ng: ${b}\n"), [])
    assert plain(root) == {"a": "8", "b": "x-8", "c": "y z", "d": None, "e": "1", "f": 1, "g": "x-8"}
    assert {key for key, node in leaves(root) if node.secret} == {"a", "b", "c", "d", "e", "g"}
    assert collect_problem_lines(write(home / "x.yaml", "a: ${oc.env:NIX}\n")) == [
        "x.yaml:1: a: ${oc.env:NIX}: the environment has no variable NIX; set it, or write a default: "
        "${oc.env:NIX,DEFAULT}"
    ]


def test_a_backslash_keeps_a_reference_from_being_one(home: Path) -> None:
    path = write(home / "x.yaml", "a: 1\nb: \\${a}\nc: n-\\\\${a}\nd: \\\\\\${a}-${a}\n")
    assert plain(compose(path, [])) == {"a": 1, "b": "${a}", "c": "n-\\1", "d": "\\${a}-1"}


def test_a_section_that_is_referred_to_keeps_what_reads_the_environment_a_secret(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")
    root = compose(write(home / "x.yaml", "a: {b: '${oc.env:TOKEN}', c: 1}\nd: ${a}\ne: x-${d}\n"), [])
    assert {key: node.secret for key, node in leaves(root) if node.secret} == {
        "a.b": "${oc.env:TOKEN}",
        "d.b": "${oc.env:TOKEN}",
        "e": "x-${d}",
    }


def test_interpolations_that_lead_nowhere_are_all_reported(home: Path) -> None:
    path = write(home / "x.yaml", "a: ${nix}\nb: 1\nc: ${b.d.e}\n")
    problem_lines = collect_problem_lines(path)
    assert [line.split(": ")[0] for line in problem_lines] == ["x.yaml:1", "x.yaml:3"]
    assert problem_lines[0] == "x.yaml:1: a: ${nix}: there is no key 'nix'"


def test_malformed_overrides_are_all_reported(home: Path) -> None:
    assert collect_problem_lines(home / "grpo.recipe.yaml", ["a", "+b=1", "rewards.3.weight=1"]) == [
        "override 1: a: must be key=value, for example trainer.optimizer.lr=1e-6",
        "override 2: +b=1: no prefix is needed: b=1",
        "override 3: rewards.3.weight=1: no list entry 3; there are 0 to 0",
    ]


def test_overrides_that_a_command_adds_are_neither_counted_nor_named(home: Path) -> None:
    path = write(home / "a.yaml", "x: {p: 1, q: 1}\n")
    root = compose(path, ["x.q=3"], command_overrides=["x.p=2", "x.q=2"])
    assert plain(root) == {"x": {"p": 2, "q": 3}}
    assert [origin_of(root, key) for key in ("x.p", "x.q")] == ["", "override 1: x.q=3"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: 2\na: 3\n", "x.yaml:3: a: written twice; first in line 1"),
        ("a: 1\nb: [1\n", "x.yaml:2: not YAML: a [ that is opened here is not closed, or a comma is missing behind it"),
        ("a: {b: 1\nc: {d: 1}\n", "x.yaml:1: not YAML: a { that is opened here is not closed, or a comma is missing "
         "behind it"),
        ("a:\n\tb: 1\n", "x.yaml:2: not YAML: a tab; indent with spaces"),
        ("a: @b\n", "x.yaml:1: not YAML: text with @ needs quotes"),
        ('a: 1\nb: "c\nd: 1\n', "x.yaml:2: not YAML: a quote that is opened here is not closed"),
        ("a: b: c\n",
         "x.yaml:1: not YAML: a second `: `, or above it a line that is no `key: value`; put text with `: ` "
         "in quotes"),
        ("a:\n  b: 1\n c: 2\n",
         "x.yaml:3: not YAML: this line is no `key: value`, or is not indented like those of its "
         "section, which begins in line 1"),
        ("a: &x {b: 1}\nc: {<<: *x}\n",
         "x.yaml:2: no merge keys (<<) are read; inherit a file with `defaults:`, or name "
         "a value with ${other.key}"),
        ('a: "\\d+"\n', "x.yaml:1: not YAML: a backslash in double quotes begins an escape: double it, or write single "
         "quotes"),
        ("a: 'b' c\n",
         "x.yaml:1: not YAML: this line is no `key: value`, or is not indented like those of its section"),
        ("a: {b: 1,000}\n", "x.yaml:1: b: a number has no commas; write 1000"),
        ("- a\n", "x.yaml:1: a config is a mapping of `key: value` lines"),
        ("a: !!python/name:os.system x\n", "x.yaml:1: tag tag:yaml.org,2002:python/name:os.system is not allowed: "
         "write plain values"),
        ("defaults: grop.yaml\n", "x.yaml:1: defaults: no file grop.yaml; did you mean grpo?"),
        ("a: 1\ndefaults:\n  - x\n", "x.yaml:3: defaults: x inherits from itself"),
        ("defaults: 3\n", "x.yaml:1: defaults: must be a file name or a list of them"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_composed_is_one_line(home: Path, text: str, expected: str) -> None:
    assert collect_problem_lines(write(home / "x.yaml", text)) == [expected]


def test_a_recipe_is_a_path_a_shipped_name_or_a_run_directory(home: Path) -> None:
    (home / "run").mkdir()
    (home / "run/config.yaml").write_text("kind: grpo\n")
    assert find_recipe("grpo.recipe").name == "grpo.recipe.yaml"
    assert find_recipe("grpo-tiny").parent.name == "recipes"
    assert find_recipe("run") == home / "run/config.yaml"
    with pytest.raises(ConfigError, match=r"grpo-tny: no such recipe or file; did you mean grpo-tiny\?"):
        find_recipe("grpo-tny")


def test_null_undoes_an_inherited_section_in_a_file_and_in_an_override(home: Path) -> None:
    played = "environment: {name: guess, max_turns: 3}\ngrpo: {loss: {name: gspo}, overlong: {mask: true}}\n"
    (home / "played.yaml").write_text("defaults: grpo.recipe.yaml\n" + played)
    (home / "alone.yaml").write_text("defaults: played.yaml\nenvironment: null\ngrpo: {overlong: null, loss: null}\n")
    (home / "again.yaml").write_text(
        "defaults: alone.yaml\nenvironment: {name: maze}\ndata: {max_prompt_length: null}\n"
    )
    default_config = load("grpo", "grpo.recipe.yaml", []).config
    alone = load("grpo", "alone.yaml", [])
    assert alone.config == default_config
    assert str(alone.origins["environment.name"]).startswith("configs/grpo.yaml:")
    undoing = ["environment=null", "grpo.overlong=null", "grpo.loss=null"]
    assert load("grpo", "played.yaml", undoing).config == default_config
    replacing = ["environment=null", "environment.name=maze", "data.max_prompt_length=null"]
    for config in (load("grpo", "again.yaml", []).config, load("grpo", "played.yaml", replacing).config):
        assert isinstance(config, GrpoConfig)
        assert (config.environment.name, config.environment.max_turns) == ("maze", 8)
