"""The numbers of one GRPO step, by the names of telemetry/metrics.py. Pure."""

from collections.abc import Mapping
from collections.abc import Sequence as Rows

import numpy as np

from rlctl.grpo.batch import Batch, Group
from rlctl.telemetry import throughput

GENERATOR_PHASES = ("generation", "refit")
TRAINER_PHASES = ("train", "log_probs", "refit")


def rollout_metrics(groups: Rows[Group], batch: Batch) -> dict[str, float]:
    """Rewards, lengths and token counts of a step's rollouts."""
    completions = [completion for group in groups for completion in group.completions]
    scores = [score for group in groups for score in group.scores]
    values = np.array([score.value for score in scores if score.value is not None], np.float64)
    lengths = np.array([len(completion.tokens) for completion in completions])
    return {
        "reward/mean": float(values.mean()) if len(values) else 0.0,
        "reward/std": float(values.std()) if len(values) else 0.0,
        "reward/accuracy": float(np.mean([score.right for score in scores])),
        "reward/failed": float(sum(score.value is None for score in scores)),
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/truncated": float(np.mean([completion.finish == "length" for completion in completions])),
        "groups/uniform": float(np.mean([_uniform(group) for group in groups])),
        "tokens/prompt": float(sum(len(group.prompt.tokens) * len(group.completions) for group in groups)),
        "tokens/generated": float(lengths.sum()),
        "tokens/trained": float(sum(len(sequence) for sequence in batch.sequences)),
    }


def speed_metrics(
    tokens: Mapping[str, float], times: Mapping[str, float], trainers: int, generators: int, devices: int
) -> dict[str, float]:
    """The three throughputs in tokens/s/device, and each side's idle share of the step."""
    prompt, generated, trained = (int(tokens[f"tokens/{name}"]) for name in ("prompt", "generated", "trained"))
    return {
        "throughput/effective": throughput.effective(prompt, generated, times, devices),
        "throughput/training": throughput.training_only(trained, times, trainers),
        "throughput/generation": throughput.generation_only(generated, times, generators),
        "idle/trainer": throughput.idle_share(times, TRAINER_PHASES),
        "idle/generator": throughput.idle_share(times, GENERATOR_PHASES),
    }


def update_metrics(updates: Rows[Mapping[str, float]]) -> dict[str, float]:
    """The mean over a step's updates; the mismatch is the first update's, made by the weights that sampled."""
    if not updates:
        return {}
    means = {name: float(np.mean([update[name] for update in updates])) for name in updates[0]}
    return means | {name: value for name, value in updates[0].items() if name.startswith("mismatch/")}


def refit_metrics(report: Mapping[str, float]) -> dict[str, float]:
    """What a refit's report says; nothing where engines were rebuilt meanwhile."""
    if "bytes" not in report:
        return {}
    return {
        "refit/seconds": report["seconds"],
        "refit/gb_per_s": report["bytes"] / report["seconds"] / 1e9,
        "refit/pause": report["commit"],
        "refit/stall": report["stall"],
    }


def _uniform(group: Group) -> bool:
    # As in make_batch: failed rollouts are left out before.
    return len({score.value for score in group.scores if score.value is not None}) == 1
