"""Contradictions between values that are each fine alone. Pure but for looking at the files a config names.

Every check is a generator of problems over a `View`. A value that was already found wrong is a `Broken`: a
check that needs it ends there without a word, so that one mistake is reported once and all others still are.

Why `importance_cap` without `proximal: recompute` is a note and no error: the cap stands in configs/grpo.yaml, so
that switching to `recompute` corrects by itself; under `rollout` the ratio is already taken against the policy
that sampled, and there is nothing left to correct. `updates_per_step` above 1 is fine with `rollout` for the
same reason. `top_p` or `top_k` with `rollout` is an error: the generator then returns log-probs of the cut
distribution, which are larger than the trainer's, so every ratio is below 1 before the policy has changed.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from rlctl.config.builtin import is_shipped
from rlctl.config.errors import BrokenValueError, ModelError, Problem
from rlctl.config.plugins import needs_answers
from rlctl.config.provenance import Origin
from rlctl.config.schema import GrpoConfig, RunConfig, SftConfig
from rlctl.models.model_sizes import ModelSizes, config_file, read_sizes, sizes_of
from rlctl.models.weight_headers import check_weights
from rlctl.preflight.backend import backend_of
from rlctl.preflight.check_async import WISE_AGE, check_async, check_corrections
from rlctl.preflight.check_checkpoint_metric import best_notes
from rlctl.preflight.check_inputs import check_dataset, check_reward, check_run_folder, check_run_name
from rlctl.preflight.check_offload import check_offload, idle_offload
from rlctl.preflight.check_parallel import check_backend, check_batch
from rlctl.preflight.check_trackers import check_trackers
from rlctl.preflight.plan import longest_sequence
from rlctl.preflight.resolved import Resolved

Problems = Iterator[Problem]
T = TypeVar("T")


@dataclass
class View:
    """A config and its origins, as the checks read them."""

    config: RunConfig
    origins: dict[str, Origin]

    def problem(self, key: str, what: str, *others: str) -> Problem:
        """A problem of `key`, or of `key` against `others`: where the one was written that came in last.

        An override comes after the user's files, and those after what is shipped.
        """
        found = [self._origin(each) for each in (key, *others)]
        return Problem(str(max(found, key=_lateness)), key, what)

    def _origin(self, key: str) -> Origin:
        inside = (origin for name, origin in self.origins.items() if name.startswith(f"{key}."))
        return self.origins.get(key) or next(inside, Origin())

    @cached_property
    def architecture(self) -> ModelSizes | None:
        """The model's sizes, or None when its config.json is not here or wrong (`_model` says so)."""
        try:
            return sizes_of(self.config.model.path)
        except ValueError:
            return None


def _lateness(origin: Origin) -> tuple[int, int]:
    users = origin.file is not None and not is_shipped(origin.file)
    return origin.override, int(users)


def check(config: RunConfig, origins: dict[str, Origin], *, resume: bool, away: bool = False) -> list[Problem]:
    """Every contradiction in `config`, whose wrong values are `Broken`. resume: its run may exist. away: it is to be
    elsewhere, where what is installed is looked at again."""
    view = View(config, origins)
    shared = (_model, _lengths, _micro_batch, _optimizer, _offload, _parallel, _chat, _validation, _data, _profile)
    checks = [each(view) for each in shared]
    if isinstance(config, GrpoConfig):
        checks += [each(view, config) for each in (_rewards, _sampling, _engines, _async)]
    else:
        checks += [_graph(view, config)]
    checks += [_batch(view), _folder(view)] if resume else [_batch(view), _run(view), _folder(view)]
    checks += [] if away else [_trackers(view)]
    found: list[Problem] = []
    for problems in checks:
        # What a check found before it met a broken value counts.
        with suppress(BrokenValueError):
            found.extend(problems)
    return found


def notes(config: RunConfig, origins: dict[str, Origin]) -> list[str]:
    """One line for every override that changes nothing, and for what loses the best checkpoints.

    Of what changes nothing only overrides: a resolved config writes every value.
    """
    given = {key: origin for key, origin in origins.items() if origin.override}
    idle: dict[str, str | bool | None] = {
        **backend_of(config.trainer).idle_keys(config.trainer),
        **idle_offload(config),
    }
    if isinstance(config, GrpoConfig):
        idle |= _idle(config)
        if not config.async_.enabled:
            idle |= dict.fromkeys((key for key in given if key.startswith("async.")), "async.enabled is false")
    said = [f"{given[key]}: no effect while {why}" for key, why in idle.items() if why and key in given]
    age = "async.max_trajectory_age_steps"
    if age in given and isinstance(config, GrpoConfig) and Resolved(config).max_age > WISE_AGE:
        said.append(f"{given[age]}: a lag above {WISE_AGE} steps costs accuracy (AReaL, arXiv 2505.24298, table 3)")
    return said + best_notes(config)


