import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from rlctl.config.schema import RunConfig
from rlctl.data.load_data import RowReader
from rlctl.launch import assembly, prepare
from rlctl.launch.runtime import Runtime
from rlctl.preflight import machine
from rlctl.preflight.load import load
from rlctl.preflight.settled import Settled
from rlctl.run.checkpoints import Checkpoints
from rlctl.run.fingerprint import made_with
from tests.unit.cli.conftest import Rlctl, write_run
from tests.unit.folders import MODEL

# The config, the directory to resume, and True for a probe.
Launch = tuple[RunConfig, Path | None, bool]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Return a list of the launches. Nothing is launched, since a run takes minutes."""
    launches: list[Launch] = []

    def record_launch(
        settled: Settled,
        resolved: str,
        runtime: Runtime,
        resume: Path | None,
        probe_only: bool,
        reader: RowReader,
        on_directory: object,
    ) -> int:
        launches.append((settled.config, resume, probe_only))
        return 130

    monkeypatch.setattr(assembly, "launch", record_launch)
    return launches


def test_a_model_that_the_engine_has_no_kernel_for_starts_nothing(
    rlctl: Rlctl, launches: list[Launch], home: Path
) -> None:
    (home / "model/config.json").write_text(json.dumps({**MODEL, "head_dim": 24}))
    for words in ([], ["--dry-run"]):
        done = rlctl("train", "grpo", "grpo.recipe.yaml", *words)
        assert (done.code, launches) == (2, []) and not (home / "runs").exists()
        assert "model.path: " in done.err and "model has attention heads of size 24; on a CPU vLLM " in done.err


def test_the_plan_fits_80_columns_and_starts_nothing(rlctl: Rlctl, launches: list[Launch]) -> None:
    done = rlctl("train", "grpo", "grpo.recipe.yaml", "trainer.num_ranks=2", "--dry-run")
    assert (done.code, done.err, launches) == (0, "", [])
    assert max(map(len, done.out.splitlines())) <= 80
    text = " ".join(done.out.split())
    assert "2 trainer ranks and 1 engine share the cores" in text
    assert "32 prompts x 8 = 256 rollouts = 256 an update x 1 update, 128 a rank" in text
    assert "at most 128 a sequence, 32,768 a step" in text
    assert "engines: key-value cache 256.0 MiB" in text


def test_a_compiled_graph_is_asked_for_by_an_option(rlctl: Rlctl, launches: list[Launch], home: Path) -> None:
    assert rlctl("train", "sft", "sft.recipe.yaml", "--compiled-graph").code == 130
    assert rlctl("train", "sft", "--compiled-graph").code == 130
    assert rlctl("train", "sft", "sft.recipe.yaml").code == 130
    graphs = [config.ray_compiled_graph.enabled for config, _, _ in launches]
    assert graphs == [True, True, False]


def test_the_plan_says_where_state_stands_in_each_phase(
    rlctl: Rlctl, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "read_gpus", lambda: ([machine.Gpu("H200", 140 << 30)], "580.1"))
    switch = "trainer.offload_optimizer_for_generation=true"
    done = rlctl("train", "grpo", "grpo.recipe.yaml", switch, "--dry-run")
    assert (done.code, done.err, launches) == (0, "", [])
    assert max(map(len, done.out.splitlines())) <= 80
    lines = [line.split() for line in done.out.splitlines()]
    header = lines.index(["state", "of", "a", "rank"]) + 1
    assert lines[header : header + 5] == [
        ["parameters", "gradients", "optimizer", "on", "the", "device"],
        ["generate", "device", "394", "KiB", "none", "host", "788", "KiB", "394", "KiB"],
        ["train", "device", "394", "KiB", "device", "394", "KiB", "device", "788", "KiB", "1.54", "MiB"],
        ["refit", "device", "394", "KiB", "none", "host", "788", "KiB", "394", "KiB"],
        ["checkpoint", "device", "394", "KiB", "none", "host", "788", "KiB", "394", "KiB"],
    ]


@pytest.mark.parametrize("is_dry", [True, False])
def test_state_that_no_device_holds_is_bad_input(
    rlctl: Rlctl, home: Path, launches: list[Launch], monkeypatch: pytest.MonkeyPatch, is_dry: bool
) -> None:
    monkeypatch.setattr(machine, "read_gpus", lambda: ([machine.Gpu("small", 1 << 20)], "580.1"))
    options = ["--dry-run"] if is_dry else []
    done = rlctl("train", "grpo", "grpo.recipe.yaml", *options)
    assert (done.code, launches) == (2, [])
    assert "trainer.num_ranks: weights, gradients and optimizer state alone take" in done.err.splitlines()[0]
    assert ("state of a rank" in done.out) == is_dry
    assert not (home / "runs/grpo.recipe.dry-run.yaml").exists()


def test_a_dry_run_follows_no_link(rlctl: Rlctl, home: Path) -> None:
    victim = home / "victim"
    victim.write_text("keep")
    (home / "runs").mkdir()
    for name in ("grpo.recipe.dry-run.yaml", ".grpo.recipe.dry-run.yaml.tmp"):
        (home / "runs" / name).symlink_to(victim)
    assert rlctl("train", "grpo", "grpo.recipe.yaml", "--dry-run").code == 0
    assert victim.read_text() == "keep"
    assert not (home / "runs/grpo.recipe.dry-run.yaml").is_symlink()

    (home / "nowhere").symlink_to(home / "gone")
    done = rlctl("train", "grpo", "grpo.recipe.yaml", "run.dir=nowhere", "--dry-run")
    assert done.code == 2
    assert "run.dir=nowhere: nowhere is no folder: choose another one" in done.err
    assert not (home / "gone").exists()


def test_the_resolved_config_of_a_dry_run_runs_as_it_is(rlctl: Rlctl, home: Path, launches: list[Launch]) -> None:
    done = rlctl("train", "grpo", "grpo.recipe.yaml", "grpo.num_steps=7", "--dry-run")
    assert "resolved config: runs/grpo.recipe.dry-run.yaml" in done.out
    assert rlctl("train", "grpo", "runs/grpo.recipe.dry-run.yaml").code == 130
    expected = load("grpo", "grpo.recipe.yaml", ["grpo.num_steps=7"]).config
    assert launches[0][0] == expected


def test_a_run_returns_the_exit_code_of_the_run(rlctl: Rlctl, launches: list[Launch]) -> None:
    assert rlctl("train", "grpo", "run.seed=3", "grpo.recipe.yaml", "--probe").code == 130
    config, resume, probe = launches[0]
    assert (config.run.seed, resume, probe) == (3, None, True)


def test_resume_takes_the_config_of_the_run_and_overrides_on_top(
    rlctl: Rlctl, home: Path, launches: list[Launch]
) -> None:
    folder = write_run(home, load("grpo", "grpo.recipe.yaml", ["run.name=first", "run.seed=5"]).to_yaml())
    assert rlctl("train", "grpo", "--resume", str(folder), "grpo.num_steps=9").code == 130
    config, resume, _ = launches[0]
    assert config.kind == "grpo"
    assert (config.run.seed, config.grpo.num_steps, resume) == (5, 9, folder)


def test_resume_of_what_is_no_run_is_bad_input(rlctl: Rlctl, home: Path, launches: list[Launch]) -> None:
    write_run(home, "")
    done = rlctl("train", "grpo", "--resume", "runs/frist")
    assert (done.code, launches) == (2, [])
    assert done.err.splitlines()[0] == "error: --resume runs/frist: no such run; did you mean first?"
    assert rlctl("train", "grpo", "--resume", "frist").err.startswith(
        "error: --resume frist: no such run; did you mean first?"
    )
    assert "leave out grpo-tiny" in rlctl("train", "grpo", "grpo-tiny", "--resume", "runs/first").err


def write_checkpoints(folder: Path, *steps: int) -> None:
    """Write checkpoints as the run in `folder` would have written them."""
    settled = load("grpo", str(folder / "config.yaml"), [], resume=True).settled
    facts = made_with(settled, Path(settled.config.model.path))
    for step in steps:
        Checkpoints(folder / "checkpoints", 9, 0).save(step, {"made_with": facts}, lambda path: None)


def test_a_run_is_resumed_by_its_name_below_run_dir(rlctl: Rlctl, home: Path, launches: list[Launch]) -> None:
    folder = write_run(home, load("grpo", "grpo.recipe.yaml", ["run.name=first"]).to_yaml())
    assert rlctl("train", "grpo", "--resume", "first").code == 130
    assert launches[0][1] == folder.relative_to(home)
    (home / "elsewhere").mkdir()
    folder.rename(home / "elsewhere/first")
    assert "first: no such run" in rlctl("train", "grpo", "--resume", "first").err
    assert rlctl("train", "grpo", "--resume", "first", "run.dir=elsewhere").code == 130


def test_a_dry_resume_says_where_it_goes_on_what_changes_and_what_to_type(
    rlctl: Rlctl, home: Path, launches: list[Launch]
) -> None:
    folder = write_run(home, load("grpo", "grpo.recipe.yaml", ["run.name=first"]).to_yaml())
    write_checkpoints(folder, 2, 4)
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    overrides = ["grpo.num_steps=6", "rewards=[{name: regex, pattern: '(a b)'}]"]
    done = rlctl("train", "grpo", "--resume", "first", *overrides, "--dry-run")
    assert (done.code, done.err, launches) == (0, "", [])
    assert max(map(len, done.out.splitlines()[:-1])) <= 80
    text = " ".join(done.out.split())
    assert "goes on after step 4: runs/first/checkpoints/step_4" in text
    assert "left 2 of 6 steps: 5 to 6" in text
    assert "changes rewards.0.name: exact -> regex rewards.0.pattern: null -> (a b) grpo.num_steps: 100 -> 6" in text
    command = done.out.splitlines()[-1].removeprefix("run it: rlctl ")
    assert shlex.split(command) == ["train", "grpo", "--resume", "first", *overrides]
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before

    (folder / "checkpoints/step_4/state.json").write_text("")
    done = rlctl("train", "grpo", "--resume", "first", "grpo.num_steps=6", "--dry-run")
    text = " ".join(done.out.split())
    assert "damaged runs/first/checkpoints/step_4/state.json: empty, of" in text
    assert "left 4 of 6 steps: 3 to 6 changes grpo.num_steps: 100 -> 6" in text
    (folder / "checkpoints/step_2/manifest.json").unlink()
    done = rlctl("train", "grpo", "--resume", "first", "--dry-run")
    assert (done.code, len(done.err.splitlines())) == (2, 2)
    assert "step_2/manifest.json: missing" in done.err


def test_what_a_checkpoint_contradicts_is_refused_before_anything_starts(
    rlctl: Rlctl, home: Path, launches: list[Launch]
) -> None:
    folder = write_run(home, load("grpo", "grpo.recipe.yaml", ["run.name=first"]).to_yaml())
    write_checkpoints(folder, 4)
    before = (folder / "config.yaml").read_bytes()
    (home / "other.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    (home / "narrow").mkdir()
    for name in ("tokenizer.json", "model.safetensors"):
        (home / "narrow" / name).write_bytes((home / "model" / name).read_bytes())
    (home / "narrow/config.json").write_text((home / "model/config.json").read_text().replace("64", "32"))
    overrides = ["model.path=narrow", "data.train.path=other.jsonl", "run.seed=3", "grpo.num_steps=3"]
    done = rlctl("train", "grpo", "--resume", "first", *overrides)
    assert (done.code, launches) == (2, [])
    lines = done.err.splitlines()
    assert len(lines) == 5
    assert lines[0] == (
        f"error: override 1: model.path=narrow: {home}/model -> {home}/narrow: "
        "not the model of the checkpoint of step 4: hidden_size 64 -> 32"
    )
    assert (
        f"override 2: data.train.path=other.jsonl: {home}/train.jsonl -> {home}/other.jsonl: not the rows" in lines[1]
    )
    assert "override 3: run.seed=3: 0 -> 3: " in lines[2]
    assert "override 4: grpo.num_steps=3: must be at least 4, the step of the newest checkpoint" in lines[3]
    assert (folder / "config.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("old", "new"), [('"tokenizer": "', '"tokenizer": "x'), ('"tokenizer"', '"tokenizes"')], ids=["value", "key"]
)
def test_a_checkpoint_whose_state_was_damaged_contradicts_nothing(
    rlctl: Rlctl, home: Path, launches: list[Launch], old: str, new: str
) -> None:
    folder = write_run(home, load("grpo", "grpo.recipe.yaml", ["run.name=first"]).to_yaml())
    write_checkpoints(folder, 2, 4)
    state_file = folder / "checkpoints/step_4/state.json"
    state = state_file.read_text()
    assert old in state
    damaged_state = state.replace(old, new)
    if len(new) > len(old):
        # The file keeps its length.
        damaged_state = damaged_state[: len(state) - 1] + "}"
    state_file.write_text(damaged_state)
    assert rlctl("train", "grpo", "--resume", "first", "grpo.num_steps=3").code == 130
    # The run is compared with the checkpoint before the damaged one.
    done = rlctl("train", "grpo", "--resume", "first", "grpo.num_steps=1")
    assert (done.code, "must be at least 2, the step of the newest checkpoint" in done.err) == (2, True)


def test_a_run_of_an_earlier_version_is_told_how_to_begin_anew(
    rlctl: Rlctl, home: Path, launches: list[Launch]
) -> None:
    resolved = load("grpo", "grpo.recipe.yaml", ["run.name=first"]).to_yaml()
    folder = write_run(home, resolved)
    for step in (2, 10):
        Checkpoints(folder / "checkpoints", 9, 0).save(step, {}, lambda path: shutil.copytree("model", path / "hf"))
        (folder / f"checkpoints/step_{step}/manifest.json").unlink()
    model_override = "model.path=runs/first/checkpoints/step_10/hf"
    remedy = f"whose checkpoints this one does not resume; to begin anew from its weights, {model_override}"
    for options in ([], ["--dry-run"]):
        done = rlctl("train", "grpo", "--resume", "first", *options)
        assert (done.code, launches, len(done.err.splitlines())) == (2, [], 2)
        assert f"earlier version of rlctl (its checkpoints have no manifest.json), {remedy}" in done.err
    assert rlctl("train", "grpo", "grpo.recipe.yaml", model_override).code == 130
    config = yaml.safe_load(resolved)
    del config["health"], config["run"]["explain_after_s"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    done = rlctl("train", "grpo", "--resume", "first", "health.stop=true")
    assert (done.code, len(done.err.splitlines())) == (2, 2)
    assert done.err.startswith("error: runs/first/config.yaml: the run is of an earlier version of rlctl (its config")
    assert "health." in done.err and remedy in done.err
    done = rlctl("train", "grpo", "--resume", "first")
    assert "(its config has no run.explain_after_s, health)" in done.err


def test_two_recipes_are_bad_input(rlctl: Rlctl) -> None:
    done = rlctl("train", "grpo", "grpo.recipe.yaml", "grpo-tiny")
    assert done.code == 2
    assert "argument 2: grpo-tiny: a second recipe after grpo.recipe.yaml" in done.err


def test_an_override_without_effect_is_said_before_the_run(rlctl: Rlctl, launches: list[Launch]) -> None:
    done = rlctl("train", "grpo", "grpo.recipe.yaml", "grpo.loss.kl_estimator=k1")
    assert done.err == "note: override 1: grpo.loss.kl_estimator=k1: no effect while grpo.loss.kl_coef is 0\n"
    assert len(launches) == 1


def test_missing_engines_fail_with_the_command_that_brings_them(
    rlctl: Rlctl, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "find_spec", lambda name: None if name == "vllm" else object())
    done = rlctl("train", "grpo", "grpo.recipe.yaml")
    assert (done.code, launches) == (1, [])
    assert (
        done.err == "error: vllm is not installed: rlctl doctor --fix installs what runs need, or prints the commands\n"
    )


def test_too_few_devices_are_bad_input(rlctl: Rlctl, launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_gpus", lambda: ([machine.Gpu("H200", 140 << 30)], "580.1"))
    done = rlctl("train", "grpo", "grpo.recipe.yaml", "placement.colocated=false")
    assert (done.code, launches) == (2, [])
    assert "2 GPUs needed, apart for 1 trainer rank and 1 engines x 1" in done.err
    assert rlctl("train", "grpo", "grpo.recipe.yaml").code == 130
