"""Metrics of one GRPO step, by the names of metric_rows.py. Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np

from rlctl.config.grpo_schema import GrpoSection
from rlctl.environments.metric_rows import LONGEST_TURN, TURNS
from rlctl.generation.engine import EngineStats
from rlctl.grpo.batch import TrainingBatch, is_uniform
from rlctl.grpo.losses.sections import AGE_SHARE, CLIPPED_HIGH, CLIPPED_LOW, IMPORTANCE, MISMATCH_BY_AGE
from rlctl.grpo.metric_rows import FIRST_CLIPPED
from rlctl.refit.protocol import RefitReport
from rlctl.rewards.scorer import Score
from rlctl.rollout.types import RolloutGroup, Waste
from rlctl.run.health import ANSWERS, UNSCORED_ANSWERS
from rlctl.telemetry import throughput
from rlctl.telemetry.metrics import installed

GENERATOR_PHASES = ("generation", "refit")
TRAINER_PHASES = ("train", "log_probs", "refit")


def rollout_metrics(groups: Rows[RolloutGroup], batch: TrainingBatch) -> dict[str, float]:
    """Return rewards, lengths and token counts of a step's rollouts."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scores = [score for group in groups for score in group.scores]
    # An episode that failed has no trajectory.
    whole = [rollout for rollout in rollouts if rollout.rows]
    lengths = np.array([rollout.num_sampled for rollout in whole], np.int64)
    return (
        reward_metrics(scores)
        | source_metrics(groups, "source")
        | environment_metrics(groups)
        | advantage_metrics(batch)
        | {
            "rollouts/non_finite": float(len(batch.left_out)),
            "length/mean": float(lengths.mean()) if len(lengths) else 0.0,
            "length/p90": float(np.percentile(lengths, 90)) if len(lengths) else 0.0,
            "length/max": float(lengths.max(initial=0)),
            "length/truncated": float(np.mean([rollout.is_cut for rollout in whole])) if whole else 0.0,
            "groups/uniform": float(np.mean([is_uniform(group) for group in groups])),
            "tokens/prompt": float(sum(rollout.num_tokens for rollout in whole) - lengths.sum()),
            "tokens/generated": float(lengths.sum()),
            throughput.TRAINED_TOKENS.name: float(sum(len(sequence) for sequence in batch.sequences)),
        }
    )


def environment_metrics(groups: Rows[RolloutGroup]) -> dict[str, float]:
    """Return the metrics of a step's or a validation's episodes; empty without an environment.

    An episode that failed counts as such alone: it has no turns, and no reward.
    """
    rollouts = [(one, one.episode) for group in groups for one in group.rollouts if one.episode]
    played = [(one, episode) for one, episode in rollouts if episode.ending != "failed"]
    if not rollouts:
        return {}
    metrics = {
        "environment/failed": float(len(rollouts) - len(played)),
        "environment/retries": float(sum(episode.failures for _, episode in played)),
    }
    if not played:
        return metrics
    for name in ("turns", "tool_calls"):
        metrics[f"environment/{name}"] = float(np.mean([getattr(episode, name) for _, episode in played]))
    calls = sum(episode.tool_calls for _, episode in played)
    for name in ("tool_errors", "tool_raised", "malformed_calls"):
        metrics[f"environment/{name}"] = sum(getattr(episode, name) for _, episode in played) / max(1, calls)
    if spelled := sum(episode.spelled for _, episode in played):
        metrics["environment/spelled_tokens"] = float(spelled)
    if unwritten := sum(episode.unwritten for _, episode in played):
        metrics["environment/unwritten_messages"] = float(unwritten)
    metrics["environment/seconds"] = float(np.mean([episode.environment_s for _, episode in played]))
    agents = [episode.counts or {} for _, episode in played]
    of_agents = any(episode.counts is not None for _, episode in played)
    rows = "agent/rows_per_episode" if of_agents else "environment/rows"
    metrics[rows] = float(np.mean([len(one.rows) for one, _ in played]))
    if of_agents:
        metrics[LONGEST_TURN.name] = max(episode.longest_turn_s for _, episode in played)
    for name in sorted({name for counts in agents for name in counts}):
        metrics[f"agent/{name}"] = float(sum(counts.get(name, 0) for counts in agents))
    endings = Counter(episode.ending for _, episode in played)
    metrics |= {f"environment/endings/{name}": count / len(played) for name, count in sorted(endings.items())}
    by_turns = defaultdict[int, list[float]](list)
    for one, episode in played:
        if one.reward is not None:
            by_turns[episode.turns].append(one.reward)
    return metrics | {f"reward/turns_{turns}": float(np.mean(of)) for turns, of in sorted(by_turns.items())}


