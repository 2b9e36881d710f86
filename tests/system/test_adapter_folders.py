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

BASE = "somebody/base"
ADAPTER = "somebody/adapter"
RANK = 4


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub cache with the tiny model, and with an adapter that changes its answers."""
    root = tmp_path_factory.mktemp("hub")
    model = RECIPES / "tiny/qwen3-tiny"
    data = sequences(12, vocab=16)
    with open_trainer(model, root, adapters=adapters_of(model, RANK)) as trainer:
        for _ in range(8):
            trainer.train(share(data, 64), WeightedLoss(), totals(data))
        trainer.export_folder(root / "adapter")
    file = root / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": BASE}))
    put_in_cache(root / "hub", BASE, model)
    put_in_cache(root / "hub", ADAPTER, root / "adapter")
    return root


def rlctl(hub: Path, *arguments: str, stdin: str = "") -> str:
    command = [sys.executable, "-m", "rlctl", *arguments]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub / "hub")}
    process = subprocess.run(
        command, cwd=hub, env=env, input=stdin, capture_output=True, text=True, check=False, timeout=800
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.long  # seven starts of an engine
def test_chat_eval_and_export_take_it_by_name_and_by_folder(hub: Path) -> None:
    greedy = ("--temperature", "0", "--max-tokens", "6")
    prompts = "12+30=\n7+8=\n"
    answers = [rlctl(hub, "chat", name, *greedy, stdin=prompts) for name in (ADAPTER, str(hub / "adapter"), BASE)]
    assert answers[0] == answers[1] != answers[2]
    rlctl(hub, "export", ADAPTER, str(hub / "copied"))
    assert (hub / "copied/adapter_model.safetensors").read_bytes() == (
        hub / "adapter/adapter_model.safetensors"
    ).read_bytes()
    rlctl(hub, "export", ADAPTER, str(hub / "merged"), "--merged")
    recipe = (str(RECIPES / "grpo-tiny.yaml"), "validation.max_prompts=40", "--json")
    evaluations: list[Any] = []
    for name in (ADAPTER, str(hub / "merged"), BASE):
        folder = hub / f"eval-{len(evaluations)}"
        evaluations += json.loads(rlctl(hub, "eval", name, *recipe, "--to", str(folder)))
    adapter, merged, base = evaluations
    assert adapter["figures"]["metrics"] == merged["figures"]["metrics"] != base["figures"]["metrics"]


@pytest.mark.long  # starts an engine
def test_model_check_proves_it_with_its_base(hub: Path) -> None:
    report = json.loads(rlctl(hub, "model", "check", ADAPTER, "--engine", "--json"))
    assert report["holds"]
    texts = {finding["subject"]: finding["text"] for finding in report["findings"] if finding["subject"]}
    assert texts["adapter"].startswith(f"rank {RANK}, scale 2, 21 linear layers: q_proj, ")
    assert texts["served = sent"].startswith("42 tensors sent, twice")
    assert "greedy tokens" in texts["export"] and "token_mult_prob_error" in texts["trainer = engine"]


@pytest.mark.long  # a run
def test_a_run_starts_from_it_and_its_kl_is_to_a_frozen_copy_of_it(hub: Path) -> None:
    lora = (f"lora={{rank: {RANK}, alpha: {2 * RANK}}}", "grpo.loss.kl_coef=0.01", "grpo.num_steps=3")
    small = ("grpo.num_prompts_per_step=8", "validation.every=0", f"run.dir={hub / 'runs'}")
    rlctl(hub, "train", "grpo", "grpo-lora-tiny", f"model.path={ADAPTER}", *lora, *small, "run.name=from-adapter")
    steps = [record for record in read(hub / "runs/from-adapter/metrics.jsonl") if record["kind"] == "step"]
    kl = [step["loss/kl"] for step in steps]
    assert abs(kl[0]) < 1e-5 < kl[2], kl
    assert max(step["mismatch/token_mult_prob_error"] for step in steps) < 1.001
    from safetensors.numpy import load_file

    before = load_file(hub / "adapter/adapter_model.safetensors")
    after = load_file(hub / "runs/from-adapter/checkpoints/step_3/hf/adapter_model.safetensors")
    assert before.keys() == after.keys()
    moved = [float(np.abs(after[name] - before[name]).max()) for name in before if name.endswith(LORA_B)]
    # It went on from the adapter's numbers.
    assert min(moved) > 0 and max(moved) < max(float(np.abs(tensor).max()) for tensor in before.values())
    config = json.loads((hub / "runs/from-adapter/checkpoints/step_3/hf/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == BASE
