from pathlib import Path

import pytest
import yaml

from rlctl.config.builtin import RECIPES
from rlctl.config.provenance import dump
from rlctl.config.recorded_origins import recorded_origins, with_origins
from rlctl.config.schema import GrpoConfig
from rlctl.preflight.engines.sections import VllmSection
from rlctl.preflight.load import Composed, load


def rerun(composed: Composed, path: Path) -> Composed:
    path.write_text(composed.to_yaml())
    return load(None, str(path), [])


def test_the_resolved_config_runs_again_as_it_is_from_anywhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["rewards=[{name: regex, pattern: 'is ([0-9]+)'}, {name: mine.py:brevity}]", r"run.name=off"]
    overrides += [
        "generation.stop_token_ids=[1, 2]",
        r"data.system_prompt='use \${x}: ok'",
        "run.seed=${grpo.num_steps}",
    ]
    first = load("grpo", "grpo.recipe.yaml", overrides)
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    second = rerun(first, home / "elsewhere/resolved.yaml")
    assert second.config == first.config
    assert second.written() == first.written()
    assert first.config.data.system_prompt == "use ${x}: ok"
    assert first.config.run.seed == 100


def test_the_resolved_config_says_where_each_value_was_written_also_after_a_resume(home: Path) -> None:
    first = load("grpo", "grpo.recipe.yaml", ["run.seed=5", "data.system_prompt='say: # x\\nend'"])
    text = first.to_yaml()
    assert "\n  seed: 5  # from override 1: run.seed=5\n" in text and "  deadline_s: 600.0\n" in text
    (home / "config.yaml").write_text(text)
    assert recorded_origins(home / "config.yaml") == {
        key: str(origin) for key, origin in first.origins.items() if not str(origin).startswith("configs/")
    }
    assert load(None, "config.yaml", [], resume=True).to_yaml() == text
    resumed = load(None, "config.yaml", ["grpo.num_steps=200"], resume=True).to_yaml()
    assert "  num_steps: 200  # from override 1: grpo.num_steps=200\n" in resumed
    assert "# from override 1: run.s" in resumed


def test_an_origin_with_any_characters_is_a_comment_that_yaml_reads(home: Path) -> None:
    origins = {"a.b": "override 1: a.b=\x1b[31m\nc: d # \u2028é", "c.0": "x.yaml:3", "d": "y", "e.f": "z.yaml:1"}
    values = {"a": {"b": "x: 'y' # z"}, "c": [1, 2], "d": {}, "e": {"f": None}}
    text = with_origins(dump(values), origins)
    (home / "it.yaml").write_text(text)
    assert yaml.safe_load(text) == values
    read_origins = recorded_origins(home / "it.yaml")
    assert read_origins == origins | {"a.b": "override 1: a.b=?[31m c: d # é"}
    (home / "it.yaml").write_text("a: [")
    assert recorded_origins(home / "it.yaml") == {} == recorded_origins(home / "none.yaml")


def test_values_have_the_types_of_the_schema(home: Path) -> None:
    config = load("grpo", "grpo.recipe.yaml", ["run.deadline_s=5", "trainer.optimizer.betas=[0, 0.5]"]).config
    assert isinstance(config, GrpoConfig)
    assert isinstance(config.run.deadline_s, float)
    assert config.trainer.optimizer.betas == [0.0, 0.5]
    assert config.rewards[0].weight == 1.0
    assert isinstance(config.generation.engine, VllmSection)
    assert config.generation.engine.enforce_eager is None


def test_paths_are_found_beside_the_recipe_before_the_current_directory(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = home / "other"
    (other / "model").mkdir(parents=True)
    monkeypatch.chdir(other)
    config = load("grpo", "../grpo.recipe.yaml", []).config
    assert config.model.path == str(home / "model")
    assert config.data.train.path == str(home / "train.jsonl")


def test_a_path_in_an_override_is_found_in_the_current_directory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = home / "other"
    other.mkdir()
    (other / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    monkeypatch.chdir(other)
    config = load("grpo", "../grpo.recipe.yaml", ["data.train.path=train.jsonl"]).config
    assert config.data.train.path == str(other / "train.jsonl")


def test_a_hub_name_stays_unless_its_first_part_is_a_folder_here(home: Path) -> None:
    assert load("grpo", "grpo.recipe.yaml", ["model.path=Qwen/Qwen3-0.6B"]).config.model.path == "Qwen/Qwen3-0.6B"
    (home / "Qwen").mkdir()
    with pytest.raises(Exception, match=r"no file or folder Qwen/Qwen3-0\.6B"):
        load("grpo", "grpo.recipe.yaml", ["model.path=Qwen/Qwen3-0.6B"])


def test_a_hub_model_in_the_local_cache_is_checked_like_a_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = home / "hub/models--acme--small"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("abc\n")
    (cached / "snapshots").mkdir()
    (home / "model").rename(cached / "snapshots/abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    with pytest.raises(Exception, match="at most 256, the model's max_position_embeddings"):
        load("grpo", "grpo.recipe.yaml", ["model.path=acme/small", "model.max_length=999"])


def test_origins_name_every_value_of_the_config(home: Path) -> None:
    composed = load("grpo", "grpo.recipe.yaml", [])
    assert str(composed.origins["grpo.loss.clip_low"]).startswith("configs/loss.yaml:")
    assert composed.recipe == home / "grpo.recipe.yaml"


def test_what_comes_from_the_environment_travels_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCTL_TEST_TOKEN", "secret")
    recipe = tmp_path / "my.yaml"
    recipe.write_text("defaults: sft-tiny.yaml\ndata: {system_prompt: 'say ${oc.env:RLCTL_TEST_TOKEN}'}\n")
    composed = load("sft", str(recipe), [])
    assert composed.config.data.system_prompt == "say secret"
    assert composed.variables() == ["RLCTL_TEST_TOKEN"]
    written = composed.written()
    assert written["data"].pop("system_prompt") == "say ${oc.env:RLCTL_TEST_TOKEN}"
    values = composed.values()
    del values["data"]["system_prompt"]
    assert written == values


def test_a_model_that_is_not_on_this_machine_is_said_to_be_unchecked() -> None:
    def notes_on_model(path: str) -> list[str]:
        return [note for note in load("grpo", None, [f"model.path={path}"]).notes if "not checked" in note]

    message = "not on this machine, its sizes are not known, and not checked; rlctl train fetches it"
    assert notes_on_model("nobody/nothing") == [f"model.path=nobody/nothing: {message}"]
    assert notes_on_model(str(RECIPES / "tiny/qwen3-tiny")) == []
