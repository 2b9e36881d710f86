"""Choice of the keys left at `auto` that follow from the model's sizes and the device's memory, each with its reason.

Pure. On a CPU they are constants: tests of exact numbers rely on them, and packs of other sizes are no faster there. On
GPUs the forecast of `memory.py` decides. It is an estimate, so it may fill `USABLE` of a device and no more.
"""

from bisect import bisect_right
from dataclasses import dataclass
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
_CHUNKS, _CHUNK_SHARE = (8192, 4096, 2048, 1024), 0.06
# vLLM has whole CUDA graphs for 512 sequences at most.
_LEAST_SEQUENCES, _MOST_SEQUENCES = 256, 512
# Weights in transit and graphs are in the rest of an engine's own device.
_OWN_DEVICE_SHARE = 0.85
# On a device that trainer and engine share in turns: memory that a sleeping engine, and a resting trainer, still keep.
_ASLEEP_BYTES, _RESTING_BYTES, _MOST_SHARE = 5 * GIB, 3 * GIB, 0.92
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
    longest: int | None
    whole: int | None
    # Tokens of a rank's share of an update, at most; None: not bounded.
    update: int | None
    # True if engines are on the trainer's devices.
    shared: bool
    # Trainer ranks by node; empty: not known, or one node.
    nodes: tuple[int, ...]
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
    trainer.values |= {"adapters": basis.adapters, "update_tokens": basis.update}
    if basis.facts and basis.facts.one_sequence_a_row:
        trainer.values["row_tokens"] = basis.longest or 0
    engines = _Engines(*basis.engines, basis.device, choices) if basis.engines else None
    _choose_replicas(basis, trainer)
    if basis.device == "cpu" or basis.facts is None or basis.memory is None:
        _choose_constants(basis, trainer, engines)
    else:
        assert basis.longest is not None
        _Forecast(basis, basis.facts, basis.memory, basis.longest).choose(trainer, engines)
    generation = GenerationSettings(**engines.values, cache_mib=engines.cache_mib) if engines else None
    return Chosen(TrainerSettings(**trainer.values), generation, tuple(choices))


class _Section:
    """A section whose values are being chosen."""

    def __init__(self, name: str, section: TrainerSection | GenerationSection, dtype: Dtype, to: list[Choice]) -> None:
        self.values: dict[str, Any] = {**vars(section), "dtype": dtype}
        self._name, self._choices = name, to

    def fill(self, key: str, value: bool | int | float, why: str) -> None:
        """Give a key a value, unless it has one."""
        if self.values[key] == "auto":
            self.values[key] = value
            self._choices.append(Choice(f"{self._name}.{key}", value, why))


