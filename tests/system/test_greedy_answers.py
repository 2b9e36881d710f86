"""Greedy tokens of a real engine in bfloat16: a near-tie passes and is counted, another model's tokens are refused."""

import shutil
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file, save_file

from rlctl.evaluation.checked_trainer import random_sequences
from rlctl.evaluation.engine_process import EngineProcess
from rlctl.evaluation.greedy_answers import GreedyAnswer, judge_greedy
from rlctl.evaluation.model_check import CheckedEngine
from rlctl.generation.spec import engine_kind
from tests.system.engines import spec_for
from tests.zoo import VOCAB, make_family
from tests.zoo_table import IMPORTS

ROUNDS = 3
# A tensor, and the factor that makes it another one.
CHANGED = {"model.layers.2.self_attn.o_proj.weight": 0.7, "model.norm.weight": -1.0}


def answers_of(folder: Path, log: Path) -> list[GreedyAnswer]:
    """Have an engine in bfloat16 answer greedily."""
    spec = replace(spec_for(folder), dtype="bfloat16")
    with EngineProcess(spec, engine_kind(spec.kind).environment("cpu", [], []), log, IMPORTS) as process:
        engine = CheckedEngine(process)
        prompts = list[list[int]]()
        for seed in range(ROUNDS):
            prompts += random_sequences(VOCAB, [24] * 8, seed)
        answers = engine.answers(prompts, 0.0)
        return [GreedyAnswer(prompt, answer.tokens) for prompt, answer in zip(prompts, answers)]


def with_another(folder: Path, name: str, factor: float) -> Path:
    """Copy a model with one tensor changed."""
    other = shutil.copytree(folder, folder.with_name(name))
    tensors = load_file(other / "model.safetensors")
    tensors[name] = factor * tensors[name]
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    return other


def test_a_tie_within_rounding_passes_and_one_changed_tensor_does_not(tmp_path: Path) -> None:
    """Rounding sends tokens of a mixture to other experts: ties are wider than those of a dense model."""
    folder = make_family(tmp_path / "m", "qwen3_moe")
    answers = answers_of(folder, tmp_path / "log")
    right = judge_greedy(answers, str(folder), "cpu", "bfloat16")
    assert right.holds and right.figures["greedy_within"] > 0, right.text
    assert f"{right.figures['greedy_within']:.0f} within rounding: at most" in right.text
    # An engine in float32 has no such ties.
    exact = judge_greedy(answers, str(folder), "cpu", "float32")
    assert exact.holds is False and " beyond: at most " in exact.text, exact.text
    for name, factor in CHANGED.items():
        refused = judge_greedy(answers, str(with_another(folder, name, factor)), "cpu", "bfloat16")
        assert refused.holds is False, refused.text
