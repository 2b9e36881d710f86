"""Rewards tried on the first row before anything starts, as a run tries them once it has its data."""

from dataclasses import replace

from rlctl.config.schema import GrpoConfig
from rlctl.rewards.scorer import Score, Scorer
from rlctl.rollout.scoring import sample_item


def try_rewards(config: GrpoConfig) -> Score:
    """Score the first row of data.train, answered with its own answer.

    Raises UnusableError for rewards that are no use, DataError for a row or a tokenizer that is none.
    """
    from rlctl.data.load import load_chat, load_prompts, read_rows

    # Of several sources the first.
    given = next(iter(config.data.train.sources.values()), config.data.train)
    section, first = replace(given, limit=1), replace(config, data=replace(config.data, max_prompt_length=None))
    rows = read_rows(first, section)
    prompts, _ = load_prompts(first, section, load_chat(first, config.model.path), rows)
    with Scorer(config.rewards) as scorer:
        return scorer.try_on_sample(sample_item(prompts[0]))
