"""Choice of values for the keys at `auto`, from the model's sizes and the device's memory. Each has a reason as text.

Pure. On a CPU the values are constants: tests of exact numbers rely on them, and packs of other sizes are no faster
there. On GPUs the forecast of `memory.py` decides. The forecast is an estimate, so a choice may fill at most `USABLE`
of a device.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import product
from typing import Any

from rlctl.config.grpo_schema import GenerationSection
from rlctl.config.schema import GrpoConfig
from rlctl.config.trainer_schema import TrainerSection
from rlctl.models.adapters import AdapterSpec
from rlctl.models.facts import ModelSizes
from rlctl.preflight.backend import backend_of
from rlctl.preflight.machine import Device
from rlctl.preflight.memory import engine_bytes, placed_states, refit_bytes, token_bytes, trainer_bytes
from rlctl.preflight.trainer_settings import DTYPE_BYTES, Choice, Dtype, GenerationSettings, TeacherUse, TrainerSettings

GIB = 1 << 30
# Share of a device that a forecast may fill. Measured peaks were 80 to 95% of their forecasts (bench/README.md).
USABLE = 0.88
# Sizes of a pack in tokens on GPUs. The first that fits is taken. Smaller packs leave an H200 waiting for kernel
# launches.
_PACKS = (32768, 16384, 8192)
# Smallest pack with which an engine may stay awake. Staying awake saves 0.2 to 0.5 s a step; smaller packs cost more.
_LEAST_PACK_AWAKE = 16384
# Largest pack on a CPU that is made to hold all rows of a rollout. All packs of a run have the same size.
_MOST_FOR_ROLLOUT = 32768
# Chunk sizes in tokens, and the share of a device that the logits of one chunk may take. Large chunks are faster: each
# chunk adds to the float32 gradient of the output layer (0.4 ms for 152,000 x 1,024 numbers on an H200). An H100 gets
# chunks of 4,096 tokens for a vocabulary of 152,000.
_CHUNKS = (8192, 4096, 2048, 1024)
_CHUNK_SHARE = 0.06
_LEAST_SEQUENCES = 256
# vLLM has whole CUDA graphs for 512 sequences at most.
_MOST_SEQUENCES = 512
# Memory share of an engine that shares no device with a trainer. The rest has CUDA graphs and the weights that a refit
# receives.
_OWN_DEVICE_SHARE = 0.85
# On a device that trainer and engine use in turns: memory that a sleeping engine and an idle trainer keep.
_ASLEEP_BYTES = 5 * GIB
_RESTING_BYTES = 3 * GIB
_MOST_SHARE = 0.92
# Tokens added to each cached sequence: the last block of the cache is filled in part, see `launch.worker_specs`.
_ROOM = 32
# Most bytes of one head's float32 keys of a sequence for prefix caching on a CPU. Below 120 KiB a prefix hit changes no
# bit, see generation/README.md. Half of that allows for CPUs with smaller caches.
_EXACT_KEYS = 60 << 10
_ONE_CHUNK = "one chunk, which costs no memory"
# Memory share of an engine where sizes or memory are unknown, or where the forecast finds no room.
_UNKNOWN_SHARE = 0.6


@dataclass(frozen=True)
class Basis:
    """Facts from which the values are chosen."""

    trainer: TrainerSection
    dtype: Dtype
    device: Device
    # None if the model is not on this machine.
    facts: ModelSizes | None
    # Adapters that are trained in place of the weights; None: all weights are trained.
    adapters: AdapterSpec | None
    # Bytes of the smallest device; None when unknown.
    memory: int | None
    # Tokens of the longest sequence, and of the longest rollout that one micro-batch must hold; None when unknown.
    longest_sequence: int | None
    longest_rollout: int | None
    # Most tokens of a rank's share of an update; None: not bounded.
    update_tokens: int | None
    # True if engines are on the trainer's devices.
    shares_devices: bool
    # Number of trainer ranks on each node; empty: not known, or one node.
    ranks_by_node: tuple[int, ...]
    # Config by which the engines sample, and the dtype of their weights; None: only trainer keys are chosen.
    engines: "tuple[GrpoConfig, Dtype] | None"
    # Teacher of a divergence that an update computes; None for no such divergence. critic_bytes: as `TrainerSettings`.
    teacher: TeacherUse | None = None
    critic_bytes: int = 0


@dataclass(frozen=True)
class Chosen:
    """Settings of a run with a value for each `auto`, and the list of the values that were chosen."""

    trainer: TrainerSettings
    generation: GenerationSettings | None
    choices: tuple[Choice, ...]


def choose(basis: Basis) -> Chosen:
    """Return settings with a value for each `auto`. Other values of the config stay."""
    choices: list[Choice] = []
    trainer = _Section("trainer", basis.trainer, basis.dtype, choices)
    trainer.values |= {"adapters": basis.adapters, "update_tokens": basis.update_tokens, "teacher": basis.teacher}
    trainer.values["critic_bytes"] = basis.critic_bytes
    if basis.facts and basis.facts.one_sequence_a_row:
        trainer.values["row_tokens"] = basis.longest_sequence or 0
    engines = None
    if basis.engines:
        config, dtype = basis.engines
        engines = _Engines(config, dtype, basis.device, choices)
    _choose_replicas(basis, trainer)
    if basis.device == "cpu" or basis.facts is None or basis.memory is None:
        _choose_constants(basis, trainer, engines)
    else:
        assert basis.longest_sequence is not None
        forecast = _Forecast(basis, sizes=basis.facts, memory=basis.memory, longest=basis.longest_sequence)
        forecast.choose(trainer, engines)
    generation = GenerationSettings(**engines.values, cache_mib=engines.cache_mib) if engines else None
    return Chosen(TrainerSettings(**trainer.values), generation, tuple(choices))


class _Section:
    """A config section whose `auto` values are being replaced."""

    def __init__(
        self, name: str, section: TrainerSection | GenerationSection, dtype: Dtype, choices: list[Choice]
    ) -> None:
        self.values: dict[str, Any] = {**vars(section), "dtype": dtype}
        self._name = name
        # The caller's list: `fill` appends each choice.
        self._choices = choices

    def fill(self, key: str, choice: bool | int | float, reason: str) -> None:
        """Replace the value of `key` if it is `auto`, and record the choice."""
        if self.values[key] == "auto":
            self.values[key] = choice
            self._choices.append(Choice(f"{self._name}.{key}", choice, reason))


class _Engines(_Section):
    """The section `generation`, and the memory that an engine needs with the values chosen so far."""

    def __init__(self, config: GrpoConfig, dtype: Dtype, device: Device, choices: list[Choice]) -> None:
        super().__init__("generation", config.generation, dtype, choices)
        self._config = config
        self._dtype = dtype
        # MiB of the key-value cache, as in `GenerationSettings`.
        self.cache_mib: int | None = config.generation.kv_cache_mib if device == "cpu" else None

    def base_bytes(self, sizes: ModelSizes) -> int:
        """Return the bytes of the weights on one device of an engine."""
        return refit_bytes(sizes, self._dtype) // self._config.generation.tensor_parallel_size

    @property
    def in_flight(self) -> int:
        """Number of rollouts that one engine has at a time: its share of all steps in flight."""
        step = self._config.step_shape
        steps = 1 + self._config.async_.max_age
        return -(-step.prompts * step.group * steps // self._config.generation.num_engines)

    @property
    def cached_sequences(self) -> int:
        """Number of sequences that an engine's cache should hold: those being decoded, and episodes between two turns.

        A larger cache would only cost time at each sleep. Groups that replace filtered ones count. A rollout function
        may sample any number of branches, so its cache holds at least `max_num_seqs` sequences. A validation may have
        more rollouts than the cache holds; some then wait.

        While an environment answers, the engine decodes another episode. The cache therefore holds up to twice the
        sequences that are decoded at a time. In a cache without that room the episodes evict each other's prefixes, and
        each turn computes its prefix again: 0.57 times the tokens/s (Qwen3-1.7B, 8 turns of 128 tokens, 512 episodes,
        256 at a time, H200).
        """
        decoded = int(self.values["max_num_seqs"])
        rules = self._config.grpo.dynamic_sampling
        extra_share = rules.max_extra if rules.filter else 0
        open_rollouts = int(self.in_flight * (1 + extra_share))
        if self._config.rollout is not None:
            return max(decoded, min(2 * decoded, open_rollouts))
        if self._config.has_turns:
            return min(2 * decoded, open_rollouts)
        return min(decoded, open_rollouts)

    def fixed_bytes(self, sizes: ModelSizes) -> int:
        """Return the bytes that an engine takes of one GPU without its key-value cache."""
        items = engine_bytes(
            sizes=sizes,
            device="cuda",
            dtype=self._dtype,
            tensor_parallel_size=self.values["tensor_parallel_size"],
            max_num_seqs=self.values["max_num_seqs"],
        )
        return sum(items.values())

    def sequence_bytes(self, sizes: ModelSizes, longest: int) -> int:
        """Return the bytes of the key-value cache for one sequence of `longest` tokens."""
        return (longest + _ROOM) * token_bytes(sizes, self._dtype, self.values["tensor_parallel_size"])

    def needed_bytes(self, sizes: ModelSizes, longest: int, memory: int) -> int:
        """Return the bytes of one device for an engine: the config's share, or enough for `cached_sequences`."""
        written = self.values["gpu_memory_utilization"]
        if written != "auto":
            return int(written * memory)
        return self.fixed_bytes(sizes) + self.cached_sequences * self.sequence_bytes(sizes, longest)


