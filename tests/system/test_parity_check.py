"""The parity probe passes if trainer and generator agree, also with top_p, and stops a run if their weights differ."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.data.tasks import Task
from rlctl.generation.generator_pool import GeneratorPool
from rlctl.grpo.components import GrpoComponents
from rlctl.grpo.health import grpo_health
from rlctl.grpo.metric_rows import PARITY
from rlctl.grpo.parity_check import ProbeError, compare, probe, sample_parity
from rlctl.preflight.load import load
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.trainer_settings import TrainerSettings
from rlctl.refit.refit import Refit
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.players.single_turn import SingleTurnPlayer
from rlctl.rollout.runner import RolloutRunner
from rlctl.training.spec import TrainerSpec
from rlctl.training.trainer_group import TrainerGroup
from rlctl.training.trainer_worker import TrainerWorker
from rlctl.workers.group import WorkerGroup, WorkerSpec
from tests.system.engines import SEAT, FolderSource, MakeSource, refit_options, spec_for
from tests.tiny_models import make_model

DEADLINE = 600.0
TASKS = [Task(f"r{number}", [5 + number, 9, 12], "", None) for number in range(4)]


@dataclass(frozen=True)
class MakeTrainer:
    config: TrainerSettings
    folder: Path
    store: Path

    def __call__(self) -> TrainerWorker:
        return TrainerWorker(
            TrainerSpec(
                config=self.config,
                model_path=str(self.folder),
                tokenizer_path=str(self.folder),
                rank=0,
                world=1,
                init_method=f"file://{self.store}",
                device="cpu",
                temperature=1.0,
                total_updates=1,
                seed=0,
                profile=None,
                roles={},
            )
        )


def make_components(
    section: TrainerSettings, trainer: WorkerGroup, pool: GeneratorPool, dispatcher: RolloutDispatcher
) -> GrpoComponents:
    unused = (
        "source",
        "validation",
        "score",
        "recorder",
        "devices",
        "monitor",
        "frozen",
        "critic",
        "judges",
        "model_rewards",
        "decode",
        "program_metrics",
        "failure_cause",
        "tool_cause",
    )
    unused_parts: Any = dict.fromkeys(unused)
    runner = RolloutRunner(SingleTurnPlayer(), dispatcher)
    return GrpoComponents(TrainerGroup(trainer, section), pool, dispatcher, runner, **unused_parts)


def test_only_a_generator_with_the_trainers_weights_passes(ray_here: Path, tmp_path: Path) -> None:
    right_model = make_model(tmp_path / "right", "qwen3_moe", seed=1)
    wrong_model = make_model(tmp_path / "wrong", "qwen3_moe", seed=2)
    run = load("grpo", None, []).settled.settle_on(RunMachine("cpu"), None)
    config = run.config
    make_trainer = MakeTrainer(run.trainer, right_model, tmp_path / "store")
    trainer = WorkerGroup([WorkerSpec("trainer-0", make_trainer)], DEADLINE)
    # Both cut the distribution of training rollouts, whose log-probs are larger by the cut.
    spec = replace(spec_for(right_model), top_p=0.8, top_k=40)
    pool = GeneratorPool(spec, [SEAT], str(ray_here), DEADLINE, 0, lambda *_, **__: None)
    source = WorkerGroup([WorkerSpec("source", MakeSource(wrong_model, FolderSource))], DEADLINE)
    with ExitStack() as stack:
        for part in (pool, source, trainer):
            stack.callback(part.kill)
        for group in (trainer, source):
            group.built().wait(DEADLINE)
        pool.wait_until_built()
        dispatcher = RolloutDispatcher(pool, config.run, lambda *_, **__: None)
        stack.callback(dispatcher.close)
        pool.connect(Refit(trainer, refit_options("shm", tmp_path / "a")))
        components = make_components(run.trainer, trainer, pool, dispatcher)
        probed = probe(config, components, TASKS, 0, "float32", bound=1.00001)
        assert probed.gap.token_mult_prob_error == pytest.approx(1.0, abs=1e-4)
        assert probed.rows is not None
        for row in vars(probed.rows).values():
            assert row.tokens == probed.gap.tokens and row.token_mult_prob_error < 1.00001, row
        assert pool.version == 0
        pool.connect(Refit(source, refit_options("shm", tmp_path / "b")))
        components = make_components(run.trainer, trainer, pool, dispatcher)
        refusal = (
            r"error .* at most 1\.00001 in float32; decoded and trained differ .*, scored and trained differ .*, "
            r"decoded and scored agree \(1\.0000\d\d\): the engine agrees with itself, .* "
            r"Look first, on both sides, at 4 experts$"
        )
        with pytest.raises(ProbeError, match=refusal):
            probe(config, components, TASKS, 1, "float32", bound=1.00001)
        # In an asynchronous run, an engine that got other weights causes a warning.
        config.async_.enabled = True
        gap = compare(components, sample_parity(config, components, TASKS, 1))
        (warning,) = grpo_health(run).look(1, {PARITY.name: gap.token_mult_prob_error})
        assert warning.check == "mismatch" and warning.value > 1.05
