"""Values of the metrics of one GRPO step, under the names that `metric_rows.py` lists. Pure functions."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from rlctl.config.grpo_schema import GrpoSection
from rlctl.environments.metric_rows import LONGEST_TURN, TURNS
from rlctl.generation.engine import EngineStats
from rlctl.grpo.batch import TrainingBatch, is_uniform
from rlctl.grpo.losses.sections import AGE_SHARE, CLIPPED_HIGH, CLIPPED_LOW, IMPORTANCE, MISMATCH_BY_AGE
from rlctl.grpo.metric_rows import FIRST_CLIPPED, MEDIAN_ENGINE_RATE, SLOWEST_ENGINE_RATE
from rlctl.preflight.declared_columns import COLUMN_PHASES
from rlctl.refit.protocol import RefitReport
from rlctl.rewards.scorer import Score
from rlctl.rollout.types import Rollout, RolloutGroup, Waste
from rlctl.run.health import ANSWERS, UNSCORED_ANSWERS
from rlctl.telemetry import throughput
from rlctl.telemetry.metrics import installed_rows

GENERATOR_PHASES = ("generation", "refit")
TRAINER_PHASES = ("train", "refit", *COLUMN_PHASES)


def _all_rollouts(groups: Iterable[RolloutGroup]) -> list[Rollout]:
    return list(chain.from_iterable(group.rollouts for group in groups))


def _all_scores(groups: Iterable[RolloutGroup]) -> list[Score]:
    return list(chain.from_iterable(group.scores for group in groups))


def rollout_metrics(groups: Rows[RolloutGroup], batch: TrainingBatch) -> dict[str, float]:
    """Return rewards, advantages, lengths and token counts of a step's rollouts. batch: the step's trained samples."""
    scores = _all_scores(groups)
    # A failed episode has no rows, and does not count in lengths.
    played = [rollout for rollout in _all_rollouts(groups) if rollout.rows]
    lengths = np.array([rollout.num_sampled for rollout in played], np.int64)
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
            "length/truncated": float(np.mean([rollout.is_cut for rollout in played])) if played else 0.0,
            "groups/uniform": float(np.mean([is_uniform(group) for group in groups])),
            "tokens/prompt": float(sum(rollout.num_tokens for rollout in played) - lengths.sum()),
            "tokens/generated": float(lengths.sum()),
            throughput.TRAINED_TOKENS.name: float(sum(len(sequence) for sequence in batch.sequences)),
        }
    )


def environment_metrics(groups: Rows[RolloutGroup]) -> dict[str, float]:
    """Return the metrics of the episodes in these groups; empty without an environment.

    A failed episode counts only in `environment/failed`, because it has no turns and no reward.
    """
    pairs = [(rollout, rollout.episode) for rollout in _all_rollouts(groups) if rollout.episode]
    played = [(rollout, episode) for rollout, episode in pairs if episode.ending != "failed"]
    if not pairs:
        return {}
    episodes = [episode for _, episode in played]
    metrics = {
        "environment/failed": float(len(pairs) - len(played)),
        "environment/retries": float(sum(episode.failures for episode in episodes)),
    }
    if not played:
        return metrics
    for name in ("turns", "tool_calls"):
        metrics[f"environment/{name}"] = float(np.mean([getattr(episode, name) for episode in episodes]))
    calls = sum(episode.tool_calls for episode in episodes)
    for name in ("tool_errors", "tool_raised", "malformed_calls"):
        metrics[f"environment/{name}"] = sum(getattr(episode, name) for episode in episodes) / max(1, calls)
    if spelled := sum(episode.spelled for episode in episodes):
        metrics["environment/spelled_tokens"] = float(spelled)
    if unwritten := sum(episode.unwritten for episode in episodes):
        metrics["environment/unwritten_messages"] = float(unwritten)
    metrics["environment/seconds"] = float(np.mean([episode.environment_s for episode in episodes]))
    agent_counts = [episode.counts or {} for episode in episodes]
    has_agents = any(episode.counts is not None for episode in episodes)
    rows_name = "agent/rows_per_episode" if has_agents else "environment/rows"
    metrics[rows_name] = float(np.mean([len(rollout.rows) for rollout, _ in played]))
    if has_agents:
        metrics[LONGEST_TURN.name] = max(episode.longest_turn_s for episode in episodes)
    for name in sorted(set(chain.from_iterable(agent_counts))):
        metrics[f"agent/{name}"] = float(sum(counts.get(name, 0) for counts in agent_counts))
    endings = Counter(episode.ending for episode in episodes)
    metrics |= {f"environment/endings/{name}": count / len(played) for name, count in sorted(endings.items())}
    rewards_by_turns = defaultdict[int, list[float]](list)
    for rollout, episode in played:
        if rollout.reward is not None:
            rewards_by_turns[episode.turns].append(rollout.reward)
    for turns, rewards in sorted(rewards_by_turns.items()):
        metrics[f"reward/turns_{turns}"] = float(np.mean(rewards))
    return metrics


def sampling_metrics(
    ended: Rows[RolloutGroup], batch: TrainingBatch, waste: Waste, config: GrpoSection
) -> dict[str, float]:
    """Return counts of groups and tokens that dynamic sampling filtered, replaced or put off, and of masked rollouts.

    Metrics of a feature that is off are left out. ended: the groups of the step, and the groups that others replaced.
    """
    metrics = {"rollouts/masked": float(np.count_nonzero(batch.cut))} if config.overlong.mask else {}
    if config.dynamic_sampling.filter is None:
        return metrics
    filtered_tasks = set(chain.from_iterable(batch.outcomes.filtered.values()))
    filtered_tasks |= {group.task.id for group, _ in waste.filtered}
    filtered_groups = [group for group in ended if group.task.id in filtered_tasks]
    filtered = sum(rollout.num_sampled for rollout in _all_rollouts(filtered_groups))
    generated = sum(rollout.num_sampled for rollout in _all_rollouts(ended)) + waste.surplus_tokens
    trained = len(batch.outcomes.trained)
    return metrics | {
        "groups/trained": float(trained),
        "groups/missing": float(config.num_prompts_per_step - trained),
        "groups/filtered": float(len(filtered_tasks)),
        "groups/replaced": float(len(waste.filtered)),
        "groups/surplus": float(waste.surplus),
        "tokens/filtered": float(filtered),
        "tokens/surplus": float(waste.surplus_tokens),
        "tokens/wasted": (filtered + waste.surplus_tokens) / max(1, generated),
    }


def advantage_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Return mean and deviation of the samples' advantages, and the share of samples whose advantages are all 0.

    A sample's advantage is the mean over its trained tokens. Empty without a sample.
    """
    columns = [sequence.columns["advantage"][sequence.mask] for sequence in batch.sequences]
    if not columns:
        return {}
    means = np.array([column.mean() if len(column) else 0.0 for column in columns], np.float64)
    zero = np.mean([not column.any() for column in columns])
    return {"advantage/mean": float(means.mean()), "advantage/std": float(means.std()), "advantage/zero": float(zero)}