class _Engines(_Section):
    """The section of engines, and their needs as far as it is filled."""

    def __init__(self, config: GrpoConfig, dtype: Dtype, device: Device, to: list[Choice]) -> None:
        super().__init__("generation", config.generation, dtype, to)
        self._config, self._dtype = config, dtype
        # The cache of `GenerationSettings`.
        self.cache_mib: int | None = config.generation.kv_cache_mib if device == "cpu" else None

    def base_bytes(self, sizes: ModelSizes) -> int:
        """Return the bytes of a device's share of the weights."""
        return refit_bytes(sizes, self._dtype) // self._config.generation.tensor_parallel_size

    @property
    def in_flight(self) -> int:
        """Rollouts of an engine's share of the steps in flight."""
        step, ahead = self._config.step_shape, self._config.async_.max_age
        return -(-step.prompts * step.group * (1 + ahead) // self._config.generation.num_engines)

    @property
    def kept(self) -> int:
        """Sequences that the cache should hold: those of a step being decoded, and episodes between two turns.

        A larger cache would only be emptied, and taken back, with every sleep. Groups that replace filtered ones count.
        A rollout function may sample any number of branches: its cache is as for `max_num_seqs` rollouts. A validation
        may have more rollouts than the cache holds; some then wait.

        While environments answer, others are decoded in an episode's place: room is kept for as many again. Were the
        cache too small for both, each would displace the other's prefix, and every turn would compute it again: 0.57
        times the tokens/s (Qwen3-1.7B, 8 turns of 128 tokens, 512 episodes, 256 at a time, H200).
        """
        decoded, rules = int(self.values["max_num_seqs"]), self._config.grpo.dynamic_sampling
        begun = int(self.in_flight * (1 + (rules.max_extra if rules.filter else 0)))
        if self._config.rollout is not None:
            return max(decoded, min(2 * decoded, begun))
        return min((1 + self._config.has_turns) * decoded, begun)

    def fixed_bytes(self, sizes: ModelSizes) -> int:
        """Return the bytes of an engine's GPU but for its cache."""
        devices, sequences = self.values["tensor_parallel_size"], self.values["max_num_seqs"]
        return sum(engine_bytes(sizes, "cuda", self._dtype, devices, sequences).values())

    def sequence_bytes(self, sizes: ModelSizes, longest: int) -> int:
        """Return the bytes of a cached sequence of the longest kind."""
        return (longest + _ROOM) * token_bytes(sizes, self._dtype, self.values["tensor_parallel_size"])

    def needed_bytes(self, sizes: ModelSizes, longest: int, memory: int) -> int:
        """Return the bytes of an engine's device with a cache for the `kept` sequences at their longest, or as was
        written."""
        written = self.values["gpu_memory_utilization"]
        if written != "auto":
            return int(written * memory)
        return self.fixed_bytes(sizes) + self.kept * self.sequence_bytes(sizes, longest)


@dataclass(frozen=True)
class _Fit:
    """Use of a device's memory."""

    tokens: int
    checkpointing: bool
    sleep: bool
    why: str
    # Bytes that the trainer may fill, further logits included; 0: an engine stays awake and has the rest.
    limit: int


def _choose_replicas(basis: Basis, trainer: _Section) -> None:
    """Choose the copies of the state, whose number all forecasts depend on. One node has one, without a word."""
    if len(basis.nodes) < 2:
        if trainer.values["replicas"] == "auto":
            trainer.values["replicas"] = 1
        return
    unknown = basis.device == "cuda" and basis.memory is None
    memory = basis.memory if basis.device == "cuda" else None
    given = (
        TrainerSettings(**trainer.values),
        basis.nodes,
        None if unknown else basis.facts,
        memory,
        DTYPE_BYTES[basis.dtype],
    )
    trainer.fill("replicas", *backend_of(basis.trainer).choose_replicas(*given))


def _choose_constants(basis: Basis, trainer: _Section, engines: _Engines | None) -> None:
    """Choose for a CPU, and for GPUs while the model's sizes or the memory are not known."""
    on_gpus = basis.device == "cuda"
    why = "until the model's sizes and the device's memory are known" if on_gpus else "on a CPU"
    whole = basis.whole or 0
    tokens = max(8192, basis.longest or 0, min(whole, _MOST_FOR_ROLLOUT))
    trainer.fill("compile", on_gpus, _why_compiled(on_gpus))
    trainer.fill("activation_checkpointing", False, why)
    trainer.fill("micro_batch_tokens", tokens, why + _left_out_fate(tokens, whole))
    trainer.fill("logprob_chunk_tokens", 1024, why)
    trainer.fill("logprob_kept_tokens", trainer.values["logprob_chunk_tokens"], _ONE_CHUNK)
    if engines:
        engines.fill("max_num_seqs", _LEAST_SEQUENCES, why)
        engines.fill("gpu_memory_utilization", _UNKNOWN_SHARE, why)
        engines.fill("sleep", on_gpus, why)
        engines.fill("prefix_caching", *_caches(basis))


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
        trainer.fill("logprob_chunk_tokens", *self._chunk())
        if engines:
            engines.fill("max_num_seqs", *_sequences(engines.in_flight))
            engines.fill("prefix_caching", *_caches(self.basis))
        fit = self._first_fit(trainer, engines)
        checkpointed = "no pack that fits keeps its activations" if fit.checkpointing else "activations fit"
        trainer.fill("micro_batch_tokens", fit.tokens, fit.why + _left_out_fate(fit.tokens, self.basis.whole or 0))
        trainer.fill("activation_checkpointing", fit.checkpointing, checkpointed)
        trainer.fill("logprob_kept_tokens", *self._logit_tokens(trainer, fit))
        if engines:
            engines.fill("sleep", fit.sleep, self._why_asleep(fit.sleep, engines))
            engines.fill("gpu_memory_utilization", *self._share(TrainerSettings(**trainer.values), engines))
            engines.cache_mib = self._cache_mib(engines)

    def _why_asleep(self, sleeps: bool, engines: _Engines) -> str:
        """Return the reason why engines sleep or stay awake, and the place of weights that no refit brings."""
        if not self.basis.shared:
            return "engines have devices of their own"
        if not sleeps:
            kept = "; the base stays in both" if self.basis.adapters and self.basis.shared else ""
            return f"trainer and engine fit side by side{kept}"
        why = "trainer and engine do not fit side by side"
        if not self.basis.adapters:
            return why
        return (
            f"{why}; a refit brings adapters alone, so {engines.base_bytes(self.sizes) / GIB:.0f} GiB wait on the host"
        )

    def _chunk(self) -> tuple[int, str]:
        """Return the largest chunk whose logits, 8 bytes each, take no more than their share."""
        fitting = (tokens for tokens in _CHUNKS if tokens * self.sizes.vocab * 8 <= _CHUNK_SHARE * self.memory)
        tokens = next(fitting, _CHUNKS[-1])
        gib = tokens * self.sizes.vocab * 8 / GIB
        return tokens, f"logits of {gib:.1f} GiB, where {_CHUNK_SHARE:.0%} of the device may be"

    def _logit_tokens(self, trainer: _Section, fit: _Fit) -> tuple[int, str]:
        """Return the tokens whose logits find room, at least one chunk's."""
        chunk, size = trainer.values["logprob_chunk_tokens"], DTYPE_BYTES[self.basis.dtype]
        shape = trainer.values["micro_batch_tokens"], trainer.values["activation_checkpointing"]
        whole = range(chunk, shape[0] + 1, chunk)
        fitting = bisect_right(whole, fit.limit, key=lambda kept: self._trained(trainer, *shape, kept))
        kept = whole[fitting - 1] if fitting else chunk
        if kept == chunk:
            return chunk, _ONE_CHUNK
        return kept, f"{(kept - chunk) * self.sizes.vocab * size / GIB:.1f} GiB of what is left; others are made twice"

    def _first_fit(self, trainer: _Section, engines: _Engines | None) -> _Fit:
        """Return the first that fits: an engine that stays awake next to large packs, large packs, recomputed ones.

        Where packs must hold whole rollouts, those that do come first; if none fits, longer rollouts are left out.
        """
        written, shared, usable = trainer.values, self.basis.shared, int(USABLE * self.memory)
        whole = self.basis.whole or self.longest
        packs = tuple(tokens for tokens in _PACKS if tokens >= self.longest) or (_rounded(self.longest),)
        packs = packs if whole <= packs[0] else (_rounded(whole), *packs)
        packs = packs if written["micro_batch_tokens"] == "auto" else (written["micro_batch_tokens"],)
        given = written["activation_checkpointing"]
        recompute = (False, True) if given == "auto" else (given,)
        trials = [(tokens, checkpointing) for checkpointing in recompute for tokens in packs]
        needed = {trial: self._trained(trainer, *trial) for trial in trials}
        room = usable - _ASLEEP_BYTES * shared
        if whole > self.longest:
            held = [trial for trial in trials if trial[0] >= whole and needed[trial] <= room]
            trials = held or [trial for trial in trials if trial[0] < whole] or trials
        awake = engines is not None and engines.values["sleep"] is False
        if engines and shared and engines.values["sleep"] in (False, "auto"):
            engine, of = engines.needed_bytes(self.sizes, self.longest, self.memory), f"of {self.memory / GIB:.0f}"
            for tokens, checkpointing in trials:
                trained = needed[tokens, checkpointing]
                large = tokens >= min(_LEAST_PACK_AWAKE, packs[0]) and checkpointing == recompute[0]
                moves = written["offload_optimizer_for_generation"]
                if (large or awake) and trained + engine <= usable and not moves:
                    sums = f"{trained / GIB:.0f} GiB beside an engine of {engine / GIB:.0f}"
                    return _Fit(tokens, checkpointing, False, f"{sums}, {of}", limit=0)
            if awake:
                # An engine that must stay awake has at most half, where its cache would take more.
                room = usable - min(engine, usable // 2)
        trial = next((trial for trial in trials if needed[trial] <= room), trials[-1])
        why = f"{needed[trial] / GIB:.0f} GiB of {self.memory / GIB:.0f} when it trains"
        return _Fit(*trial, shared and not awake, why, room)

    def _trained(self, trainer: _Section, tokens: int, checkpointing: bool, kept: int | None = None) -> int:
        """Return the bytes of a rank's device while it trains packs of that number of tokens.

        kept: tokens whose logits are kept; None: those of one chunk.
        """
        trial = {"micro_batch_tokens": tokens, "activation_checkpointing": checkpointing}
        if trainer.values["logprob_kept_tokens"] == "auto":
            trial["logprob_kept_tokens"] = kept or trainer.values["logprob_chunk_tokens"]
        return sum(trainer_bytes(TrainerSettings(**{**trainer.values, **trial}), self.sizes, "cuda").values())

    def _share(self, trainer: TrainerSettings, engines: _Engines) -> tuple[float, str]:
        if not self.basis.shared:
            return _OWN_DEVICE_SHARE, "engines have devices of their own"
        needed = engines.needed_bytes(self.sizes, self.longest, self.memory)
        why = f"a cache for {engines.kept} sequences of {self.longest:,} tokens"
        if engines.values["sleep"]:
            held = placed_states(trainer, self.sizes, "cuda", shared=True, phases=("generate",))["generate"]
            beside = sum(each.device for each in held.values())
            free = int(_MOST_SHARE * self.memory) - beside - _RESTING_BYTES
        else:
            beside = sum(trainer_bytes(trainer, self.sizes, "cuda").values())
            free = int(USABLE * self.memory) - beside
            if needed <= free:
                return -(-needed * 100 // self.memory) / 100, why
        if free < engines.fixed_bytes(self.sizes) + engines.sequence_bytes(self.sizes, self.longest):
            return _UNKNOWN_SHARE, "by the forecast not one sequence fits beside the trainer's state"
        if needed > free:
            why = f"what the trainer's {beside / GIB:.0f} GiB leave"
        return int(min(free, needed) * 100 / self.memory) / 100, why

    def _cache_mib(self, engines: _Engines) -> int | None:
        """Return the cache that an engine's share of a shared device leaves; None where not one sequence fits."""
        if not self.basis.shared:
            return None
        left = int(engines.values["gpu_memory_utilization"] * self.memory) - engines.fixed_bytes(self.sizes)
        return left >> 20 if left >= engines.sequence_bytes(self.sizes, self.longest) else None


def _why_compiled(on_gpus: bool) -> str:
    return "on GPUs: a step of Qwen3-1.7B is 1.65 times as fast (H200)" if on_gpus else "on a CPU"


def _caches(basis: Basis) -> tuple[bool, str]:
    """Return True where a prefix hit saves work; on a CPU a run must also sample the same tokens without a hit.

    vLLM keeps states of layers only at ends of blocks, with chunked prefill, and calls that experimental.
    """
    if basis.facts and basis.facts.state_layers:
        return False, f"engines keep keys and values of a prefix, not the states of {basis.facts.state_layers} layers"
    if basis.device == "cuda":
        return True, "rollouts of a group share their prompt, turns of a rollout what was said"
    if basis.facts is None or basis.longest is None:
        return False, "until the model's sizes are known"
    if not basis.facts.head_dim:
        return False, "no layer of the model has attention"
    most = _EXACT_KEYS // (4 * basis.facts.head_dim)
    return basis.longest <= most, f"on a CPU a hit changes no bit of sequences of at most {most} tokens of this model"


def _sequences(each: int) -> tuple[int, str]:
    found = min(_MOST_SEQUENCES, max(_LEAST_SEQUENCES, each))
    return found, f"{each} rollouts in flight an engine, within {_LEAST_SEQUENCES} to {_MOST_SEQUENCES}"


def _left_out_fate(tokens: int, whole: int) -> str:
    """Return the fate of rollouts too long for any micro-batch, where the loss needs whole ones."""
    return "" if tokens >= whole else f"; rollouts whose rows have more, up to {whole:,}, are left out"


def _rounded(tokens: int) -> int:
    return -(-tokens // 1024) * 1024