def _idle(config: GrpoConfig) -> dict[str, str | bool | None]:
    """Key -> why it has no effect, where it has none."""
    loss, schedule = config.grpo.loss, config.trainer.optimizer.schedule
    rollout = Resolved(config).proximal == "rollout" and "grpo.loss.proximal is rollout"
    return {
        "grpo.loss.kl_estimator": loss.kl_coef == 0 and "grpo.loss.kl_coef is 0",
        "grpo.loss.force_on_policy_ratio": rollout,
        "grpo.loss.importance_cap": rollout,
        "async.streamed_training": not Resolved(config).streams_training and _not_streamed(config),
        "trainer.optimizer.min_lr_ratio": schedule == "constant" and "the schedule is constant",
        "validation.temperature": config.validation.every == 0 and "validation.every is 0",
    }


def _not_streamed(config: GrpoConfig) -> str | None:
    """Why a step is not trained in parts, though it might be."""
    if not config.async_.streamed_training:
        return None
    if config.grpo.updates_per_step > 1:
        return f"grpo.updates_per_step is {config.grpo.updates_per_step}"
    return "a pass over log-probs comes before the update"


def _model(view: View) -> Problems:
    path = view.config.model.path
    file = config_file(path)
    if file is None:
        if os.path.isdir(path):
            yield view.problem("model.path", f"{path} has no config.json; needed: a Hugging Face model folder")
        elif os.path.exists(path):
            yield view.problem("model.path", f"{path} is a file; needed: a Hugging Face model folder")
        return
    try:
        read_sizes(file)
    except ModelError as error:
        yield view.problem("model.path", str(error))
        return
    # What the hub's cache holds of a model may be a part; the run fetches the rest, and looks at it then.
    if not view.config.model.random_init and os.path.isdir(path):
        if any(file.parent.glob("model*.safetensors")):
            try:
                check_weights(file.parent)
            except (ModelError, OSError) as error:
                yield view.problem("model.path", str(error))
        else:
            what = f"{file.parent} has no model.safetensors; model.random_init=true starts from random weights"
            yield view.problem("model.path", what, "model.random_init")
    tokenizer = Path(view.config.model.tokenizer or file.parent)
    if os.path.isfile(tokenizer):
        yield view.problem("model.tokenizer", f"{tokenizer} is a file; needed: a folder that has a tokenizer.json")
    elif os.path.isdir(tokenizer) and not any((tokenizer / name).is_file() for name in _TOKENIZER_FILES):
        key = "model.path" if view.config.model.tokenizer is None else "model.tokenizer"
        yield view.problem(key, f"{tokenizer} has no tokenizer.json; set model.tokenizer to a folder that has one")


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def _lengths(view: View) -> Problems:
    config, sizes = view.config, view.architecture
    limit = sizes.max_positions if sizes else None
    own = config.model.max_length
    if own is not None and limit is not None and own > limit:
        what = f"must be at most {limit}, the model's max_position_embeddings, not {own}"
        yield view.problem("model.max_length", what)
    longest = min((value for value in (own, limit) if value is not None), default=None)
    if longest is None:
        return
    below, prompt = f"must be below the longest sequence, {longest}, not ", config.data.max_prompt_length
    if isinstance(config, SftConfig):
        if prompt is not None and prompt >= longest:
            yield view.problem("data.max_prompt_length", below + str(prompt), "model.max_length")
        return
    answer = config.generation.max_new_tokens
    if answer >= longest:
        yield view.problem("generation.max_new_tokens", below + str(answer), "model.max_length")
    elif prompt is not None and prompt + answer > longest:
        both = f"{prompt} + generation.max_new_tokens {answer} = {prompt + answer}"
        what = f"{both} is above the longest sequence, {longest}; try {longest - answer}"
        yield view.problem("data.max_prompt_length", what, "generation.max_new_tokens", "model.max_length")


def _micro_batch(view: View) -> Problems:
    tokens, longest = view.config.trainer.micro_batch_tokens, longest_sequence(view.config, view.architecture)
    if longest is not None and tokens < longest:
        lower = ["model.max_length", *["data.max_prompt_length"] * isinstance(view.config, GrpoConfig)]
        advice = f"raise it, or lower {' or '.join(lower)}"
        what = f"must hold the longest sequence, {longest} tokens, not {tokens}; {advice}"
        yield view.problem("trainer.micro_batch_tokens", what, *lower, "generation.max_new_tokens")


def _optimizer(view: View) -> Problems:
    betas = view.config.trainer.optimizer.betas
    if len(betas) != 2:
        yield view.problem("trainer.optimizer.betas", f"must be two numbers, not {len(betas)}")


def _offload(view: View) -> Problems:
    for key, what, others in check_offload(view.config.trainer):
        yield view.problem(key, what, *others)


def _chat(view: View) -> Problems:
    data = view.config.data
    if data.system_prompt is not None and data.chat_template == "none":
        yield view.problem("data.system_prompt", _NO_TEMPLATE, "data.chat_template")


_NO_TEMPLATE = "needs a chat template, but data.chat_template is none"


