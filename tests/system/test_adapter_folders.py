"""An adapter of the hub, and its folder, wherever a command takes a model; a run that starts from it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlctl.config.builtin import RECIPES
from rlctl.models.adapters import LORA_B
from tests.faults.runs import read
from tests.system.training.scenario import WeightedLoss, adapters_of, open_trainer, sequences, share, totals
from tests.unit.folders import put_in_cache

BASE, ADAPTER = "somebody/base", "somebody/adapter"
RANK = 4


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub cache with the tiny model, and with an adapter that changes its answers."""
    root = tmp_path_factory.mktemp("hub")
    model = RECIPES / "tiny/qwen3-tiny"
    data = sequences(12, vocab=16)
    with open_trainer(model, root, adapters=adapters_of(model, RANK)) as one:
        for _ in range(8):
            one.train(share(data, 64), WeightedLoss(), totals(data))
        one.export_folder(root / "adapter")
    file = root / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": BASE}))
    put_in_cache(root / "hub", BASE, model)
    put_in_cache(root / "hub", ADAPTER, root / "adapter")
    return root


def rlctl(hub: Path, *arguments: str, given: str = "") -> str:
    command, env = [sys.executable, "-m", "rlctl", *arguments], {**os.environ}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub / "hub")}
    done = subprocess.run(
        command, cwd=hub, env=env, input=given, capture_output=True, text=True, check=False, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long  # seven starts of an engine
def test_chat_eval_and_export_take_it_by_name_and_by_folder(hub: Path) -> None:
    greedy = ("--temperature", "0", "--max-tokens", "6")
    asked = "12+30=\n7+8=\n"
    answers = [rlctl(hub, "chat", name, *greedy, given=asked) for name in (ADAPTER, str(hub / "adapter"), BASE)]
    assert answers[0] == answers[1] != answers[2]
    rlctl(hub, "export", ADAPTER, str(hub / "copied"))
    assert (hub / "copied/adapter_model.safetensors").read_bytes() == (
        hub / "adapter/adapter_model.safetensors"
    ).read_bytes()
    rlctl(hub, "export", ADAPTER, str(hub / "merged"), "--merged")
    recipe = (str(RECIPES / "grpo-tiny.yaml"), "validation.max_prompts=40", "--json")
    found: list[Any] = []
    for name in (ADAPTER, str(hub / "merged"), BASE):
        found += json.loads(rlctl(hub, "eval", name, *recipe, "--to", str(hub / f"eval-{len(found)}")))
    one, merged, base = (each["figures"]["metrics"] for each in found)
    assert one == merged != base


@pytest.mark.long  # starts an engine
def test_model_check_proves_it_with_its_base(hub: Path) -> None:
    report = json.loads(rlctl(hub, "model", "check", ADAPTER, "--engine", "--json"))
    assert report["holds"]
    said = {each["subject"]: each["text"] for each in report["findings"] if each["subject"]}
    assert said["adapter"].startswith(f"rank {RANK}, scale 2, 21 linear layers: q_proj, ")
    assert said["served = sent"].startswith("42 tensors sent, twice")
    assert "greedy tokens" in said["export"] and "token_mult_prob_error" in said["trainer = engine"]


@pytest.mark.long  # a run
def test_a_run_starts_from_it_and_its_kl_is_to_a_frozen_copy_of_it(hub: Path) -> None:
    own = (f"lora={{rank: {RANK}, alpha: {2 * RANK}}}", "grpo.loss.kl_coef=0.01", "grpo.num_steps=3")
    small = ("grpo.num_prompts_per_step=8", "validation.every=0", f"run.dir={hub / 'runs'}")
    rlctl(hub, "train", "grpo", "grpo-lora-tiny", f"model.path={ADAPTER}", *own, *small, "run.name=from-adapter")
    steps = [each for each in read(hub / "runs/from-adapter/metrics.jsonl") if each["kind"] == "step"]
    kl = [each["loss/kl"] for each in steps]
    assert abs(kl[0]) < 1e-5 < kl[2], kl
    assert max(each["mismatch/token_mult_prob_error"] for each in steps) < 1.001
    from safetensors.numpy import load_file

    before = load_file(hub / "adapter/adapter_model.safetensors")
    after = load_file(hub / "runs/from-adapter/checkpoints/step_3/hf/adapter_model.safetensors")
    assert before.keys() == after.keys()
    moved = [float(np.abs(after[name] - before[name]).max()) for name in before if name.endswith(LORA_B)]
    # It went on from the adapter's numbers.
    assert min(moved) > 0 and max(moved) < max(float(np.abs(each).max()) for each in before.values())
    config = json.loads((hub / "runs/from-adapter/checkpoints/step_3/hf/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == BASE
