"""Records of groups of rollouts for rollouts.jsonl, which `telemetry/rollouts_file.py` writes and reads."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.config.schema import GrpoConfig
from rlctl.grpo.batch import TaskOutcomes, TrainingBatch
from rlctl.rollout.types import Decode, Rollout, RolloutGroup
from rlctl.telemetry.exact_tokens import EXACT, KeyUse, TokenRow, pack
from rlctl.telemetry.jsonl import Record

# (task id, index of the rollout in its group) -> float32 [N]: advantages of the rollout's trained tokens in all rows.
Advantages = dict[tuple[str, int], NDArray[np.float32]]


def step_records(
    groups: Sequence[RolloutGroup], batch: TrainingBatch, decode: Decode, keys: KeyUse | None = None
) -> list[Record]:
    """Return one record for each group of a step, with outcome and advantages. batch: the samples that were trained."""
    records = group_records(groups, decode, keys, _advantages(batch, {group.task.id for group in groups}))
    return [{"outcome": _outcome_text(record["task"], batch.outcomes), **record} for record in records]


def group_records(
    groups: Sequence[RolloutGroup], decode: Decode, keys: KeyUse | None = None, advantages: Advantages | None = None
) -> list[Record]:
    """Return one record for each group.

    decode: must keep special tokens, which show how a text ended. keys: see `recorded_keys`; None: records have no
    token ids.
    """
    advantages = advantages or {}
    return [
        {
            "task": group.task.id,
            "prompt": group.task.text,
            "answer": group.task.answer,
            "rollouts": [
                _rollout_record(rollout, group.task.tokens, decode, advantages.get((group.task.id, rollout.id.index)))
                for rollout in group.rollouts
            ],
            **({EXACT: pack([_token_rows(rollout) for rollout in group.rollouts], keys)} if keys else {}),
        }
        for group in groups
    ]


def recorded_keys(config: GrpoConfig, tokens: bool) -> KeyUse | None:
    """Return the use of KV-cache entries after a weight update: "recomputed", "kept" or "reused".

    Readers of records with token ids need it to recompute log-probs. tokens: False if records have no token ids; the
    result is then None.
    """
    if not tokens:
        return None
    if config.async_.recompute_kv_cache_after_weight_updates:
        return "recomputed"
    return "kept" if config.generation.reset_prefix_cache_after_weight_updates else "reused"


def _advantages(batch: TrainingBatch, tasks: set[str]) -> Advantages:
    """Return the advantages of every trained rollout of these tasks. tasks: ids."""
    rows = defaultdict[tuple[str, int], list[NDArray[np.float32]]](list)
    for place, sample in zip(batch.places, batch.sequences):
        if place[0] in tasks:
            rows[place].append(sample.columns["advantage"][sample.mask])
    return {place: np.concatenate(parts) for place, parts in rows.items()}


def _outcome_text(task: str, outcomes: TaskOutcomes) -> str:
    """Return the outcome of a task, for example "trained" or "filtered: all rewards equal"; empty if it has none."""
    for state, reasons in (("filtered", outcomes.filtered), ("dropped", outcomes.dropped)):
        for reason, ids in reasons.items():
            if task in ids:
                return f"{state}: {reason}"
    return "trained" if task in outcomes.trained else ""


def _rollout_record(
    rollout: Rollout, prompt: Sequence[int], decode: Decode, advantages: NDArray[np.float32] | None
) -> dict[str, Any]:
    score = rollout.score
    worth = np.zeros(0) if advantages is None else advantages
    varied = {"advantages": [float(worth.min()), float(worth.max())]} if len(worth) and np.ptp(worth) else {}
    versions, counts = np.unique(rollout.sampled_versions, return_counts=True)
    return {
        "index": rollout.id.index,
        "text": _text_parts(rollout, prompt, decode),
        "tokens": rollout.num_sampled,
        "finish": rollout.finish,
        **({"episode": asdict(rollout.episode)} if rollout.episode else {}),
        "reward": rollout.reward,
        "rewards": score.parts if score else {},
        "right": score.right if score and score.value is not None and score.parts else None,
        "failed": score.failed if score else None,
        **({"reasons": score.reasons} if score and score.reasons else {}),
        "advantage": float(worth.mean()) if len(worth) else None,
        **varied,
        "versions": {str(version): int(count) for version, count in zip(versions, counts)},
    }


def _token_rows(rollout: Rollout) -> list[TokenRow]:
    return [TokenRow(row.tokens, row.sampled, row.log_probs, row.versions, row.turns) for row in rollout.rows]


def _text_parts(rollout: Rollout, prompt: Sequence[int], decode: Decode) -> list[tuple[str, bool]]:
    """Return the rollout's text after the prompt in pieces: (text, True if the piece was sampled).

    If the rollout does not begin with the prompt's tokens, the pieces cover its whole text.
    """
    start = len(prompt) if rollout.tokens[: len(prompt)].tolist() == list(prompt) else 0
    tokens = rollout.tokens[start:]
    sampled = rollout.sampled[start:]
    edges = np.flatnonzero(np.diff(sampled)) + 1
    pieces = [piece for piece in np.split(tokens, edges) if len(piece)]
    marks = [bool(piece[0]) for piece in np.split(sampled, edges) if len(piece)]
    return list(zip(decode([piece.tolist() for piece in pieces]), marks))
