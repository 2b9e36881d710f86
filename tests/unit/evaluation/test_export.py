"""An exported folder: the weights in the dtype asked for, a model card, whole or not there; its way to the hub."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from rlctl.evaluation.export import ExportError, export, model_card, push
from rlctl.evaluation.store import EvaluationFolder
from rlctl.evaluation.target import Target, find_target
from rlctl.preflight.load import load
from rlctl.run.checkpoints import Checkpoints
from rlctl.telemetry.jsonl import JsonlWriter

WEIGHTS = {"w": torch.tensor([1.0, 1.0009765625, 3.0e38]), "steps": torch.tensor([7])}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with a checkpoint of step 4 that was validated and evaluated."""
    folder = tmp_path / "runs/sums"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(load("grpo", None, []).to_yaml())

    def write(path: Path) -> None:
        (path / "hf").mkdir()
        (path / "hf/config.json").write_text(json.dumps({"model_type": "qwen3", "dtype": "float32"}))
        (path / "hf/tokenizer.json").write_text("{}")
        save_file(WEIGHTS, path / "hf/model.safetensors")

    Checkpoints(folder / "checkpoints", 1, 0).save(4, {}, write)
    for step in (2, 4):
        record = {"kind": "validation", "step": step, "validation/accuracy": step / 10, "time/validation": 1.5}
        JsonlWriter(folder / "metrics.jsonl").write(record)
    interval = {"value": 0.4, "low": 0.35, "high": 0.46}
    figures = {"tasks": 200, "accuracy": interval, "pass_at": {"1": interval, "2": {**interval, "value": 0.45}}}
    result = {"rows": "r", "by_task": [{}], "data": "hard", "generations": 2, "temperature": 0.7, "figures": figures}
    evaluation = EvaluationFolder(folder / "evals/step_4--hard--01234567")
    evaluation.path.mkdir(parents=True)
    evaluation.finish([], result)
    return folder


def no_warning(warning: str) -> None:
    raise AssertionError(warning)


def test_floating_point_tensors_are_cast_and_others_are_not(run: Path, tmp_path: Path) -> None:
    folder = export(find_target(str(run), Path("/")), tmp_path / "out", "bfloat16", no_warning)
    weights = load_file(folder / "model.safetensors")
    assert weights["w"].dtype == torch.bfloat16
    assert torch.equal(weights["w"], WEIGHTS["w"].to(torch.bfloat16))
    assert torch.equal(weights["steps"], WEIGHTS["steps"])
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


def test_the_template_has_the_arguments_of_the_run(run: Path, tmp_path: Path) -> None:
    config = run / "config.yaml"
    hf = run / "checkpoints/step_4/hf"
    (hf / "chat_template.jinja").write_text("{{ enable_thinking }}")
    config.write_text(
        config.read_text().replace("chat_template_kwargs: {}", "chat_template_kwargs: {enable_thinking: 0}")
    )
    folder = export(find_target(str(run), Path("/")), tmp_path / "out", None, no_warning)
    head = "{%- if enable_thinking is not defined %}{%- set enable_thinking = 0 %}{%- endif %}\n"
    assert (folder / "chat_template.jinja").read_text() == head + "{{ enable_thinking }}"
    assert (hf / "chat_template.jinja").read_text() == "{{ enable_thinking }}"
    config.write_text(config.read_text().replace("chat_template: auto", "chat_template: my.jinja"))
    warnings: list[str] = []
    export(find_target(str(run), Path("/")), tmp_path / "another", None, warnings.append)
    assert warnings == [
        'data.chat_template_kwargs={"enable_thinking": 0} belongs to my.jinja, which is not exported: name both where '
        "the model is served"
    ]


def test_without_a_dtype_they_stay_as_they_are(run: Path, tmp_path: Path) -> None:
    folder = export(find_target(str(run), Path("/")), tmp_path / "out", None, no_warning)
    weights = load_file(folder / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in WEIGHTS.items())


def test_a_wider_dtype_is_said_to_add_no_digits(run: Path, tmp_path: Path) -> None:
    narrow = export(find_target(str(run), Path("/")), tmp_path / "narrow", "bfloat16", no_warning)
    warnings: list[str] = []
    export(Target(str(narrow)), tmp_path / "wide", "float32", warnings.append)
    assert warnings == [f"{narrow} is bfloat16: as float32 it takes more bytes and has no more digits"]


def test_the_model_card_says_what_made_the_weights_and_what_was_measured(run: Path, tmp_path: Path) -> None:
    card = (export(find_target(str(run), Path("/")), tmp_path / "out", None, no_warning) / "README.md").read_text()
    _, head, text = card.split("---\n", 2)
    assert yaml.safe_load(head)["tags"] == ["rlctl", "grpo"]
    assert "# sums step 4" in text
    assert "Trained by rlctl (grpo) from qwen3-tiny, 4 steps." in text
    assert "- train: `train.jsonl`" in text
    assert "| validation/accuracy | 0.4 |" in text
    assert "0.2" not in text.split("## Recipe")[0]
    assert "| hard: 200 tasks, 2 answers each, temperature 0.7 | | 95% |" in text
    assert "| pass@2 | 45.0% | 35.0% to 46.0% |" in text
    recipe = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert recipe["grpo"]["num_steps"] == 240
    assert "run" not in recipe
    assert str(Path(__file__).parents[3]) not in text