def sampling_metrics(
    ended: Rows[RolloutGroup], batch: TrainingBatch, waste: Waste, config: GrpoSection
) -> dict[str, float]:
    """Return counts of filtered, replaced and wasted groups (dynamic sampling) and of masked rollouts; empty while both
    are off. ended: the groups of the step and the replaced ones.
    """
    metrics = {"rollouts/masked": float(np.count_nonzero(batch.cut))} if config.overlong.mask else {}
    if config.dynamic_sampling.filter is None:
        return metrics
    kept = {name for names in batch.outcomes.filtered.values() for name in names}
    kept |= {group.task.id for group, _ in waste.filtered}
    filtered = sum(one.num_sampled for group in ended if group.task.id in kept for one in group.rollouts)
    generated = sum(one.num_sampled for group in ended for one in group.rollouts) + waste.surplus_tokens
    trained = len(batch.outcomes.trained)
    return metrics | {
        "groups/trained": float(trained),
        "groups/missing": float(config.num_prompts_per_step - trained),
        "groups/filtered": float(len(kept)),
        "groups/replaced": float(len(waste.filtered)),
        "groups/surplus": float(waste.surplus),
        "tokens/filtered": float(filtered),
        "tokens/surplus": float(waste.surplus_tokens),
        "tokens/wasted": (filtered + waste.surplus_tokens) / max(1, generated),
    }


def advantage_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Return mean and deviation of the samples' advantages, each the mean over its trained tokens, and the share of
    samples that teach nothing; empty without a sample."""
    columns = [sequence.columns["advantage"][sequence.mask] for sequence in batch.sequences]
    if not columns:
        return {}
    means = np.array([column.mean() if len(column) else 0.0 for column in columns], np.float64)
    zero = np.mean([not column.any() for column in columns])
    return {"advantage/mean": float(means.mean()), "advantage/std": float(means.std()), "advantage/zero": float(zero)}


def reward_metrics(scores: Rows[Score]) -> dict[str, float]:
    """Return mean, deviation and accuracy of the scored rollouts, and mean and failures of each reward.

    A failure is no 0. A reward that failed everywhere has no mean.
    """
    scored = [score for score in scores if score.value is not None]
    metrics = {"reward/failed": float(len(scores) - len(scored))}
    if scores:
        metrics["reward/failed_share"] = 1 - len(scored) / len(scores)
    if scored:
        values = np.array([score.value for score in scored], np.float64)
        metrics |= {"reward/mean": float(values.mean()), "reward/std": float(values.std())}
        metrics["reward/accuracy"] = float(np.mean([score.right for score in scored]))
    for name in dict.fromkeys(name for score in scores for name in score.parts):
        parts = [part for score in scores if (part := score.parts.get(name)) is not None]
        # Scores of an environment have the values that it names; others have none.
        failed = [score for score in scores if score.value is None and score.parts.get(name) is None]
        metrics[f"reward/{name}/failed"] = float(len(failed))
        if parts:
            metrics[f"reward/{name}/mean"] = float(np.mean(parts))
    return metrics


def source_metrics(groups: Rows[RolloutGroup], prefix: str) -> dict[str, float]:
    """Return the share of the groups, accuracy and mean reward of each source of tasks; empty without sources."""
    metrics = {}
    for source in sorted({group.task.source for group in groups} - {""}):
        own = [group for group in groups if group.task.source == source]
        metrics[f"{prefix}/{source}/share"] = len(own) / len(groups)
        scored = reward_metrics([score for group in own for score in group.scores])
        for name in ("accuracy", "mean"):
            if (value := scored.get(f"reward/{name}")) is not None:
                metrics[f"{prefix}/{source}/{'reward' if name == 'mean' else name}"] = value
    return metrics


def validation_metrics(groups: Rows[RolloutGroup]) -> dict[str, float]:
    """Return the numbers of held-out groups: failed rewards apart, the others of the rollouts that were scored."""
    scored = [[score for score in group.scores if score.value is not None] for group in groups]
    flat = [score for group in scored for score in group]
    lengths = [rollout.num_sampled for group in groups for rollout in group.rollouts if rollout.rows]
    answers = sum(len(group.rollouts) for group in groups)
    metrics = {
        ANSWERS.name: float(answers),
        UNSCORED_ANSWERS.name: float(answers - len(flat)),
        "validation/length": float(np.mean(lengths)) if lengths else 0.0,
        "validation/prompts": float(len(groups)),
    }
    played = environment_metrics(groups)
    if "environment/failed" in played:
        metrics["validation/failed_episodes"] = played["environment/failed"]
        metrics["validation/turns"] = played.get(TURNS.name, 0.0)
    if flat:
        metrics["validation/accuracy"] = float(np.mean([score.right for score in flat]))
        metrics["validation/reward"] = float(np.mean([score.value for score in flat if score.value is not None]))
    if flat and max(len(group.rollouts) for group in groups) > 1:
        metrics["validation/pass_at_k"] = float(np.mean([any(s.right for s in group) for group in scored if group]))
    return metrics | source_metrics(groups, "validation")


def speed_metrics(
    tokens: Mapping[str, float], times: Mapping[str, float], trainers: int, devices: int
) -> dict[str, float]:
    """Return the throughput end to end and of training, tokens/s/device, and the trainer's idle share of the step."""
    trained = int(tokens[throughput.TRAINED_TOKENS.name])
    return {
        throughput.EFFECTIVE.name: throughput.effective(trained, times, devices),
        throughput.TRAINING.name: throughput.training_only(trained, times, trainers),
        throughput.TRAINER_IDLE.name: throughput.idle_share(times, TRAINER_PHASES),
    }


