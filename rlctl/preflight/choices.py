"""Choice of the keys left at `auto` that follow from the model's sizes and the device's memory, each with its reason.

Pure. On a CPU they are constants: tests of exact numbers rely on them, and packs of other sizes are no faster there. On
GPUs the forecast of `memory.py` decides. It is an estimate, so it may fill `USABLE` of a device and no more.
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
from rlctl.preflight.trainer_settings import DTYPE_BYTES, Choice, Dtype, GenerationSettings, TrainerSettings

GIB = 1 << 30
# Share of a device that a forecast may fill. Measured peaks were 80 to 95% of their forecasts (bench/README.md).
USABLE = 0.88
# Tokens of a pack on GPUs, the first that fits. Fewer leave an H200 waiting for launches.
_PACKS = (32768, 16384, 8192)
# An engine that stays awake is worth a pack of this size, no smaller one: it saves 0.2 to 0.5 s a step.
_LEAST_PACK_AWAKE = 16384
# On a CPU no larger pack is made to hold the rows of a whole rollout: all packs get as large.
_MOST_FOR_ROLLOUT = 32768
# Tokens with logits at a time, and the share of a device's memory that these may take. Each chunk adds to the float32
# gradient of the output, 0.4 ms for 152,000 x 1,024 numbers on an H200: few large chunks. An H100 takes 4,096 tokens of
# such a vocabulary.
_CHUNKS = (8192, 4096, 2048, 1024)
_CHUNK_SHARE = 0.06
_LEAST_SEQUENCES = 256
# vLLM has whole CUDA graphs for 512 sequences at most.
_MOST_SEQUENCES = 512
# Weights in transit and graphs are in the rest of an engine's own device.
_OWN_DEVICE_SHARE = 0.85
# On a device that trainer and engine share in turns: memory that a sleeping engine, and a resting trainer, still keep.
_ASLEEP_BYTES = 5 * GIB
_RESTING_BYTES = 3 * GIB
_MOST_SHARE = 0.92
# Tokens beyond the longest request, see `launch.worker_specs`; blocks of the cache are filled in part.
_ROOM = 32
# A hit changes no bit on a CPU while one head's keys of a sequence, in float32, are below 120 KiB; see
# generation/README.md. Half the figure allows for smaller caches.
_EXACT_KEYS = 60 << 10
_ONE_CHUNK = "one chunk, which costs no memory"
# Share where sizes or memory are unknown, or nothing fits: half is for each side.
_UNKNOWN_SHARE = 0.6


@dataclass(frozen=True)
class Basis:
    """Values that the choices follow from."""

    trainer: TrainerSection
    dtype: Dtype
    device: Device
    # None if the model is not on this machine.
    facts: ModelSizes | None
    # Trained in place of the weights.
    adapters: AdapterSpec | None
    # Bytes of the smallest device; None when unknown.
    memory: int | None
    # Tokens of the longest sequence, and those that one micro-batch must hold; None when unknown.
    longest_sequence: int | None
    longest_rollout: int | None
    # Tokens of a rank's share of an update, at most; None: not bounded.
    update_tokens: int | None
    # True if engines are on the trainer's devices.
    shares_devices: bool
    # Trainer ranks by node; empty: not known, or one node.
    ranks_by_node: tuple[int, ...]
    # Config that the engines sample by, and their dtype; None where the trainer alone is chosen for.
    engines: "tuple[GrpoConfig, Dtype] | None"


@dataclass(frozen=True)
class Chosen:
    """Settings of a run, and the choices among them."""

    trainer: TrainerSettings
    generation: GenerationSettings | None
    choices: tuple[Choice, ...]


def choose(basis: Basis) -> Chosen:
    """Return settings with a value for each `auto`. Values that were written down stay."""
    choices: list[Choice] = []
    trainer = _Section("trainer", basis.trainer, basis.dtype, choices)
    trainer.values |= {"adapters": basis.adapters, "update_tokens": basis.update_tokens}
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
    """A section whose values are being chosen."""

    def __init__(
        self, name: str, section: TrainerSection | GenerationSection, dtype: Dtype, choices: list[Choice]
    ) -> None:
        self.values: dict[str, Any] = {**vars(section), "dtype": dtype}
        self._name = name
        # The caller's list, to which each choice is added.
        self._choices = choices

    def fill(self, key: str, choice: bool | int | float, reason: str) -> None:
        """Give a key a value, unless it has one."""
        if self.values[key] == "auto":
            self.values[key] = choice
            self._choices.append(Choice(f"{self._name}.{key}", choice, reason))


class _Engines(_Section):
    """The section of engines, and their needs as far as the section is filled."""

    def __init__(self, config: GrpoConfig, dtype: Dtype, device: Device, choices: list[Choice]) -> None:
        super().__init__("generation", config.generation, dtype, choices)
        self._config = config
        self._dtype = dtype
        # The cache of `GenerationSettings`.
        self.cache_mib: int | None = config.generation.kv_cache_mib if device == "cpu" else None

    def base_bytes(self, sizes: ModelSizes) -> int:
        """Return the bytes of a device's share of the weights."""
        return refit_bytes(sizes, self._dtype) // self._config.generation.tensor_parallel_size

    @property
    def in_flight(self) -> int:
        """Rollouts of an engine's share of the steps in flight."""
        step = self._config.step_shape
        steps = 1 + self._config.async_.max_age
        return -(-step.prompts * step.group * steps // self._config.generation.num_engines)

    @property
    def cached_sequences(self) -> int:
        """Sequences that the cache should hold: those of a step being decoded, and episodes between two turns.

        A larger cache would only be emptied, and taken back, with every sleep. Groups that replace filtered ones count.
        A rollout function may sample any number of branches: its cache is as for `max_num_seqs` rollouts. A validation
        may have more rollouts than the cache holds; some then wait.

        While environments answer, others are decoded in an episode's place: room is kept for as many again. Were the
        cache too small for both, each would displace the other's prefix, and every turn would compute it again: 0.57
        times the tokens/s (Qwen3-1.7B, 8 turns of 128 tokens, 512 episodes, 256 at a time, H200).
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
        """Return the bytes of an engine's GPU but for its cache."""
        items = engine_bytes(
            sizes=sizes,
            device="cuda",
            dtype=self._dtype,
            tensor_parallel_size=self.values["tensor_parallel_size"],
            max_num_seqs=self.values["max_num_seqs"],
        )
        return sum(items.values())

    def sequence_bytes(self, sizes: ModelSizes, longest: int) -> int:
        """Return the bytes of a cached sequence of the longest kind."""
        return (longest + _ROOM) * token_bytes(sizes, self._dtype, self.values["tensor_parallel_size"])

    def needed_bytes(self, sizes: ModelSizes, longest: int, memory: int) -> int:
        """Return the bytes that an engine takes of its device: the written share, or room for `cached_sequences` at
        their longest.
        """
        written = self.values["gpu_memory_utilization"]
        if written != "auto":
            return int(written * memory)
        return self.fixed_bytes(sizes) + self.cached_sequences * self.sequence_bytes(sizes, longest)


@dataclass(frozen=True)
class _Fit:
    """Use of a device's memory."""

    tokens: int
    checkpointing: bool
    sleep: bool
    reason: str
    # Bytes that the trainer may fill, further logits included; 0: an engine stays awake and has the rest.
    limit: int


def _choose_replicas(basis: Basis, trainer: _Section) -> None:
    """Choose the copies of the state, whose number all forecasts depend on. One node has one, without a word."""
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
    """Choose for a CPU, and for GPUs while the model's sizes or the memory are not known."""
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
    """Choices for GPUs of `memory` bytes, and for a model of these sizes."""

    basis: Basis
    sizes: ModelSizes
    memory: int
    longest: int

    def choose(self, trainer: _Section, engines: _Engines | None) -> None:
        """Fill both sections."""
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
        """Return the reason why engines sleep or stay awake, and the place of weights that no refit brings."""
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
        """Return the largest chunk whose logits, 8 bytes each, take no more than their share, and the reason."""
        fitting = (tokens for tokens in _CHUNKS if tokens * self.sizes.vocab * 8 <= _CHUNK_SHARE * self.memory)
        tokens = next(fitting, _CHUNKS[-1])
        gib = tokens * self.sizes.vocab * 8 / GIB
        return tokens, f"logits of {gib:.1f} GiB, where {_CHUNK_SHARE:.0%} of the device may be"

    def _choose_kept_tokens(self, trainer: _Section, fit: _Fit) -> tuple[int, str]:
        """Return the tokens whose logits find room, at least one chunk's, and the reason."""
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
        return kept_tokens, f"{kept_gib:.1f} GiB of what is left; others are made twice"

    def _first_fit(self, trainer: _Section, engines: _Engines | None) -> _Fit:
        """Return the first that fits: an engine that stays awake next to large packs, large packs, recomputed ones.

        Where packs must hold whole rollouts, those that do come first; if none fits, longer rollouts are left out.
        """
        shared = self.basis.shares_devices
        usable = int(USABLE * self.memory)
        rollout_tokens = self.basis.longest_rollout or self.longest
        packs = self._possible_packs(trainer, rollout_tokens)
        written = trainer.values["activation_checkpointing"]
        recompute = (False, True) if written == "auto" else (written,)
        trials = list(product(recompute, packs))
        training_bytes = {trial: self._training_bytes(trainer, trial[1], trial[0]) for trial in trials}
        room = usable - _ASLEEP_BYTES if shared else usable
        if rollout_tokens > self.longest:
            holding = [trial for trial in trials if trial[1] >= rollout_tokens and training_bytes[trial] <= room]
            trials = holding or [trial for trial in trials if trial[1] < rollout_tokens] or trials
        must_stay_awake = engines is not None and engines.values["sleep"] is False
        device_gib = f"{self.memory / GIB:.0f}"
        if engines and shared and engines.values["sleep"] in (False, "auto"):
            engine = engines.needed_bytes(self.sizes, self.longest, self.memory)
            moves_optimizer = trainer.values["offload_optimizer_for_generation"]
            for checkpointing, tokens in trials:
                training = training_bytes[checkpointing, tokens]
                is_worth_it = tokens >= min(_LEAST_PACK_AWAKE, packs[0]) and checkpointing == recompute[0]
                fits = training + engine <= usable and not moves_optimizer
                if fits and (is_worth_it or must_stay_awake):
                    reason = f"{training / GIB:.0f} GiB beside an engine of {engine / GIB:.0f}, of {device_gib}"
                    return _Fit(tokens, checkpointing=checkpointing, sleep=False, reason=reason, limit=0)
            if must_stay_awake:
                # An engine that must stay awake has at most half, where its cache would take more.
                room = usable - min(engine, usable // 2)
        trial = next((trial for trial in trials if training_bytes[trial] <= room), trials[-1])
        checkpointing, tokens = trial
        reason = f"{training_bytes[trial] / GIB:.0f} GiB of {device_gib} when it trains"
        sleep = shared and not must_stay_awake
        return _Fit(tokens, checkpointing=checkpointing, sleep=sleep, reason=reason, limit=room)

    def _possible_packs(self, trainer: _Section, rollout_tokens: int) -> tuple[int, ...]:
        """Return the sizes of packs to try, the largest first; the written one alone."""
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
        """Return the bytes of a rank's device while it trains packs of that number of tokens.

        kept_tokens: tokens whose logits are kept; None: those of one chunk.
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
        """Return the cache that an engine's share of a shared device leaves; None where not one sequence fits."""
        if not self.basis.shares_devices:
            return None
        engine_share = int(engines.values["gpu_memory_utilization"] * self.memory)
        cache_bytes = engine_share - engines.fixed_bytes(self.sizes)
        return cache_bytes >> 20 if cache_bytes >= engines.sequence_bytes(self.sizes, self.longest) else None


def _why_compiled(on_gpus: bool) -> str:
    return "on GPUs: a step of Qwen3-1.7B is 1.65 times as fast (H200)" if on_gpus else "on a CPU"


def _choose_prefix_caching(basis: Basis) -> tuple[bool, str]:
    """Return True where a prefix hit saves work, and the reason; on a CPU a hit must also change no sampled token.

    vLLM keeps states of layers only at ends of blocks, with chunked prefill, and calls that experimental.
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
    """Return the fate of rollouts too long for any micro-batch, where the loss needs whole ones."""
    if tokens >= rollout_tokens:
        return ""
    return f"; rollouts whose rows have more, up to {rollout_tokens:,}, are left out"


def _round_up(tokens: int) -> int:
    return -(-tokens // 1024) * 1024
