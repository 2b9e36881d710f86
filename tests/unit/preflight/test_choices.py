"""Keys at `auto`: constants on a CPU, by the forecast of memory on GPUs, and never in place of a written value."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.bench.workload import SHAPES
from rlctl.config.errors import ConfigError
from rlctl.config.schema import GrpoConfig
from rlctl.models.facts import ModelSizes
from rlctl.models.model_sizes import read_sizes
from rlctl.preflight.choices import USABLE
from rlctl.preflight.load import load
from rlctl.preflight.machine import Device, RunMachine, device_of
from rlctl.preflight.memory import trainer_bytes
from rlctl.preflight.placement import NodeResources, this_machine
from rlctl.preflight.plan import make_plan
from rlctl.preflight.settled import Settled, SettledGrpo, settle

GIB = 1 << 30
H200, H100 = int(140.4 * GIB), int(79.6 * GIB)
SHORT = ("generation.max_new_tokens=256", "data.max_prompt_length=128")
COMMON = {"hidden_act": "silu", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "bos_token_id": None}


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSizes]:
    found = {}
    for name in ("qwen3-0.6b", "qwen3-4b", "qwen3-8b"):
        file = tmp_path_factory.mktemp(name) / "config.json"
        file.write_text(json.dumps(COMMON | SHAPES[name]))
        found[name] = read_sizes(file)
    return found


def config_of(*overrides: str) -> GrpoConfig:
    config = load("grpo", "grpo-qwen3-0.6b-1gpu", list(overrides)).config
    assert isinstance(config, GrpoConfig)
    return config


def on(config: GrpoConfig, device: Device, sizes: ModelSizes | None, memory: int | None) -> SettledGrpo:
    return settle(config, RunMachine(device, memory), sizes)


def chosen(run: Settled) -> dict[str, Any]:
    return {choice.key: choice.value for choice in run.choices}


def test_on_a_cpu_the_values_are_constants(sizes: dict[str, ModelSizes]) -> None:
    run = on(config_of(), "cpu", sizes["qwen3-0.6b"], 16 * GIB)
    assert chosen(run) == {
        "trainer.compile": False,
        "trainer.activation_checkpointing": False,
        "trainer.micro_batch_tokens": 8192,
        "trainer.logprob_chunk_tokens": 1024,
        "trainer.logprob_kept_tokens": 1024,
        "generation.max_num_seqs": 256,
        "generation.gpu_memory_utilization": 0.6,
        "generation.sleep": False,
        "generation.prefix_caching": False,
    }
    assert run.generation.cache_mib == run.config.generation.kv_cache_mib


@pytest.mark.parametrize(
    ("device", "longest", "caches"), [("cpu", 120, True), ("cpu", 121, False), ("cuda", 121, True)]
)
def test_prefixes_are_kept_on_a_cpu_where_a_hit_changes_no_bit(
    sizes: dict[str, ModelSizes], device: Device, longest: int, caches: bool
) -> None:
    config = config_of(f"model.max_length={longest}", "data.max_prompt_length=null", "generation.max_new_tokens=64")
    assert chosen(on(config, device, sizes["qwen3-0.6b"], H200))["generation.prefix_caching"] is caches


def on_nodes(sizes: ModelSizes | None, memory: int | None, *nodes: int, device: Device = "cuda") -> SettledGrpo:
    config = config_of(f"trainer.num_ranks={sum(nodes)}")
    return settle(config, RunMachine(device, memory, nodes), sizes)


def why(run: Settled) -> str:
    return next(choice.why for choice in run.choices if choice.key == "trainer.replicas")


def test_each_node_has_a_copy_of_the_state_if_its_ranks_can_hold_it(sizes: dict[str, ModelSizes]) -> None:
    own = sizes["qwen3-8b"]
    run = on_nodes(own, H100, 8, 8)
    assert run.trainer.replicas == 2
    gib = 16 * own.parameters / 8 / GIB
    assert f"on the 8 ranks of a node takes {gib:.1f} of 80 GiB each" in why(run)
    halves = on_nodes(own, H100, 2, 2)
    assert halves.trainer.replicas == 1
    assert f"would take {16 * own.parameters / 2 / GIB:.0f} of 80 GiB each, above 50%" in why(halves)
    # The forecast counts a copy a node.
    assert make_plan(run, [NodeResources("a", 8), NodeResources("b", 8)]).memory.state_peak == 16 * -(
        -own.parameters // 8
    )


def test_one_node_has_one_copy_without_a_word(sizes: dict[str, ModelSizes]) -> None:
    run = on_nodes(sizes["qwen3-0.6b"], H100, 8)
    assert run.trainer.replicas == 1
    assert "trainer.replicas" not in chosen(run)


def test_unequal_nodes_and_unknown_sizes_share_one_copy(sizes: dict[str, ModelSizes]) -> None:
    assert why(on_nodes(sizes["qwen3-0.6b"], H100, 8, 4)) == "the nodes have unequal numbers of ranks: 8, 4"
    assert why(on_nodes(None, H100, 8, 8)) == why(on_nodes(sizes["qwen3-0.6b"], None, 8, 8))
    cpus = on_nodes(sizes["qwen3-0.6b"], None, 2, 2, device="cpu")
    assert (cpus.trainer.replicas, chosen(cpus)["trainer.replicas"]) == (2, 2)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_number_of_copies_that_no_ranks_can_share_is_refused(backend: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load("grpo", None, ["trainer.num_ranks=4", "trainer.replicas=3", f"trainer.backend={backend}"])
    expected = {
        "fsdp": "must divide trainer.num_ranks=4, not 3; try 2",
        "megatron": "3 needs trainer.backend=fsdp: copies of megatron follow from its layout; set auto here",
    }
    assert expected[backend] in str(raised.value)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_prefixes_are_not_kept_where_layers_carry_a_state(sizes: dict[str, ModelSizes], device: Device) -> None:
    config = config_of("model.max_length=64", "data.max_prompt_length=null", "generation.max_new_tokens=32")
    run = on(config, device, replace(sizes["qwen3-0.6b"], state_layers=3), H200)
    found = {choice.key: (choice.value, choice.why) for choice in run.choices}
    why = "engines keep keys and values of a prefix, not the states of 3 layers"
    assert found["generation.prefix_caching"] == (False, why)


def test_a_pack_holds_the_longest_sequence(sizes: dict[str, ModelSizes]) -> None:
    for device in ("cpu", "cuda"):
        long = on(config_of("generation.max_new_tokens=34000"), device, sizes["qwen3-0.6b"], H200)  # type: ignore[arg-type]
        assert long.trainer.micro_batch_tokens >= 34512


def test_a_pack_holds_all_rows_of_a_rollout_where_the_loss_needs_them_and_memory_allows(
    sizes: dict[str, ModelSizes],
) -> None:
    strips = ("environment.name=guess", "environment.max_turns=8", "environment.history=strip", "rewards=[]")
    strips += ("data.max_prompt_length=null",)
    whole = (*strips, "grpo.loss.name=gspo")
    for device, longest, tokens in (("cpu", 2048, 16384), ("cpu", 8192, 32768), ("cuda", 8192, 65536)):
        found = on(config_of(*whole, f"environment.max_length={longest}"), device, sizes["qwen3-0.6b"], H200)  # type: ignore[arg-type]
        assert chosen(found)["trainer.micro_batch_tokens"] == tokens
    # A pack without any is chosen as for any loss.
    long = ("environment.max_length=40960", "environment.max_turns=64")
    found, other = (on(config_of(*each, *long), "cuda", sizes["qwen3-8b"], H200) for each in (whole, strips))
    (why,) = (each.why for each in found.choices if each.key == "trainer.micro_batch_tokens")
    assert why.endswith("; rollouts whose rows have more, up to 2,621,440, are left out")
    assert chosen(found) == chosen(other)


def test_short_answers_of_a_small_model_leave_the_engine_awake_with_a_cache_for_all(
    sizes: dict[str, ModelSizes],
) -> None:
    run = on(config_of(*SHORT), "cuda", sizes["qwen3-0.6b"], H200)
    found = chosen(run)
    assert (found["generation.sleep"], found["trainer.activation_checkpointing"]) == (False, False)
    assert (found["trainer.compile"], found["trainer.micro_batch_tokens"]) == (True, 32768)
    assert found["generation.max_num_seqs"] == 512
    assert run.generation.cache_mib is not None
    assert run.generation.cache_mib << 20 >= 512 * (128 + 256) * 2 * 28 * 8 * 128 * 2
    # The smaller device takes smaller packs before it lets the engine sleep.
    small = chosen(on(config_of(*SHORT), "cuda", sizes["qwen3-0.6b"], H100))
    assert (small["generation.sleep"], small["trainer.micro_batch_tokens"]) == (False, 16384)


def test_a_cache_holds_episodes_between_their_turns_too(sizes: dict[str, ModelSizes]) -> None:
    """512 rollouts a step, 128 decoded at a time."""
    turns = ("environment.name=guess", "environment.max_turns=8", "environment.max_length=1280")
    few = "generation.max_num_seqs=128"
    one, many = (
        on(config_of(*SHORT, few, *more), "cuda", sizes["qwen3-0.6b"], H200)
        for more in (("model.max_length=1280",), ("data.max_prompt_length=null", "rewards=[]", *turns))
    )
    assert one.generation.cache_mib and many.generation.cache_mib
    for run, kept, longest in ((one, 128, 384), (many, 256, 1280)):
        share = next(choice for choice in run.choices if choice.key == "generation.gpu_memory_utilization")
        assert share.why == f"a cache for {kept} sequences of {longest:,} tokens"


def test_a_cache_is_no_larger_than_a_step_fills(sizes: dict[str, ModelSizes]) -> None:
    """16 x 8 rollouts: memory for 256 sequences would be emptied, and taken back, with every sleep."""
    run = on(config_of(*SHORT, "grpo.num_prompts_per_step=16"), "cuda", sizes["qwen3-8b"], H200)
    assert chosen(run)["generation.max_num_seqs"] == 256
    share = next(choice for choice in run.choices if choice.key == "generation.gpu_memory_utilization")
    assert share.why == "a cache for 128 sequences of 384 tokens"


def test_what_does_not_fit_side_by_side_takes_turns(sizes: dict[str, ModelSizes]) -> None:
    long = chosen(on(config_of(), "cuda", sizes["qwen3-0.6b"], H200))
    assert (long["generation.sleep"], long["trainer.micro_batch_tokens"]) == (True, 32768)
    large = chosen(on(config_of(), "cuda", sizes["qwen3-8b"], H200))
    assert (large["generation.sleep"], large["trainer.activation_checkpointing"]) == (True, True)
    moved = "trainer.offload_optimizer_for_generation=true"
    assert chosen(on(config_of(*SHORT, moved), "cuda", sizes["qwen3-0.6b"], H200))["generation.sleep"] is True


def test_engines_with_devices_of_their_own_never_sleep_for_want_of_room(sizes: dict[str, ModelSizes]) -> None:
    run = on(config_of("placement.colocated=false"), "cuda", sizes["qwen3-8b"], H200)
    found = chosen(run)
    assert (found["generation.sleep"], found["generation.gpu_memory_utilization"]) == (False, 0.85)
    assert run.generation.cache_mib is None
    [why] = [choice.why for choice in run.choices if choice.key == "generation.sleep"]
    assert why == "engines have devices of their own"


def test_logits_are_kept_where_the_forecast_leaves_room_and_no_further(sizes: dict[str, ModelSizes]) -> None:
    own = sizes["qwen3-0.6b"]
    for memory in (20 * GIB, 40 * GIB, H100):
        run = on(config_of("placement.colocated=false"), "cuda", own, memory)
        trainer, chunk = run.trainer, run.trainer.logprob_chunk_tokens
        more = trainer.logprob_kept_tokens - chunk
        assert more % chunk == 0 and 0 <= more < trainer.micro_batch_tokens
        needed = sum(trainer_bytes(trainer, own, "cuda").values())
        one = replace(trainer, logprob_kept_tokens=chunk)
        assert needed == sum(trainer_bytes(one, own, "cuda").values()) + 2 * more * own.vocab <= USABLE * memory
        if trainer.logprob_kept_tokens < trainer.micro_batch_tokens:
            assert needed + 2 * chunk * own.vocab > USABLE * memory
    # An engine that stays awake has the room.
    awake = on(config_of("generation.sleep=false"), "cuda", own, H200).trainer
    assert awake.logprob_kept_tokens == awake.logprob_chunk_tokens


def sft_on_h100(sizes: ModelSizes, *overrides: str) -> Settled:
    config = load("sft", None, ["trainer.micro_batch_tokens=32768", "trainer.num_ranks=1", *overrides]).config
    config = replace(config, model=replace(config.model, max_length=4096))
    return settle(config, RunMachine("cuda", H100), sizes)


def test_one_micro_batch_has_its_logits_before_any_gradient(tmp_path: Path) -> None:
    """Four layers of Qwen3-30B-A3B: 96,296 tokens/s with all logits kept, 83,842 with one chunk (H100)."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(COMMON | SHAPES["qwen3-30b-a3b"] | {"num_hidden_layers": 4}))
    own = read_sizes(file)
    one, two = (sft_on_h100(own, f"sft.batch_size={size}").trainer for size in (8, 9))
    assert (one.activation_checkpointing, one.logprob_kept_tokens) == (False, 32768)
    alone, among = (trainer_bytes(each, own, "cuda") for each in (one, replace(one, update_tokens=40960)))
    logits = among["logits"] + among["output's gradient"]
    assert sum(alone.values()) == sum(among.values()) - min(logits, among["gradients"]) <= USABLE * H100
    # A second one finds the gradients of the first: the same would not fit.
    assert sum(among.values()) > USABLE * H100 >= sum(trainer_bytes(two, own, "cuda").values())
    # Megatron-core allocates its gradients once.
    kept = replace(one, backend="megatron")
    assert trainer_bytes(kept, own, "cuda") == trainer_bytes(replace(kept, update_tokens=40960), own, "cuda")