def turn_metrics(tokens: Mapping[str, float], times: Mapping[str, float], generators: int) -> dict[str, float]:
    """Return the throughput of generation, tokens/s/device, and its idle share, where it takes turns with training."""
    generated = int(tokens["tokens/generated"] + tokens.get("tokens/surplus", 0.0))
    return {
        throughput.GENERATION.name: throughput.generation_only(generated, times, generators),
        throughput.GENERATOR_IDLE.name: throughput.idle_share(times, GENERATOR_PHASES),
    }


@dataclass(frozen=True)
class EngineInterval:
    """Totals of each engine at two moments."""

    before: list[EngineStats]
    after: list[EngineStats]
    devices: int

    @property
    def reported(self) -> list[tuple[EngineStats, EngineStats]]:
        """Totals before and after, of each engine that reported and was not replaced meanwhile."""
        return [(b, a) for b, a in zip(self.before, self.after) if a.busy >= b.busy and a.at > b.at > 0]


def prefix_metrics(interval: EngineInterval) -> dict[str, float]:
    """Return the share of the prompt tokens that prefix caches held; empty where no prompt was looked up."""
    prompts, cached = (
        sum(getattr(a, n) - getattr(b, n) for b, a in interval.reported) for n in ("prompt_tokens", "cached_tokens")
    )
    return {"generator/prefix_hit_share": cached / prompts} if prompts else {}


def engine_metrics(interval: EngineInterval) -> dict[str, float]:
    """Return the median and the slowest of several engines, tokens/s while they sampled, and the most idle one's share.

    So many numbers whatever the number of engines. Empty for one engine, or until two have sampled.
    """
    rates, idle = dict[int, float](), dict[int, float]()
    for index, (before, after) in enumerate(zip(interval.before, interval.after)):
        busy, whole = after.busy - before.busy, after.at - before.at
        if busy > 0 and before.at > 0 and whole > 0:
            rates[index] = (after.tokens - before.tokens) / busy
            idle[index] = min(1.0, max(0.0, 1 - busy / whole))
    if len(rates) < 2:
        return {}
    slowest = min(rates, key=lambda index: rates[index])
    return {
        "engines/rate_median": float(np.median([*rates.values()])),
        "engines/rate_slowest": rates[slowest],
        "engines/slowest": float(slowest),
        "engines/idle_most": max(idle.values()),
    }


