"""Choice of the keys left at `auto` that follow from the model's sizes and the device's memory, each with its reason.

Pure. On a CPU they are constants: tests of exact numbers rely on them, and packs of other sizes are no faster there. On
GPUs the forecast of `memory.py` decides. It is an estimate, so it may fill `_USABLE` of a device and no more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlctl.config.fields import RECIPE, stated
from rlctl.config.schema import GrpoConfig, RunConfig, SftConfig, TrainerSection
from rlctl.models.model_sizes import ModelSizes
from rlctl.preflight.memory import engine_bytes, placed_states, token_bytes, trainer_bytes
from rlctl.preflight.resolved import Device, Resolved, longest_rollout, longest_sequence

GIB = 1 << 30
# Share of a device's memory that a forecast may fill.
_USABLE = 0.85
# Tokens of a pack on GPUs, the first that fits. Fewer leave an H200 waiting for launches.
_PACKS = (32768, 16384, 8192)
# An engine that stays awake is worth a pack of this size, no smaller one: it saves 0.2 to 0.5 s a step.
_LEAST_PACK_AWAKE = 16384
# On a CPU no larger pack is made to hold the rows of a whole rollout: all packs get as large.
_MOST_FOR_ROLLOUT = 32768
# Tokens with logits at a time, and the share of a device's memory that these may take. Each chunk adds to the float32
# gradient of the output, 0.4 ms for 152,000 x 1,024 numbers on an H200: few large chunks.
_CHUNKS, _CHUNK_SHARE = (8192, 4096, 2048, 1024), 0.04
# vLLM has whole CUDA graphs for 512 sequences at most.
_LEAST_SEQUENCES, _MOST_SEQUENCES = 256, 512
# Weights in transit and graphs are in the rest of an engine's own device.
_OWN_DEVICE_SHARE = 0.85
# Of a device that trainer and engine share in turns: the memory that a sleeping engine, and a resting trainer, still
# keep.
_ASLEEP_BYTES, _RESTING_BYTES, _MOST_SHARE = 5 * GIB, 3 * GIB, 0.92
# Tokens beyond the longest request, see `launch.worker_specs`; blocks of the cache are filled in part.
_ROOM = 32
# A hit changes no bit on a CPU while one head's keys of a sequence, in float32, are below 120 KiB; see
# generation/README.md. Half the figure allows for smaller caches.
_EXACT_KEYS = 60 << 10
# Share where sizes or memory are unknown, or nothing fits: half is for each side.
_UNKNOWN_SHARE = 0.6

_CPU: dict[str, dict[str, Any]] = {
    "trainer": {
        "compile": False,
        "activation_checkpointing": False,
        "micro_batch_tokens": 8192,
        "logprob_chunk_tokens": 1024,
    },
    "generation": {"max_num_seqs": 256, "gpu_memory_utilization": _UNKNOWN_SHARE, "sleep": False},
}


@dataclass(frozen=True)
class Choice:
    """Value that a key at `auto` was given."""

    # Dotted.
    key: str
    value: bool | int | float
    # Reason, for a reader.
    why: str


@dataclass(frozen=True)
class Tuned:
    """A config with a value for every key at `auto` that this module chooses."""

    config: RunConfig
    choices: tuple[Choice, ...]
    # Key-value cache of an engine that shares its device with the trainer, per device. None: vLLM measures free memory,
    # which fails while a trainer allocates.
    kv_cache_mib: int | None


@dataclass(frozen=True)
class _Fit:
    """Use of a device's memory."""

    tokens: int
    checkpointing: bool
    sleep: bool
    why: str


def tune(config: RunConfig, device: Device, sizes: ModelSizes | None, memory: int | None) -> Tuned:
    """Return `config` with a value for each `auto`. Values that were written down stay.

    sizes: None if the model is not on this machine. memory: bytes of the smallest device, None when unknown.
    """
    if isinstance(config, SftConfig) and (sampling := Resolved(config).sampling):
        return _tune_both(config, sampling, device, sizes, memory)
    return _tune(config, device, sizes, memory)


