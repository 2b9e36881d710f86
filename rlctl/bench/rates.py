"""Costs of a GRPO run's parts on this machine, from two short colocated runs with different numbers of prompts.

A synchronous step samples all of its answers from one moment on, so that generation takes as many engine steps as the
longest answer has tokens, and decodes as many sequence-tokens as were generated: two numbers that tell the two costs of
an engine's step apart. An update's cost is told apart into one that every update has and one of its tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.bench.frame import Say
from rlctl.bench.grpo import GrpoBench
from rlctl.bench.runs import run_all
from rlctl.bench.simulation import Costs
from rlctl.generation.simulated_engine import DecodeCost

# Rollouts of a measured step, at most: as many as an engine decodes at a time in any case. A CPU works for longer.
_GPU_ROLLOUTS, _CPU_ROLLOUTS = 256, 32
# The driver's phases of a step.
_DRIVER = ("time/data", "time/advantage", "time/other")


def measure_costs(work: GrpoBench, folder: Path, say: Say) -> Costs:
    """Measure one device. work: its `gpus` is 0 or 1, and `make_prompts` was called in `folder`.

    Raises the errors of `run_all`.
    """
    rollouts = _GPU_ROLLOUTS if work.gpus else _CPU_ROLLOUTS
    most = max(1, min(work.prompts, rollouts // work.generations))
    settings = {}
    for prompts in dict.fromkeys((most, max(1, most // 4))):
        # All sequences of a step are decoded at a time, or the longest answer would not tell the number of steps.
        at_once = f"generation.max_num_seqs={prompts * work.generations}"
        own = replace(work, prompts=prompts).settings("colocated", folder)
        settings[f"{prompts} prompts"] = [*own, at_once]
    first = work.counted("colocated")[0]
    return fit_costs([step for _, steps in run_all("grpo", work.model, settings, folder, say) for step in steps[first]])


def fit_costs(steps: Sequence[Mapping[str, Any]]) -> Costs:
    """Return the costs that explain the records of synchronous steps best, by least squares."""

    def column(*names: str) -> NDArray[np.float64]:
        return np.array([sum(float(step.get(name, 0.0)) for name in names) for step in steps])

    ones = np.ones(len(steps))
    base, per_sequence = _fit(column("length/max"), column("tokens/generated"), column("time/generation"))
    update, per_token = _fit(ones, column("tokens/trained"), column("time/train"))
    refit, pause = fmean(column("refit/seconds")), fmean(column("refit/pause"))
    return Costs(
        training=1 / max(per_token, 1e-9),
        decode=DecodeCost(base, per_sequence),
        update=update,
        refit=refit,
        pause=min(refit, pause),
        change=max(0.0, fmean(column("time/refit", "time/sleep")) - refit),
        reward=fmean(column("time/reward")),
        driver=fmean(column(*_DRIVER)),
    )


def _fit(first: NDArray[np.float64], second: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """Return a and b, neither negative, so that a * first + b * second is as close to `seconds` as can be.

    Each step counts by its share of error, not by its length.
    """
    one, two = first / seconds, second / seconds
    (a, b), *_ = np.linalg.lstsq(np.stack([one, two], 1), np.ones(len(seconds)))
    if a < 0:
        return 0.0, float(two.sum() / (two @ two))
    if b < 0:
        return float(one.sum() / (one @ one)), 0.0
    return float(a), float(b)