@dataclass(frozen=True)
class _Fit:
    """A way to use a device's memory: pack size, checkpointing, and whether the engine sleeps."""

    tokens: int
    checkpointing: bool
    sleep: bool
    reason: str
    # Bytes that the trainer may fill, including logits it keeps for the backward pass. 0: an awake engine has the rest.
    limit: int


def _choose_replicas(basis: Basis, trainer: _Section) -> None:
    """Choose the number of copies of the training state. On one node it is 1, and no choice is recorded."""
    if len(basis.ranks_by_node) < 2:
        if trainer.values["replicas"] == "auto":
            trainer.values["replicas"] = 1
        return
    memory = basis.memory if basis.device == "cuda" else None
    is_memory_unknown = basis.device == "cuda" and memory is None
    replicas, reason = backend_of(basis.trainer).choose_replicas(
        trainer=TrainerSettings(**trainer.values),
        nodes=basis.ranks_by_node,
        sizes=None if is_memory_unknown else basis.facts,
        memory=memory,
        size=DTYPE_BYTES[basis.dtype],
    )
    trainer.fill("replicas", replicas, reason)


def _choose_constants(basis: Basis, trainer: _Section, engines: _Engines | None) -> None:
    """Choose constants for a CPU, and for GPUs while the model's sizes or the memory are not known."""
    on_gpus = basis.device == "cuda"
    reason = "until the model's sizes and the device's memory are known" if on_gpus else "on a CPU"
    rollout_tokens = basis.longest_rollout or 0
    tokens = max(8192, basis.longest_sequence or 0, min(rollout_tokens, _MOST_FOR_ROLLOUT))
    trainer.fill("compile", on_gpus, _why_compiled(on_gpus))
    trainer.fill("activation_checkpointing", False, reason)
    trainer.fill("micro_batch_tokens", tokens, reason + _left_out_fate(tokens, rollout_tokens))
    trainer.fill("logprob_chunk_tokens", 1024, reason)
    trainer.fill("logprob_kept_tokens", trainer.values["logprob_chunk_tokens"], _ONE_CHUNK)
    if engines:
        engines.fill("max_num_seqs", _LEAST_SEQUENCES, reason)
        engines.fill("gpu_memory_utilization", _UNKNOWN_SHARE, reason)
        engines.fill("sleep", on_gpus, reason)
        engines.fill("prefix_caching", *_choose_prefix_caching(basis))