def reward_metrics(scores: Rows[Score]) -> dict[str, float]:
    """Return mean reward, standard deviation and accuracy of scored rollouts; mean and failures of each named reward.

    A failed reward does not count as 0. A reward that failed for every rollout has no mean.
    """
    scored = [score for score in scores if score.value is not None]
    metrics = {"reward/failed": float(len(scores) - len(scored))}
    if scores:
        metrics["reward/failed_share"] = 1 - len(scored) / len(scores)
    if scored:
        values = np.array([score.value for score in scored], np.float64)
        metrics |= {"reward/mean": float(values.mean()), "reward/std": float(values.std())}
        if _is_judged(scored):
            metrics["reward/accuracy"] = float(np.mean([score.right for score in scored]))
    for name in dict.fromkeys(chain.from_iterable(score.parts for score in scores)):
        parts = [score.parts.get(name) for score in scores]
        values_of_part = [part for part in parts if part is not None]
        # An environment may name other parts in each score, so a part that is missing in a rollout with a reward is no
        # failure.
        failed = [score for score, part in zip(scores, parts) if score.value is None and part is None]
        metrics[f"reward/{name}/failed"] = float(len(failed))
        if values_of_part:
            metrics[f"reward/{name}/mean"] = float(np.mean(values_of_part))
    return metrics


def _is_judged(scored: Rows[Score]) -> bool:
    """Return True if a reward judged any rollout. A run without rewards has no accuracy."""
    return any(score.parts for score in scored)


def source_metrics(groups: Rows[RolloutGroup], prefix: str) -> dict[str, float]:
    """Return for each source of tasks its share of the groups, its accuracy and its mean reward; empty without sources.

    prefix: begins the metric's names, for example "source" for source/NAME/accuracy.
    """
    metrics = {}
    for source in sorted({group.task.source for group in groups} - {""}):
        groups_of_source = [group for group in groups if group.task.source == source]
        metrics[f"{prefix}/{source}/share"] = len(groups_of_source) / len(groups)
        rewards = reward_metrics(_all_scores(groups_of_source))
        for name, recorded_name in (("reward/accuracy", "accuracy"), ("reward/mean", "reward")):
            if name in rewards:
                metrics[f"{prefix}/{source}/{recorded_name}"] = rewards[name]
    return metrics