@pytest.mark.parametrize(("base", "base_key"), [("me/base-1b", {"base_model": "me/base-1b"}), ("/models/base-1b", {})])
def test_the_card_of_an_adapter_says_so_and_names_its_base(tmp_path: Path, base: str, base_key: dict[str, str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "base_model_name_or_path": base}
    (source / "adapter_config.json").write_text(json.dumps(config))
    save_file({"base_model.model.q.lora_A.weight": torch.zeros(8, 4).bfloat16()}, source / "adapter_model.safetensors")
    card = (export(Target(str(source)), tmp_path / "out", None, no_warning) / "README.md").read_text()
    _, head, text = card.split("---\n", 2)
    keys = {"library_name": "peft", "pipeline_tag": "text-generation", "tags": ["rlctl", "lora"]}
    assert yaml.safe_load(head) == {**keys, **base_key}
    assert "LoRA adapter of rank 8 for base-1b, in bfloat16." in text


def test_a_damaged_evaluation_costs_the_card_its_figures_and_is_named(run: Path, tmp_path: Path) -> None:
    (damaged,) = (run / "evals").glob("step_4--*/result.json")
    damaged.write_text(damaged.read_text() + " ")
    warnings: list[str] = []
    folder = export(find_target(str(run), Path("/")), tmp_path / "out", None, warnings.append)
    card = (folder / "README.md").read_text()
    assert "| validation/accuracy | 0.4 |" in card and "pass@2" not in card
    (line,) = warnings
    assert line.startswith(f"{damaged}: grown from ") and "leaves its figures out; the command that made" in line


def test_the_card_of_random_weights_names_no_model_that_they_come_from(run: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"] |= {"path": "Qwen/Qwen3-0.6B", "random_init": True}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    card = model_card(find_target(str(run), Path("/")), ["float32"], no_warning)
    assert "from random weights in the shape of Qwen3-0.6B, 4 steps." in card and "base_model" not in card


def test_a_folder_that_is_there_is_left_alone_and_a_failure_leaves_none(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ExportError, match="out exists: name a folder that does not"):
        export(find_target(str(run), Path("/")), tmp_path / "out", None, no_warning)
    monkeypatch.setattr("rlctl.evaluation.export.model_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(find_target(str(run), Path("/")), tmp_path / "other", None, no_warning)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "runs"]


@pytest.mark.parametrize("adapter", [False, True])
def test_a_folder_that_cannot_be_written_is_one_line(run: Path, tmp_path: Path, adapter: bool) -> None:
    target = find_target(str(run), Path("/"))
    if adapter:
        source = tmp_path / "source"
        source.mkdir()
        config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "base_model_name_or_path": "me/base"}
        (source / "adapter_config.json").write_text(json.dumps(config))
        save_file({"base_model.model.q.lora_A.weight": torch.zeros(8, 4)}, source / "adapter_model.safetensors")
        target = Target(str(source))
    (tmp_path / "file").write_text("")
    for to in (Path("/proc/x"), Path("/proc/self/x/y"), tmp_path / "file/x"):
        with pytest.raises(ExportError, match=f"^{to} cannot be written: [A-Z].*") as raised:
            export(target, to, None, no_warning)
        assert raised.value.exit_code == 2


def test_a_push_makes_the_repository_and_uploads_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Hub:
        def create_repo(self, name: str, private: bool, exist_ok: bool) -> str:
            calls.append((name, private, exist_ok))
            return f"there/{name}"

        def upload_folder(self, folder_path: str, repo_id: str, commit_message: str) -> None:
            calls.append((folder_path, repo_id))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert push(tmp_path, "me/sums", private=True) == "there/me/sums"
    assert calls == [("me/sums", True, True), (str(tmp_path), "me/sums")]


def test_a_push_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real library, where the network is off."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ExportError) as raised:
        push(tmp_path, "me/sums", private=False)
    assert str(raised.value).startswith(f"{tmp_path} is written, but not pushed to me/sums: ")
    assert "\n" not in str(raised.value)


def test_every_source_of_a_mix_is_in_the_model_card(run: Path) -> None:
    config = load("grpo", None, []).values()
    train = config["data"]["train"]
    train["sources"] = {"sums": {**train, "weight": 3.0}, "games": {**train, "path": "me/games", "weight": 0.5}}
    train["path"] = None
    (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    card = model_card(find_target(str(run), Path("/")), ["float32"], no_warning)
    assert "- train, sums: `train.jsonl`, weight 3\n- train, games: `games`, weight 0.5\n- validation: " in card


def test_a_model_card_names_the_run_and_step_whose_weights_it_started_from(run: Path, tmp_path: Path) -> None:
    start = tmp_path / "runs/start/checkpoints/step_800/hf"
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"] |= {"path": str(start), "random_init": False}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    card = model_card(find_target(str(run), Path("/")), ["float32"], no_warning)
    assert "Trained by rlctl (grpo) from start-step_800, 4 steps." in card
    recipe = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert recipe["model"]["path"] == "start-step_800"