def test_packs_of_any_size_are_chosen_for_at_once(sizes: dict[str, ModelSizes]) -> None:
    """A number that slipped is answered, too: a trial a chunk would take a minute for 30 billion tokens."""
    settled = sft_on_h100(sizes["qwen3-0.6b"], "sft.batch_size=8")
    slipped = replace(settled.config.trainer, micro_batch_tokens=10**15, logprob_chunk_tokens=1)
    tried = settle(replace(settled.config, trainer=slipped), settled.machine, settled.facts).trainer
    assert tried.logprob_kept_tokens == 1
    fine = replace(settled.config.trainer, logprob_chunk_tokens=1)
    kept = settle(replace(settled.config, trainer=fine), settled.machine, settled.facts).trainer.logprob_kept_tokens
    assert settled.trainer.logprob_kept_tokens <= kept == 32768


def test_sequences_follow_the_rollouts_in_flight(sizes: dict[str, ModelSizes]) -> None:
    asynchronous = ("async.enabled=true", "async.max_trajectory_age_steps=2", "generation.num_engines=4")
    for overrides, expected in (
        (("grpo.num_prompts_per_step=8",), 256),
        (("grpo.num_prompts_per_step=64",), 512),
        (("grpo.num_prompts_per_step=512",), 512),
        (("grpo.num_prompts_per_step=64", *asynchronous), 384),
    ):
        found = chosen(on(config_of(*overrides), "cuda", sizes["qwen3-0.6b"], H200))
        assert found["generation.max_num_seqs"] == expected