def validation_metrics(groups: Rows[RolloutGroup]) -> dict[str, float]:
    """Return the metrics of held-out groups. Accuracy, reward and pass@k count only rollouts with a reward."""
    scored = [[score for score in group.scores if score.value is not None] for group in groups]
    flat = list(chain.from_iterable(scored))
    lengths = [rollout.num_sampled for rollout in _all_rollouts(groups) if rollout.rows]
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
    if flat and _is_judged(flat):
        metrics["validation/accuracy"] = float(np.mean([score.right for score in flat]))
        metrics["validation/reward"] = float(np.mean([score.value for score in flat if score.value is not None]))
    if flat and _is_judged(flat) and max(len(group.rollouts) for group in groups) > 1:
        solved = [any(score.right for score in scores) for scores in scored if scores]
        metrics["validation/pass_at_k"] = float(np.mean(solved))
    return metrics | source_metrics(groups, "validation")


def speed_metrics(
    tokens: Mapping[str, float], times: Mapping[str, float], trainers: int, devices: int
) -> dict[str, float]:
    """Return the throughput of the step and of training, in tokens/s/device, and the trainer's idle share of the step.

    times: seconds of each phase. trainers: devices of the trainer. devices: all devices of the run.
    """
    trained = int(tokens[throughput.TRAINED_TOKENS.name])
    return {
        throughput.EFFECTIVE.name: throughput.effective(trained, times, devices),
        throughput.TRAINING.name: throughput.training_only(trained, times, trainers),
        throughput.TRAINER_IDLE.name: throughput.idle_share(times, TRAINER_PHASES),
    }


def turn_metrics(tokens: Mapping[str, float], times: Mapping[str, float], generators: int) -> dict[str, float]:
    """Return the throughput of generation, in tokens/s/device, and its idle share, for a synchronous run.

    times: seconds of each phase. generators: devices of the engines.
    """
    generated = int(tokens["tokens/generated"] + tokens.get("tokens/surplus", 0.0))
    return {
        throughput.GENERATION.name: throughput.generation_only(generated, times, generators),
        throughput.GENERATOR_IDLE.name: throughput.idle_share(times, GENERATOR_PHASES),
    }


@dataclass(frozen=True)
class EngineInterval:
    """Running totals of each engine at the begin and at the end of an interval."""

    before: list[EngineStats]
    after: list[EngineStats]
    # Number of devices of all engines.
    devices: int

    @property
    def pairs(self) -> list[tuple[EngineStats, EngineStats]]:
        """(before, after) of each engine that reported at both ends and was not replaced in between."""
        pairs = zip(self.before, self.after)
        return [(before, after) for before, after in pairs if after.busy >= before.busy and after.at > before.at > 0]

    def increase(self, total: str) -> float:
        """Return the increase of one total, a field of `EngineStats`, over the engines in `pairs`."""
        increase: float = sum(getattr(after, total) - getattr(before, total) for before, after in self.pairs)
        return increase


def prefix_metrics(interval: EngineInterval) -> dict[str, float]:
    """Return the share of prompt tokens found in prefix caches during the interval; empty without prompt tokens."""
    prompt_tokens = interval.increase("prompt_tokens")
    if not prompt_tokens:
        return {}
    return {"generator/prefix_hit_share": interval.increase("cached_tokens") / prompt_tokens}


def engine_metrics(interval: EngineInterval) -> dict[str, float]:
    """Return the rates of the median and of the slowest engine, tokens/s while sampling, and the largest idle share.

    There are always four metrics, for any number of engines. Empty unless at least two engines sampled.
    """
    rates: dict[int, float] = {}
    idle_shares: dict[int, float] = {}
    for index, (before, after) in enumerate(zip(interval.before, interval.after)):
        busy = after.busy - before.busy
        elapsed = after.at - before.at
        if busy > 0 and before.at > 0 and elapsed > 0:
            rates[index] = (after.tokens - before.tokens) / busy
            idle_shares[index] = min(1.0, max(0.0, 1 - busy / elapsed))
    if len(rates) < 2:
        return {}
    slowest = min(rates, key=lambda index: rates[index])
    return {
        MEDIAN_ENGINE_RATE.name: float(np.median([*rates.values()])),
        SLOWEST_ENGINE_RATE.name: rates[slowest],
        "engines/slowest": float(slowest),
        "engines/idle_most": max(idle_shares.values()),
    }