def _tune_both(
    config: SftConfig, sampling: GrpoConfig, device: Device, sizes: ModelSizes | None, memory: int | None
) -> Tuned:
    """Tune the trainer of an SFT run, and then the engines of its validation on the same devices."""
    trainer = _tune(config, device, sizes, memory)
    engines = _tune(replace(sampling, trainer=trainer.config.trainer), device, sizes, memory)
    assert isinstance(trainer.config, SftConfig) and isinstance(engines.config, GrpoConfig) and config.validation.recipe
    recipe = replace(config.validation.recipe, generation=engines.config.generation)
    tuned = replace(trainer.config, validation=replace(config.validation, recipe=recipe))
    choices = (replace(each, key=f"{RECIPE}.{each.key}") for each in engines.choices)
    return Tuned(tuned, (*trainer.choices, *choices), engines.kv_cache_mib)


def _tune(config: RunConfig, device: Device, sizes: ModelSizes | None, memory: int | None) -> Tuned:
    """Return `tune` of a config without a recipe, or regardless of one."""
    choices: list[Choice] = []

    def fill(config: RunConfig, section: str, values: Mapping[str, tuple[Any, str]]) -> RunConfig:
        own = getattr(config, section)
        found = {name: value for name, (value, _) in values.items() if getattr(own, name) == "auto"}
        choices.extend(Choice(f"{section}.{name}", value, values[name][1]) for name, value in found.items())
        return replace(config, **{section: replace(own, **found)}) if found else config

    longest = longest_sequence(config, sizes)
    if device == "cpu" or sizes is None or memory is None:
        why = "on a CPU" if device == "cpu" else "until the model's sizes and the device's memory are known"
        values = {section: {name: (value, why) for name, value in own.items()} for section, own in _CPU.items()}
        whole = longest_rollout(config, sizes) or 0
        tokens = max(8192, longest or 0, min(whole, _MOST_FOR_ROLLOUT))
        values["trainer"]["micro_batch_tokens"] = (tokens, why + _left_out(tokens, whole))
        values["trainer"]["compile"] = (device == "cuda", _why_compiled(device))
        values["generation"] |= {"sleep": (device == "cuda", why), "prefix_caching": _caches(device, sizes, longest)}
        config = fill(config, "trainer", values["trainer"])
        config = fill(config, "generation", values["generation"]) if isinstance(config, GrpoConfig) else config
        return Tuned(config, tuple(choices), None)

    assert longest is not None
    config = fill(
        config, "trainer", {"compile": (True, _why_compiled(device)), "logprob_chunk_tokens": _chunk(sizes, memory)}
    )
    if isinstance(config, GrpoConfig):
        config = fill(
            config,
            "generation",
            {"max_num_seqs": _sequences(config), "prefix_caching": _caches(device, sizes, longest)},
        )
    fit = _fit(config, sizes, longest, memory)
    checkpointed = "no pack that fits keeps its activations" if fit.checkpointing else "activations fit"
    why = fit.why + _left_out(fit.tokens, longest_rollout(config, sizes) or 0)
    config = fill(
        config,
        "trainer",
        {"micro_batch_tokens": (fit.tokens, why), "activation_checkpointing": (fit.checkpointing, checkpointed)},
    )
    if not isinstance(config, GrpoConfig):
        return Tuned(config, tuple(choices), None)
    slept = "trainer and engine do not fit side by side" if fit.sleep else "trainer and engine fit side by side"
    config = fill(config, "generation", {"sleep": (fit.sleep, slept)})
    assert isinstance(config, GrpoConfig)
    config = fill(config, "generation", {"gpu_memory_utilization": _share(config, sizes, longest, memory)})
    assert isinstance(config, GrpoConfig)
    return Tuned(config, tuple(choices), _cache_mib(config, sizes, longest, memory))


def _why_compiled(device: Device) -> str:
    return "on GPUs: a step of Qwen3-1.7B is 1.65 times as fast (H200)" if device == "cuda" else "on a CPU"


