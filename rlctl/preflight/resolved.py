"""Values behind the `auto`s and nulls of a config, and values that follow from others: one frozen value for all. Pure.

`refit.transport` follows from the placement (`placement.transport_of`), `refit.mode` from an engine's free memory
(`generation`), `data.chat_template` from the tokenizer (`data.make_chat`).
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from rlctl.config.grpo_schema import AdvantageScope, UserAdvantageSection, UserLossSection
from rlctl.config.schema import GrpoConfig, RunConfig
from rlctl.models.model_sizes import ModelSizes
from rlctl.preflight.columns import AGE, PROXIMAL_LOG_PROB, REFERENCE_LOG_PROB, Role, columns_problem, computed
from rlctl.utils.plugins import load_object

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Resolved:
    """A config as it runs on a kind of device.

    A property is computed when it is read, so that a broken value ends only the checks that need it. Properties of
    generation and of the loss exist in a GRPO run alone.
    """

    config: RunConfig
    # None before it is known: only stated dtypes can be read then.
    device: Device | None = None

    @property
    def sampling(self) -> GrpoConfig | None:
        """Config that engines sample by, None without engines: a GRPO run's own.

        That of an SFT run is its validation's recipe, over the run's own model, trainer and deadlines.
        """
        config = self.config
        if isinstance(config, GrpoConfig):
            return config
        recipe, own = config.validation.recipe, config.placement
        if recipe is None or config.validation.every == 0:
            return None
        return replace(
            recipe,
            run=replace(config.run, seed=recipe.run.seed),
            model=replace(config.model, max_length=recipe.model.max_length),
            trainer=config.trainer,
            placement=replace(recipe.placement, trainer=own.trainer, cpus_per_process=own.cpus_per_process),
        )

    @property
    def validates(self) -> bool:
        """True if there is something to measure every `validation.every` steps."""
        config = self.config
        recipe = not isinstance(config, GrpoConfig) and config.validation.recipe is not None
        return config.validation.every > 0 and (config.data.has_validation or recipe)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        config = self.config
        return config.grpo.num_steps if isinstance(config, GrpoConfig) else config.sft.num_steps

    @property
    def dtype(self) -> Dtype:
        """Compute dtype of the trainer. auto: bfloat16 has no fast kernels, nor enough digits for tests, on CPU."""
        own = self.config.trainer.dtype
        if own == "auto":
            return "float32" if self._known == "cpu" else "bfloat16"
        return own

    @property
    def generation_dtype(self) -> Dtype:
        """Dtype of an engine's weights. auto: the trainer's."""
        own = self.grpo.generation.dtype
        return self.dtype if own == "auto" else own

    @property
    def export_dtype(self) -> Dtype:
        """Dtype of an exported Hugging Face folder. auto: the trainer's."""
        own = self.config.checkpoint.export_dtype
        return self.dtype if own == "auto" else own

    @property
    def checksum(self) -> Literal["all", "sampled", "off"]:
        """Items whose bytes are compared at each refit."""
        own = self.grpo.refit.checksum
        if own == "auto":
            return "all" if self._known == "cpu" else "sampled"
        return own

    @property
    def max_age(self) -> int:
        """Largest age of a group in steps: 0 in a synchronous run."""
        rules = self.grpo.async_
        return rules.max_trajectory_age_steps if rules.enabled else 0

    @property
    def colocated(self) -> bool:
        """True if engines take turns with the trainer on its devices."""
        own = self.grpo.placement.colocated
        return not self.grpo.async_.enabled if own is None else own

    @property
    def shares_devices(self) -> bool:
        """True if engines are on the trainer's devices; on a CPU they always are, and never sleep."""
        sampling = self.sampling
        return sampling is not None and Resolved(sampling).colocated

    @property
    def cuts_distribution(self) -> bool:
        """True if top_p or top_k cut the distribution, so that engines give larger log-probs than the trainer."""
        return self.grpo.generation.top_p < 1 or self.grpo.generation.top_k > 0

    @property
    def compares_apart(self) -> bool:
        """True if trainer and engines are compared on tokens sampled for the check (`health.parity_every`).

        A step's own tokens tell the gap where the whole distribution of the newest weights sampled them.
        """
        return self.grpo.async_.enabled or self.cuts_distribution

    @property
    def proximal(self) -> Literal["rollout", "recompute"]:
        """Old policy of the loss's ratio."""
        loss = self.grpo.grpo.loss
        if loss.proximal != "auto":
            return loss.proximal
        own = self.grpo.async_.enabled or self.cuts_distribution or loss.recomputes
        return "recompute" if own else "rollout"

    @property
    def on_policy_ratio(self) -> bool:
        """True if the proximal policy needs no separate pass: it is the policy being updated.

        That is so with one update a step: proximal and current log-probs are of the same weights, the ratio is 1 and
        only its gradient counts.
        """
        own = self.grpo.grpo.loss.force_on_policy_ratio
        once = self.grpo.grpo.updates_per_step == 1
        return self.proximal == "recompute" and (once if own is None else own)

    @property
    def computed_columns(self) -> dict[str, Role]:
        """Name -> role of the columns that a step computes before its advantages and updates."""
        if not isinstance(self.config, GrpoConfig):
            return {}
        recomputed = self.proximal == "recompute" and not self.on_policy_ratio
        return computed({PROXIMAL_LOG_PROB.name, *self._own_columns} if recomputed else self._own_columns)

    @property
    def frozen_roles(self) -> tuple[Role, ...]:
        """Roles besides the policy whose log-probs the loss or the advantage reads."""
        roles = computed(self._own_columns).values() if isinstance(self.config, GrpoConfig) else ()
        return tuple(role for role in dict.fromkeys(roles) if role != "policy")

    @property
    def _own_columns(self) -> set[str]:
        """Columns that the KL term reads, that the advantage reads, or that the user's loss names."""
        loss = self.grpo.grpo.loss
        named = (_declared(loss.name, "columns") or ()) if isinstance(loss, UserLossSection) else ()
        own = set() if columns_problem(named) else set(named)
        return {*own, *self.advantage_columns, *([REFERENCE_LOG_PROB.name] if loss.kl_coef > 0 else [])}

    @property
    def advantage_columns(self) -> tuple[str, ...]:
        """Columns that the advantage names; none where they are no names, which a check says."""
        section = self.grpo.grpo.advantage
        if not isinstance(section, UserAdvantageSection):
            return section.columns
        named = _declared(section.name, "columns") or ()
        return () if columns_problem(named) else tuple(named)

    @property
    def missing_columns(self) -> dict[str, str]:
        """Name -> reason, of columns that no loss or advantage of this run can read."""
        if self.grpo.async_.enabled:
            return {}
        return {AGE.name: "a synchronous run has none, for no token is older than the weights; set async.enabled=true"}

    @property
    def whole_rollouts(self) -> bool:
        """True if the loss reads all rows of a rollout together, so that one micro-batch must hold them."""
        loss = self.grpo.grpo.loss
        if isinstance(loss, UserLossSection):
            return _user_loss_needs_whole_rollouts(self.grpo)
        return loss.whole_rollouts

    @property
    def streams_training(self) -> bool:
        """True if a step's gradients begin before all of its groups are sampled.

        This takes one update a step, of values that are known when a group is: no advantage of the step's whole batch.
        """
        once = self.grpo.grpo.updates_per_step == 1 and not self.computed_columns and self.advantage_scope == "group"
        return self.grpo.async_.enabled and self.grpo.async_.streamed_training and once

    @property
    def advantage_scope(self) -> AdvantageScope:
        """Rollouts that one advantage depends on: those of its group, or all of the step."""
        section = self.grpo.grpo.advantage
        if isinstance(section, UserAdvantageSection):
            return "batch" if _declared(section.name, "scope") == "batch" else "group"
        return section.scope

    @property
    def sequences_per_update(self) -> int:
        """Rollouts or samples that one optimizer update trains on."""
        if not isinstance(self.config, GrpoConfig):
            return self.config.sft.batch_size
        own = self.config.grpo
        return own.num_prompts_per_step * own.num_generations_per_prompt // own.updates_per_step

    def max_length(self, limit: int) -> int:
        """Return the longest sequence of the run in tokens. limit: the model's."""
        own = self.config.model.max_length or limit
        episode = self.config.environment.max_length if isinstance(self.config, GrpoConfig) else None
        return own if episode is None else min(own, episode)

    def trainer_threads(self, cores: int, ranks: int, engines: int) -> int:
        """Return the CPU threads of one of `ranks` trainer ranks that share a machine of `cores` with engines.

        Engines that sample while it trains keep a core each: on two cores, two threads next to an engine made the tiny
        run's asynchronous step 0.63 s, one thread 0.57 s.
        """
        beside = engines if isinstance(self.config, GrpoConfig) and self.config.async_.enabled else 0
        return self.config.trainer.threads or max(1, (cores - beside) // ranks)

    @property
    def _known(self) -> Device:
        assert self.device is not None, "it depends on the device, which is not known yet"
        return self.device

    @property
    def grpo(self) -> GrpoConfig:
        """The config of a GRPO run."""
        assert isinstance(self.config, GrpoConfig), "an SFT run generates nothing"
        return self.config


@cache
def _loaded(name: str) -> Any:
    """Return a user's class of a loss or advantage; None if it cannot be imported, which a check says."""
    try:
        return load_object(name)
    except Exception:
        return None


def _declared(name: str, what: str) -> Any:
    """Return the declaration of a user's class; None if there is none."""
    return getattr(_loaded(name), what, None)


def _user_loss_needs_whole_rollouts(config: GrpoConfig) -> bool:
    """Return True if a user's loss says so; False if it cannot be made, which a check says."""
    try:
        return bool(_loaded(config.grpo.loss.name).from_config(config).needs.whole_rollouts)
    except Exception:
        return False


def longest_rollout(config: RunConfig, sizes: ModelSizes | None) -> int | None:
    """Return the tokens that one micro-batch must hold, if they are known before the data is read.

    They are those of the longest sequence. Where the loss needs whole rollouts and a template may rewrite their history
    at each turn, a rollout has a sequence for each turn. A rollout function has rows as it likes: of one row here.
    """
    longest = longest_sequence(config, sizes)
    if longest is None or not isinstance(config, GrpoConfig):
        return longest
    section = config.environment
    strips = section.enabled and section.history == "strip"
    return longest * section.max_turns if strips and Resolved(config).whole_rollouts else longest


def longest_sequence(config: RunConfig, sizes: ModelSizes | None) -> int | None:
    """Return the tokens of the longest sequence of the run, if they are known before the data is read."""
    limit = sizes.max_positions if sizes else config.model.max_length
    own = None if limit is None else Resolved(config).max_length(limit)
    prompt = config.data.max_prompt_length
    if prompt is None or not isinstance(config, GrpoConfig):
        return own
    both = prompt + config.generation.max_new_tokens
    return both if own is None else min(own, both)


def device_of(gpus: int) -> Device:
    """Return the kind of device of a machine or cluster with `gpus` GPUs."""
    return "cuda" if gpus else "cpu"