def generator_metrics(interval: EngineInterval) -> dict[str, float]:
    """Return the generator's throughput while it sampled, and the shares of time in which it was idle or paused.

    Engines that were replaced in the interval are left out, because their totals restarted. Empty if no engine
    reported.
    """
    if not interval.pairs:
        return {}
    busy = interval.increase("busy")
    elapsed = interval.increase("at")
    tokens = interval.increase("tokens")
    steps = interval.increase("steps")
    return {
        # tokens / busy is the mean rate of one engine, because `busy` sums the seconds of all engines.
        throughput.GENERATION.name: tokens / busy * len(interval.after) / interval.devices if busy > 0 else 0.0,
        throughput.GENERATOR_IDLE.name: min(1.0, max(0.0, 1 - busy / elapsed)),
        "idle/generator_refit": min(1.0, interval.increase("paused") / elapsed),
        "generator/sequences": tokens / max(1, steps),
        "generator/decode_step": busy / max(1, steps),
        "tokens/sampled": float(tokens),
    }


def scoring_metrics(role: str, interval: EngineInterval) -> dict[str, float]:
    """Return the share of the interval in which the engines of a frozen model scored nothing; empty if none reported.

    role: name of the model.
    """
    elapsed = interval.increase("at")
    if not elapsed:
        return {}
    return {f"idle/{role}": min(1.0, max(0.0, 1 - interval.increase("busy") / elapsed))}


def age_metrics(groups: Rows[RolloutGroup], version: int, occupancy: Mapping[int, int], bound: int) -> dict[str, float]:
    """Return ages in steps: of the trained groups and tokens, and of the groups in the buffer (`buffer/age_K`).

    version: weight version that the step trained. occupancy: version at admission -> number of active groups, after the
    step. bound: largest allowed age.
    """
    # For each rollout, int [N]: weight version of each sampled token.
    versions: list[NDArray[np.int32]] = []
    group_ages: list[int] = []
    for group in groups:
        versions_in_group = [rollout.sampled_versions for rollout in group.rollouts if rollout.num_sampled]
        if versions_in_group:
            group_ages.append(version - min(int(tokens.min()) for tokens in versions_in_group))
            versions += versions_in_group
    token_ages = version - np.concatenate(versions) if versions else np.zeros(0)
    is_mixed = [tokens.min() != tokens.max() for tokens in versions]
    metrics = {
        "age/mean": float(np.mean(group_ages)) if group_ages else 0.0,
        "age/max": float(max(group_ages, default=0)),
        "age/token_mean": float(token_ages.mean()) if len(token_ages) else 0.0,
        "age/mixed": float(np.mean(is_mixed)) if is_mixed else 0.0,
    }
    metrics |= {f"age/groups_{age}": float(group_ages.count(age)) for age in range(bound + 1)}
    return metrics | {f"buffer/age_{age}": float(occupancy.get(version + 1 - age, 0)) for age in range(bound + 1)}


def length_metrics(sampled: list[int]) -> dict[str, float]:
    """Return mean and 90th percentile of the lengths of all rollouts sampled during the step; empty without any.

    Compared with length/mean, they show if trained rollouts are shorter than the sampled ones.
    """
    if not sampled:
        return {}
    return {"length/sampled_mean": float(np.mean(sampled)), "length/sampled_p90": float(np.percentile(sampled, 90))}


def update_metrics(updates: Rows[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of a step's updates: the mean, the sum or the first update's value, as `Metric.over_updates`
    says.

    Metrics of tokens of one age are weighted by the share of these tokens. The mismatch is taken from the first
    update, whose weights sampled the tokens. Adds ratio/clipped_first: the share of tokens that are clipped in the
    first update, before the policy has moved. It is left out if the ratio is relative to older weights.
    """
    measured_updates = [update for update in updates if update]
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(chain.from_iterable(measured_updates)):
        updates_with_name = [update for update in measured_updates if name in update]
        values = [update[name] for update in updates_with_name]
        row = installed_rows().find(name)
        age = MISMATCH_BY_AGE.pattern.fullmatch(name)
        if row and row.over_updates == "first":
            metrics[name] = values[0]
        elif row and row.over_updates == "sum":
            metrics[name] = sum(values)
        else:
            shares = [update[AGE_SHARE.name_of(age[1])] for update in updates_with_name] if age else None
            metrics[name] = float(np.average(values, weights=shares))
    first = measured_updates[0] if measured_updates else {}
    clipped_shares = [first[row.name] for row in (CLIPPED_LOW, CLIPPED_HIGH) if row.name in first]
    # The importance weight is reported only if the ratio is relative to log-probs that the trainer computed.
    if clipped_shares and (IMPORTANCE.name in first or first.get(AGE_SHARE.name_of(0), 1.0) == 1.0):
        metrics[FIRST_CLIPPED.name] = sum(clipped_shares)
    return metrics


def refit_metrics(report: RefitReport) -> dict[str, float]:
    """Return the metrics of a refit; empty if engines were lost during the refit."""
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