def _caches(device: Device, sizes: ModelSizes | None, longest: int | None) -> tuple[bool, str]:
    """Return True where a prefix hit saves work; on a CPU a run must also sample the same tokens without a hit."""
    if device == "cuda":
        return True, "rollouts of a group share their prompt, turns of a rollout what was said"
    if sizes is None or longest is None:
        return False, "until the model's sizes are known"
    most = _EXACT_KEYS // (4 * sizes.head_dim)
    return longest <= most, f"on a CPU a hit changes no bit of sequences of at most {most} tokens of this model"


def _chunk(sizes: ModelSizes, memory: int) -> tuple[int, str]:
    """Return the largest chunk whose logits, 8 bytes each, take no more than their share."""
    fitting = (tokens for tokens in _CHUNKS if tokens * sizes.vocab * 8 <= _CHUNK_SHARE * memory)
    tokens = next(fitting, _CHUNKS[-1])
    return tokens, f"logits of {tokens * sizes.vocab * 8 / GIB:.1f} GiB, where {_CHUNK_SHARE:.0%} of the device may be"


def _in_flight(config: GrpoConfig) -> int:
    """Return the rollouts of an engine's share of the steps in flight."""
    rules, step = config.grpo, Resolved(config)
    flight = rules.num_prompts_per_step * rules.num_generations_per_prompt * (1 + step.max_age)
    return -(-flight // config.generation.num_engines)


def _sequences(config: GrpoConfig) -> tuple[int, str]:
    each = _in_flight(config)
    found = min(_MOST_SEQUENCES, max(_LEAST_SEQUENCES, each))
    return found, f"{each} rollouts in flight an engine, within {_LEAST_SEQUENCES} to {_MOST_SEQUENCES}"


def _fit(config: RunConfig, sizes: ModelSizes, longest: int, memory: int) -> _Fit:
    """Return the first that fits: an engine that stays awake next to large packs, large packs, recomputed ones.

    Where packs must hold whole rollouts, those that do come first; if none fits, longer rollouts are left out.
    """
    section, whole = config.trainer, longest_rollout(config, sizes) or longest
    packs = tuple(tokens for tokens in _PACKS if tokens >= longest) or (_rounded(longest),)
    packs = packs if whole <= packs[0] else (_rounded(whole), *packs)
    packs = packs if section.micro_batch_tokens == "auto" else (section.micro_batch_tokens,)
    recompute = (False, True) if section.activation_checkpointing == "auto" else (section.activation_checkpointing,)
    trials = [(tokens, checkpointing) for checkpointing in recompute for tokens in packs]
    needed = {trial: _trained(config, sizes, *trial) for trial in trials}
    usable = int(_USABLE * memory)
    shared = Resolved(config, "cuda").shares_devices
    room = usable - _ASLEEP_BYTES * shared
    if whole > longest:
        held = [trial for trial in trials if trial[0] >= whole and needed[trial] <= room]
        trials = held or [trial for trial in trials if trial[0] < whole] or trials
        needed = {trial: needed[trial] for trial in trials}
    if isinstance(config, GrpoConfig) and shared and config.generation.sleep != True:  # noqa: E712  (it may be "auto")
        engine = _engine_needs(config, sizes, longest, memory)
        forced = config.generation.sleep is False
        for (tokens, checkpointing), trainer in needed.items():
            large = tokens >= min(_LEAST_PACK_AWAKE, packs[0]) and checkpointing == recompute[0]
            if (large or forced) and trainer + engine <= usable and not section.offload_optimizer_for_generation:
                sums = f"{trainer / GIB:.0f} GiB beside an engine of {engine / GIB:.0f}"
                return _Fit(tokens, checkpointing, False, f"{sums}, of {memory / GIB:.0f}")
        if forced:
            # An engine that must stay awake has at most half, where its cache would take more.
            room = usable - min(engine, usable // 2)
    trial = next((trial for trial in trials if needed[trial] <= room), trials[-1])
    sleep = shared and not (isinstance(config, GrpoConfig) and config.generation.sleep is False)
    return _Fit(*trial, sleep, f"{needed[trial] / GIB:.0f} GiB of {memory / GIB:.0f} when it trains")


def _left_out(tokens: int, whole: int) -> str:
    """Return the fate of rollouts too long for any micro-batch, where the loss needs whole ones."""
    return "" if tokens >= whole else f"; rollouts whose rows have more, up to {whole:,}, are left out"


def _rounded(tokens: int) -> int:
    return -(-tokens // 1024) * 1024


def _trained(config: RunConfig, sizes: ModelSizes, tokens: int, checkpointing: bool) -> int:
    """Return the bytes of a rank's device while it trains packs of that number of tokens."""
    section: TrainerSection = replace(config.trainer, micro_batch_tokens=tokens, activation_checkpointing=checkpointing)
    return sum(trainer_bytes(Resolved(replace(config, trainer=section), "cuda"), sizes).values())


def _kept(config: GrpoConfig) -> int:
    """Return the sequences that the cache should hold: those of a step being decoded, and episodes between two turns.

    A larger cache would only be emptied, and taken back, with every sleep. Groups that replace filtered ones count. A
    rollout function may sample several branches, how many is not known: its cache is as for `max_num_seqs` rollouts.
    A validation may have more rollouts than the cache holds; some then wait.

    While environments answer, others are decoded in an episode's place: room is kept for as many again. Were the cache
    too small for both, each would displace the other's prefix, and every turn would compute it again: 0.57 times the
    tokens/s (Qwen3-1.7B, 8 turns of 128 tokens, 512 episodes, 256 at a time, H200).
    """
    decoded, rules = stated(config.generation.max_num_seqs), config.grpo.dynamic_sampling
    begun = int(_in_flight(config) * (1 + (rules.max_extra if rules.filter else 0)))
    if config.rollout is not None:
        return max(decoded, min(2 * decoded, begun))
    return min((1 + config.has_turns) * decoded, begun)


def _engine_needs(config: GrpoConfig, sizes: ModelSizes, longest: int, memory: int) -> int:
    """Return the bytes of an engine's device with a cache for the sequences of `_kept` at their longest, or as was
    written."""
    if config.generation.gpu_memory_utilization != "auto":
        return int(config.generation.gpu_memory_utilization * memory)
    resolved = Resolved(config, "cuda")
    cache = _kept(config) * (longest + _ROOM) * token_bytes(resolved, sizes)
    return sum(engine_bytes(resolved, sizes).values()) + cache


def _share(config: GrpoConfig, sizes: ModelSizes, longest: int, memory: int) -> tuple[float, str]:
    resolved = Resolved(config, "cuda")
    if not resolved.shares_devices:
        return _OWN_DEVICE_SHARE, "engines have devices of their own"
    needed = _engine_needs(config, sizes, longest, memory)
    what = f"a cache for {_kept(config)} sequences of {longest:,} tokens"
    if config.generation.sleep:
        beside = sum(each.device for each in placed_states(resolved, sizes)["generate"].values())
        free = int(_MOST_SHARE * memory) - beside - _RESTING_BYTES
    else:
        beside = sum(trainer_bytes(resolved, sizes).values())
        free = int(_USABLE * memory) - beside
        if needed <= free:
            return -(-needed * 100 // memory) / 100, what
    least = sum(engine_bytes(resolved, sizes).values()) + (longest + _ROOM) * token_bytes(resolved, sizes)
    if free < least:
        return _UNKNOWN_SHARE, "by the forecast not one sequence fits beside the trainer's state"
    if needed > free:
        what = f"what the trainer's {beside / GIB:.0f} GiB leave"
    return int(min(free, needed) * 100 / memory) / 100, what


def _cache_mib(config: GrpoConfig, sizes: ModelSizes, longest: int, memory: int) -> int | None:
    """Return the cache that an engine's share of a shared device leaves; None where not one sequence fits."""
    resolved = Resolved(config, "cuda")
    if not resolved.shares_devices:
        return None
    left = int(stated(config.generation.gpu_memory_utilization) * memory) - sum(engine_bytes(resolved, sizes).values())
    return left >> 20 if left >= (longest + _ROOM) * token_bytes(resolved, sizes) else None
