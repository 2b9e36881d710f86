"""Whole runs on Megatron-core: the same commands, with the backend named and its ranks shared out."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.faults.runs import Run, outcomes

# An import here, 3 s of CPU, would be made by every process that collects tests.
pytestmark = pytest.mark.skipif(not find_spec("megatron"), reason="needs megatron-core")


@pytest.mark.long  # combination; the ranks: training/test_megatron.py
def test_grpo_on_two_tensor_ranks_with_a_reference_and_log_probs_of_its_own(tmp_path: Path) -> None:
    settings = (
        "trainer.backend=megatron",
        "trainer.num_ranks=2",
        "trainer.megatron.tensor_model_parallel_size=2",
        "grpo.num_steps=3",
        "grpo.loss.proximal=recompute",
        "grpo.loss.force_on_policy_ratio=false",
        "grpo.loss.kl_coef=0.01",
        "trainer.offload_optimizer_for_logprob=true",
    )
    run = Run(tmp_path, "tensor", *settings)
    assert run.end() == 0, run.text()
    assert [step["step"] for step in run.steps()] == [1, 2, 3]
    for step in run.steps():
        assert step["mismatch/token_mult_prob_error"] <= 1.001
        assert step["loss/kl"] >= 0
        phases = [name for name in step if name.startswith("time/") and name != "time/step"]
        assert sum(step[name] for name in phases) == pytest.approx(step["time/step"], rel=0.01)
    assert len(outcomes(run.path)) == 24


@pytest.mark.long  # combination
def test_sft_through_three_stages_and_a_compiled_graph_is_what_one_rank_does(tmp_path: Path) -> None:
    short = ("sft.num_steps=6", "validation.every=3", "checkpoint.every=0")
    one_rank = Run(tmp_path, "one", *short, kind="sft")
    assert one_rank.end() == 0, one_rank.text()
    stages = (
        "trainer.backend=megatron",
        "trainer.num_ranks=3",
        "trainer.megatron.pipeline_model_parallel_size=3",
        "ray_compiled_graph.enabled=require",
    )
    three_stages = Run(tmp_path, "three", *stages, *short, kind="sft")
    assert three_stages.end() == 0, three_stages.text()
    assert any(event["kind"] == "dispatch" for event in three_stages.events())
    # The other backend, on one rank, goes on from the state of three stages.
    fsdp = (
        "trainer.backend=fsdp",
        "trainer.num_ranks=1",
        "trainer.megatron.pipeline_model_parallel_size=1",
        "ray_compiled_graph.enabled=false",
    )
    three_stages = Run(tmp_path, "three", *fsdp, "sft.num_steps=8", resume=True, kind="sft")
    assert three_stages.end() == 0, three_stages.text()
    one_rank = Run(tmp_path, "one", "sft.num_steps=8", resume=True, kind="sft")
    assert one_rank.end() == 0, one_rank.text()
    for step, expected_step in zip(three_stages.steps(), one_rank.steps(), strict=True):
        for name in ("loss/nll", "train/grad_norm", "tokens/trained"):
            assert step[name] == pytest.approx(expected_step[name], rel=1e-4)