@dataclass(frozen=True)
class _Forecast:
    """Choices for a model of these sizes on GPUs of `memory` bytes, by the forecast."""

    basis: Basis
    sizes: ModelSizes
    memory: int
    longest: int

    def choose(self, trainer: _Section, engines: _Engines | None) -> None:
        """Replace every `auto` in both sections."""
        trainer.fill("compile", True, _why_compiled(True))
        trainer.fill("logprob_chunk_tokens", *self._choose_chunk())
        if engines:
            engines.fill("max_num_seqs", *_choose_max_sequences(engines.in_flight))
            engines.fill("prefix_caching", *_choose_prefix_caching(self.basis))
        fit = self._first_fit(trainer, engines)
        fate = _left_out_fate(fit.tokens, self.basis.longest_rollout or 0)
        trainer.fill("micro_batch_tokens", fit.tokens, fit.reason + fate)
        activations = "no pack that fits keeps its activations" if fit.checkpointing else "activations fit"
        trainer.fill("activation_checkpointing", fit.checkpointing, activations)
        trainer.fill("logprob_kept_tokens", *self._choose_kept_tokens(trainer, fit))
        if engines:
            engines.fill("sleep", fit.sleep, self._why_asleep(fit.sleep, engines))
            memory_share = self._choose_memory_share(TrainerSettings(**trainer.values), engines)
            engines.fill("gpu_memory_utilization", *memory_share)
            engines.cache_mib = self._cache_mib(engines)

    def _why_asleep(self, sleeps: bool, engines: _Engines) -> str:
        """Return the reason why engines sleep or stay awake. With adapters it also says where the base weights wait."""
        if not self.basis.shares_devices:
            return "engines have devices of their own"
        if not sleeps:
            base = "; the base stays in both" if self.basis.adapters else ""
            return f"trainer and engine fit side by side{base}"
        reason = "trainer and engine do not fit side by side"
        if not self.basis.adapters:
            return reason
        base_gib = engines.base_bytes(self.sizes) / GIB
        return f"{reason}; a refit brings adapters alone, so {base_gib:.0f} GiB wait on the host"

    def _choose_chunk(self) -> tuple[int, str]:
        """Return the size in tokens of the largest chunk within `_CHUNK_SHARE` of the device, and the reason. A logit
        takes 8 bytes.
        """
        fitting = (tokens for tokens in _CHUNKS if tokens * self.sizes.vocab * 8 <= _CHUNK_SHARE * self.memory)
        tokens = next(fitting, _CHUNKS[-1])
        gib = tokens * self.sizes.vocab * 8 / GIB
        return tokens, f"logits of {gib:.1f} GiB, where {_CHUNK_SHARE:.0%} of the device may be"

    def _choose_kept_tokens(self, trainer: _Section, fit: _Fit) -> tuple[int, str]:
        """Return the number of tokens whose logits the backward pass finds kept, at least one chunk, and the reason."""
        chunk = trainer.values["logprob_chunk_tokens"]
        tokens = trainer.values["micro_batch_tokens"]
        checkpointing = trainer.values["activation_checkpointing"]

        def trained_bytes(kept_tokens: int) -> int:
            return self._training_bytes(trainer, tokens, checkpointing, kept_tokens)

        whole_chunks = range(chunk, tokens + 1, chunk)
        fitting = bisect_right(whole_chunks, fit.limit, key=trained_bytes)
        kept_tokens = whole_chunks[fitting - 1] if fitting else chunk
        if kept_tokens == chunk:
            return chunk, _ONE_CHUNK
        kept_gib = (kept_tokens - chunk) * self.sizes.vocab * DTYPE_BYTES[self.basis.dtype] / GIB
        return kept_tokens, f"{kept_gib:.1f} GiB of free memory; other logits are computed twice"

    def _first_fit(self, trainer: _Section, engines: _Engines | None) -> _Fit:
        """Return the first way to use the memory that fits.

        The order is: an awake engine next to large packs; large packs while the engine sleeps; then the same with
        activation checkpointing. If the loss needs whole rollouts, packs that hold the longest rollout come first; if
        none of these fits, training leaves out longer rollouts.
        """
        shared = self.basis.shares_devices
        usable = int(USABLE * self.memory)
        rollout_tokens = self.basis.longest_rollout or self.longest
        packs = self._possible_packs(trainer, rollout_tokens)
        written = trainer.values["activation_checkpointing"]
        recompute = (False, True) if written == "auto" else (written,)
        # (activation checkpointing, tokens of a pack), in the order of preference.
        trials = list(product(recompute, packs))
        training_bytes = {trial: self._training_bytes(trainer, trial[1], trial[0]) for trial in trials}
        room = usable - _ASLEEP_BYTES if shared else usable
        if rollout_tokens > self.longest:
            # Packs that hold the longest rollout; if none fits, smaller packs; else the written one.
            holding = [trial for trial in trials if trial[1] >= rollout_tokens and training_bytes[trial] <= room]
            trials = holding or [trial for trial in trials if trial[1] < rollout_tokens] or trials
        must_stay_awake = engines is not None and engines.values["sleep"] is False
        device_gib = f"{self.memory / GIB:.0f}"
        if engines and shared and engines.values["sleep"] in (False, "auto"):
            engine_need = engines.needed_bytes(self.sizes, self.longest, self.memory)
            moves_optimizer = trainer.values["offload_optimizer_for_generation"]
            for checkpointing, tokens in trials:
                rank_need = training_bytes[checkpointing, tokens]
                is_worth_it = tokens >= min(_LEAST_PACK_AWAKE, packs[0]) and checkpointing == recompute[0]
                fits = rank_need + engine_need <= usable and not moves_optimizer
                if fits and (is_worth_it or must_stay_awake):
                    reason = f"{rank_need / GIB:.0f} GiB beside an engine of {engine_need / GIB:.0f}, of {device_gib}"
                    return _Fit(tokens, checkpointing=checkpointing, sleep=False, reason=reason, limit=0)
            if must_stay_awake:
                # An engine that must stay awake takes at most half of the usable memory. Its cache is smaller then.
                room = usable - min(engine_need, usable // 2)
        checkpointing, tokens = next((trial for trial in trials if training_bytes[trial] <= room), trials[-1])
        reason = f"{training_bytes[checkpointing, tokens] / GIB:.0f} GiB of {device_gib} when it trains"
        return _Fit(tokens, checkpointing, sleep=shared and not must_stay_awake, reason=reason, limit=room)

    def _possible_packs(self, trainer: _Section, rollout_tokens: int) -> tuple[int, ...]:
        """Return the pack sizes to try in tokens, the largest first. A size in the config is the only one."""
        written = trainer.values["micro_batch_tokens"]
        if written != "auto":
            return (written,)
        packs = tuple(tokens for tokens in _PACKS if tokens >= self.longest) or (_round_up(self.longest),)
        if rollout_tokens > packs[0]:
            return (_round_up(rollout_tokens), *packs)
        return packs

    def _training_bytes(
        self, trainer: _Section, tokens: int, checkpointing: bool, kept_tokens: int | None = None
    ) -> int:
        """Return the bytes that a rank takes of its device while it trains packs of `tokens` tokens.

        kept_tokens: number of tokens whose logits are kept for the backward pass; None: one chunk.
        """
        trial = {"micro_batch_tokens": tokens, "activation_checkpointing": checkpointing}
        if trainer.values["logprob_kept_tokens"] == "auto":
            trial["logprob_kept_tokens"] = kept_tokens or trainer.values["logprob_chunk_tokens"]
        settings = TrainerSettings(**{**trainer.values, **trial})
        return sum(trainer_bytes(settings, self.sizes, "cuda").values())

    def _choose_memory_share(self, trainer: TrainerSettings, engines: _Engines) -> tuple[float, str]:
        """Return the share of a device's memory that an engine uses, and the reason."""
        if not self.basis.shares_devices:
            return _OWN_DEVICE_SHARE, "engines have devices of their own"
        needed_bytes = engines.needed_bytes(self.sizes, self.longest, self.memory)
        reason = f"a cache for {engines.cached_sequences} sequences of {self.longest:,} tokens"
        if engines.values["sleep"]:
            states = placed_states(trainer, self.sizes, "cuda", shared=True, phases=("generate",))["generate"]
            trainer_total = sum(state.device for state in states.values())
            free_bytes = int(_MOST_SHARE * self.memory) - trainer_total - _RESTING_BYTES
        else:
            trainer_total = sum(trainer_bytes(trainer, self.sizes, "cuda").values())
            free_bytes = int(USABLE * self.memory) - trainer_total
            if needed_bytes <= free_bytes:
                return -(-needed_bytes * 100 // self.memory) / 100, reason
        if free_bytes < engines.fixed_bytes(self.sizes) + engines.sequence_bytes(self.sizes, self.longest):
            return _UNKNOWN_SHARE, "by the forecast not one sequence fits beside the trainer's state"
        if needed_bytes > free_bytes:
            reason = f"what the trainer's {trainer_total / GIB:.0f} GiB leave"
        return int(min(free_bytes, needed_bytes) * 100 / self.memory) / 100, reason

    def _cache_mib(self, engines: _Engines) -> int | None:
        """Return the MiB of the key-value cache in an engine's share of a shared device; None where not one sequence
        fits.
        """
        if not self.basis.shares_devices:
            return None
        engine_share = int(engines.values["gpu_memory_utilization"] * self.memory)
        cache_bytes = engine_share - engines.fixed_bytes(self.sizes)
        return cache_bytes >> 20 if cache_bytes >= engines.sequence_bytes(self.sizes, self.longest) else None


def _why_compiled(on_gpus: bool) -> str:
    return "on GPUs: a step of Qwen3-1.7B is 1.65 times as fast (H200)" if on_gpus else "on a CPU"


def _choose_prefix_caching(basis: Basis) -> tuple[bool, str]:
    """Return whether engines cache prefixes, and the reason. On a CPU a prefix hit must not change a sampled token.

    Models with state layers (Mamba, linear attention) get no prefix caching: vLLM caches their states only at block
    ends with chunked prefill, and calls that experimental.
    """
    if basis.facts and basis.facts.state_layers:
        return False, f"engines keep keys and values of a prefix, not the states of {basis.facts.state_layers} layers"
    if basis.device == "cuda":
        return True, "rollouts of a group share their prompt, turns of a rollout what was said"
    if basis.facts is None or basis.longest_sequence is None:
        return False, "until the model's sizes are known"
    if not basis.facts.head_dim:
        return False, "no layer of the model has attention"
    exact_tokens = _EXACT_KEYS // (4 * basis.facts.head_dim)
    reason = f"on a CPU a hit changes no bit of sequences of at most {exact_tokens} tokens of this model"
    return basis.longest_sequence <= exact_tokens, reason


def _choose_max_sequences(in_flight: int) -> tuple[int, str]:
    sequences = min(_MOST_SEQUENCES, max(_LEAST_SEQUENCES, in_flight))
    return sequences, f"{in_flight} rollouts in flight an engine, within {_LEAST_SEQUENCES} to {_MOST_SEQUENCES}"


def _left_out_fate(tokens: int, rollout_tokens: int) -> str:
    """Return the clause "longer rollouts are left out" for a reason; empty if a pack holds the longest."""
    if tokens >= rollout_tokens:
        return ""
    return f"; rollouts whose rows have more, up to {rollout_tokens:,}, are left out"


def _round_up(tokens: int) -> int:
    return -(-tokens // 1024) * 1024