def _validation(view: View) -> Problems:
    validation = view.config.validation
    if validation.num_generations > 1 and validation.temperature == 0:
        count = validation.num_generations
        what = f"{count} greedy answers are all the same; set validation.temperature above 0, or 1 here"
        yield view.problem("validation.num_generations", what, "validation.temperature")


def _data(view: View) -> Problems:
    data, config = view.config.data, view.config
    if data.train.path is None:
        yield view.problem("data.train.path", "not set: a JSONL or Parquet file, or a hub dataset name")
    answered = isinstance(config, SftConfig) or needs_answers(config.rewards)
    for name, dataset in (("train", data.train), ("validation", data.validation)):
        for where, key, what in check_dataset(dataset, answered=answered):
            full = f"data.{name}.{key}"
            yield Problem(where, full, what) if where else view.problem(full, what)


def _rewards(view: View, config: GrpoConfig) -> Problems:
    if not config.rewards:
        yield view.problem("rewards", "is empty: at least one reward, for example `- name: exact`")
        return
    for index, reward in enumerate(config.rewards):
        with suppress(BrokenValueError):
            for key, what in check_reward(reward):
                yield view.problem(f"rewards.{index}.{key}", what)
    told = [index for index, reward in enumerate(config.rewards) if reward.correct_at is not None]
    if len(told) > 1:
        what = f"one reward decides what is right; rewards.{told[0]} has a correct_at too: leave one at null"
        yield view.problem(f"rewards.{told[1]}.correct_at", what)
    if all(reward.weight == 0 for reward in config.rewards):
        yield view.problem("rewards.0.weight", "the weights are all 0: nothing would be learnt")


def _parallel(view: View) -> Problems:
    trainer = view.config.trainer
    sizes = _unless_broken(lambda: view.architecture)
    # None too where there is none: `_batch` says so.
    sequences = _unless_broken(lambda: Resolved(view.config).sequences_per_update) or None
    for found in check_backend(trainer, sizes, sequences):
        with suppress(BrokenValueError):
            yield from (view.problem(key, what, *others) for key, what, others in found)


def _batch(view: View) -> Problems:
    sizes = _unless_broken(lambda: view.architecture)
    yield from (view.problem(key, what, *others) for key, what, others in check_batch(view.config, sizes))


def _unless_broken(value: Callable[[], T]) -> T | None:
    try:
        return value()
    except BrokenValueError:
        return None


def _graph(view: View, config: SftConfig) -> Problems:
    graph, longest = config.ray_compiled_graph, longest_sequence(config, view.architecture)
    if graph.warmup_seq_len and longest is not None and graph.warmup_seq_len > longest:
        what = f"must be at most the longest sequence, {longest}, not {graph.warmup_seq_len}"
        yield view.problem("ray_compiled_graph.warmup_seq_len", what, "model.max_length")


def _sampling(view: View, config: GrpoConfig) -> Problems:
    if Resolved(config).proximal == "rollout":
        why = "with grpo.loss.proximal=rollout the ratios would be off; keep {} or set grpo.loss.proximal=recompute"
        if config.generation.top_p < 1:
            yield view.problem("generation.top_p", why.format("1"), "grpo.loss.proximal")
        if config.generation.top_k > 0:
            yield view.problem("generation.top_k", why.format("0"), "grpo.loss.proximal")


def _async(view: View, config: GrpoConfig) -> Problems:
    for found in (check_async(config), check_corrections(config)):
        with suppress(BrokenValueError):
            yield from (view.problem(key, what, *others) for key, what, others in found)


def _engines(view: View, config: GrpoConfig) -> Problems:
    sizes, size = view.architecture, config.generation.tensor_parallel_size
    if sizes is not None and sizes.activation != "silu":
        yield view.problem(
            "model.path", f"hidden_act {sizes.activation}: vLLM samples from silu models of this kind alone"
        )
    if sizes is not None and sizes.heads % size:
        fits = [count for count in range(1, sizes.heads + 1) if sizes.heads % count == 0]
        what = f"must divide the model's {sizes.heads} attention heads ({', '.join(map(str, fits))}), not {size}"
        yield view.problem("generation.tensor_parallel_size", what)
    elif sizes is not None and sizes.kv_heads % size and size % sizes.kv_heads:
        what = f"must divide the model's {sizes.kv_heads} key-value heads or be a multiple of them, not {size}"
        yield view.problem("generation.tensor_parallel_size", what)


def _profile(view: View) -> Problems:
    updates = view.config.telemetry.profile_updates
    if updates is not None and (len(updates) != 2 or updates[0] > updates[1]):
        yield view.problem("telemetry.profile_updates", f"must be [first, last], not {updates}")


def _trackers(view: View) -> Problems:
    for index, what in check_trackers(view.config.telemetry.trackers):
        yield view.problem(f"telemetry.trackers.{index}.name", what)


def _run(view: View) -> Problems:
    for what in check_run_name(view.config.run):
        yield view.problem("run.name", what)


def _folder(view: View) -> Problems:
    for what in check_run_folder(view.config.run):
        yield view.problem("run.dir", what)
