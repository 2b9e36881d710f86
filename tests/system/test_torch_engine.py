"""A second engine, one file of a user's, trains a run: the port asks for nothing that only vLLM has."""

from pathlib import Path

import pytest

from tests.faults.runs import WITHOUT_VLLM, Run


@pytest.mark.long  # test_resume.py trains with this engine; here its own key is set
def test_an_engine_of_ones_own_trains(tmp_path: Path) -> None:
    settings = (
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=4",
        "grpo.num_steps=3",
        "validation.max_prompts=8",
    )
    run = Run(tmp_path, "grpo", WITHOUT_VLLM, "generation.engine.attention=eager", *settings)
    assert run.end() == 0, run.text()
    steps = run.steps()
    assert [step["version"] for step in steps] == [1, 2, 3]
    # The engine serves the sent weights: the trainer finds the engine's log-probs, before and after refits.
    assert all(abs(step["mismatch/token_mult_prob_error"] - 1) < 1e-5 for step in steps)
    warnings = [event["what"] for event in run.events() if event["kind"] == "warning"]
    assert "torch_engine.py samples without a key-value cache, by eager attention" in warnings