def test_what_was_written_stays_and_the_rest_follows_from_it(sizes: dict[str, ModelSizes]) -> None:
    written = {
        "trainer.compile": False,
        "trainer.activation_checkpointing": True,
        "trainer.micro_batch_tokens": 4096,
        "trainer.logprob_chunk_tokens": 100,
        "trainer.logprob_kept_tokens": 50,
        "generation.max_num_seqs": 7,
        "generation.gpu_memory_utilization": 0.5,
        "generation.sleep": True,
        "generation.prefix_caching": False,
    }
    own = config_of(*(f"{key}={str(value).lower()}" for key, value in written.items()))
    run = on(own, "cuda", sizes["qwen3-0.6b"], H200)
    assert run.choices == ()
    settings = vars(run.trainer) | vars(run.generation)
    assert {key: settings[key.partition(".")[2]] for key in written} == written
    half = on(config_of("generation.gpu_memory_utilization=0.5", *SHORT), "cuda", sizes["qwen3-0.6b"], H200)
    assert "generation.gpu_memory_utilization" not in chosen(half)
    awake = on(config_of("generation.sleep=false"), "cuda", sizes["qwen3-4b"], H100)
    assert awake.generation.sleep is False


def test_before_sizes_or_memory_are_known_nothing_is_promised() -> None:
    found = chosen(on(config_of(), "cuda", None, H200))
    assert (found["trainer.compile"], found["trainer.micro_batch_tokens"], found["generation.sleep"]) == (
        True,
        8192,
        True,
    )


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(["qwen3-0.6b", "qwen3-4b", "qwen3-8b"]),
    gib=st.integers(16, 288),
    answer=st.integers(16, 8192),
    prompts=st.integers(1, 256),
    sleep=st.sampled_from(["auto", "false"]),
)
def test_a_choice_fits_the_device_wherever_the_state_does(
    sizes: dict[str, ModelSizes], name: str, gib: int, answer: int, prompts: int, sleep: str
) -> None:
    overrides = [f"generation.max_new_tokens={answer}", f"grpo.num_prompts_per_step={prompts}"]
    overrides.append(f"generation.sleep={sleep}")
    plan = make_plan(on(config_of(*overrides), device_of(1), sizes[name], gib * GIB), this_machine(1))
    assert plan.memory is not None
    values = {choice.key: choice.value for choice in plan.chosen}
    share = values["generation.gpu_memory_utilization"]
    if plan.memory.awake and share != 0.6:
        assert plan.memory.peak <= (USABLE + 0.02) * gib * GIB
    resident = sum(each.device for each in plan.memory.placed_states["generate"].values())
    if share != 0.6:
        assert resident + share * gib * GIB <= 0.93 * gib * GIB
        assert plan.memory.kv_sequences


def test_a_base_that_no_refit_brings_stays_in_the_engine_or_waits_on_the_host(sizes: dict[str, ModelSizes]) -> None:
    long = ("generation.max_new_tokens=16384", "data.max_prompt_length=1024", "lora={}")

    def said(size: str, memory: int, *overrides: str) -> tuple[bool, str]:
        run = on(config_of(*overrides), "cuda", sizes[size], memory)
        return next((each.value, each.why) for each in run.choices if each.key == "generation.sleep")

    awake = (False, "trainer and engine fit side by side; the base stays in both")
    assert said("qwen3-0.6b", H200, *SHORT, "lora={}") == awake
    sleeps, reason = said("qwen3-8b", 48 * GIB, *long)
    assert sleeps and reason.endswith("a refit brings adapters alone, so 15 GiB wait on the host")
    assert said("qwen3-8b", H100, *SHORT)[1] == "trainer and engine do not fit side by side"