def generator_metrics(interval: EngineInterval) -> dict[str, float]:
    """Return the generator's speed while it sampled, and the shares of the time in which it was idle or paused.

    Engines that were replaced meanwhile are left out, since their totals began again. Empty if no engine reported.
    """
    pairs = interval.reported
    busy, paused, whole = (sum(getattr(a, n) - getattr(b, n) for b, a in pairs) for n in ("busy", "paused", "at"))
    tokens, steps = (sum(getattr(a, n) - getattr(b, n) for b, a in pairs) for n in ("tokens", "steps"))
    if not pairs:
        return {}
    return {
        # Those left out have devices too: a rate is of the devices that were counted.
        throughput.GENERATION.name: tokens / busy * len(interval.after) / interval.devices if busy > 0 else 0.0,
        throughput.GENERATOR_IDLE.name: min(1.0, max(0.0, 1 - busy / whole)),
        "idle/generator_refit": min(1.0, paused / whole),
        "generator/sequences": tokens / max(1, steps),
        "generator/decode_step": busy / max(1, steps),
        "tokens/sampled": float(tokens),
    }


def age_metrics(groups: Rows[RolloutGroup], version: int, occupancy: Mapping[int, int], bound: int) -> dict[str, float]:
    """Return ages in steps: of the trained groups, and of the active ones (`buffer/age_k`, at the end of the step)."""
    sampled = [[one.sampled_versions for one in group.rollouts if one.num_sampled] for group in groups]
    versions = [group for group in sampled if group]
    ages = [version - min(int(one.min()) for one in group) for group in versions]
    tokens = [version - one for group in versions for one in group]
    joined = np.concatenate(tokens) if tokens else np.zeros(0)
    mixed = [one.min() != one.max() for group in versions for one in group if len(one)]
    metrics = {
        "age/mean": float(np.mean(ages)) if ages else 0.0,
        "age/max": float(max(ages, default=0)),
        "age/token_mean": float(joined.mean()) if len(joined) else 0.0,
        "age/mixed": float(np.mean(mixed)) if mixed else 0.0,
    }
    metrics |= {f"age/groups_{age}": float(ages.count(age)) for age in range(bound + 1)}
    return metrics | {f"buffer/age_{age}": float(occupancy.get(version + 1 - age, 0)) for age in range(bound + 1)}


def length_metrics(sampled: list[int]) -> dict[str, float]:
    """Return lengths of all rollouts that were sampled during the step; those trained should not be shorter."""
    if not sampled:
        return {}
    return {"length/sampled_mean": float(np.mean(sampled)), "length/sampled_p90": float(np.percentile(sampled, 90))}


def update_metrics(updates: Rows[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a step's updates, each as its row says: their mean, the first one's, or their sum.

    The mean of tokens of an age is weighted by their share. The mismatch is the first update's, made by the weights
    that sampled. So is ratio/clipped_first: the share of tokens
    that bounds hold before the policy has moved. It is left out where the ratio is to older weights.
    """
    made = [update for update in updates if update]
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for update in made for name in update):
        having = [update for update in made if name in update]
        values = [update[name] for update in having]
        row = installed().find(name)
        age = MISMATCH_BY_AGE.pattern.fullmatch(name)
        if row and row.over_updates == "first":
            found[name] = values[0]
        elif row and row.over_updates == "sum":
            found[name] = sum(values)
        else:
            shares = [update[AGE_SHARE.name_of(age[1])] for update in having] if age else None
            found[name] = float(np.average(values, weights=shares))
    held = [made[0][row.name] for row in (CLIPPED_LOW, CLIPPED_HIGH) if row.name in made[0]] if made else []
    # Only a ratio to the trainer's own log-probs has an importance weight.
    if held and (IMPORTANCE.name in made[0] or made[0].get(AGE_SHARE.name_of(0), 1.0) == 1.0):
        found[FIRST_CLIPPED.name] = sum(held)
    return found


def refit_metrics(report: RefitReport) -> dict[str, float]:
    """Return a refit's metrics; none where engines were brought to the version a second time."""
    if not report.bytes:
        return {}
    turns = {"refit/rest": report.rest, "refit/wake": report.wake} if report.wake else {}
    return {
        "refit/seconds": report.seconds,
        "refit/gb_per_s": report.bytes / report.seconds / 1e9,
        "refit/pack": report.pack,
        "refit/wire": report.wire,
        "refit/load": report.load,
        "refit/pause": report.commit,
        "refit/stall": report.stall,
    } | turns
