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
from rlctl.preflight.trainer_settings import Choice

GIB = 1 << 30
H200 = int(140.4 * GIB)
H100 = int(79.6 * GIB)
SHORT = ("generation.max_new_tokens=256", "data.max_prompt_length=128")
COMMON = {"hidden_act": "silu", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "bos_token_id": None}


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSizes]:
    sizes_by_model = {}
    for name in ("qwen3-0.6b", "qwen3-4b", "qwen3-8b"):
        file = tmp_path_factory.mktemp(name) / "config.json"
        file.write_text(json.dumps(COMMON | SHAPES[name]))
        sizes_by_model[name] = read_sizes(file)
    return sizes_by_model


def config_of(*overrides: str) -> GrpoConfig:
    config = load("grpo", "grpo-qwen3-0.6b-1gpu", list(overrides)).config
    assert isinstance(config, GrpoConfig)
    return config


def settle_for(config: GrpoConfig, device: Device, sizes: ModelSizes | None, memory: int | None) -> SettledGrpo:
    """Settle a config on one device. memory: bytes of the device."""
    return settle(config, RunMachine(device, memory), sizes)


def chosen_values(run: Settled) -> dict[str, Any]:
    return {choice.key: choice.value for choice in run.choices}


def find_choice(run: Settled, key: str) -> Choice:
    return next(choice for choice in run.choices if choice.key == key)


def test_on_a_cpu_the_values_are_constants(sizes: dict[str, ModelSizes]) -> None:
    run = settle_for(config_of(), "cpu", sizes["qwen3-0.6b"], 16 * GIB)
    assert chosen_values(run) == {
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
    assert chosen_values(settle_for(config, device, sizes["qwen3-0.6b"], H200))["generation.prefix_caching"] is caches


def settle_on_nodes(sizes: ModelSizes | None, memory: int | None, *nodes: int, device: Device = "cuda") -> SettledGrpo:
    config = config_of(f"trainer.num_ranks={sum(nodes)}")
    return settle(config, RunMachine(device, memory, nodes), sizes)


def reason_of_replicas(run: Settled) -> str:
    return find_choice(run, "trainer.replicas").why


def test_each_node_has_a_copy_of_the_state_if_its_ranks_can_hold_it(sizes: dict[str, ModelSizes]) -> None:
    sizes_8b = sizes["qwen3-8b"]
    run = settle_on_nodes(sizes_8b, H100, 8, 8)
    assert run.trainer.replicas == 2
    gib_per_rank = 16 * sizes_8b.parameters / 8 / GIB
    assert f"on the 8 ranks of a node takes {gib_per_rank:.1f} of 80 GiB each" in reason_of_replicas(run)
    on_two_ranks = settle_on_nodes(sizes_8b, H100, 2, 2)
    assert on_two_ranks.trainer.replicas == 1
    gib_per_rank = 16 * sizes_8b.parameters / 2 / GIB
    assert f"would take {gib_per_rank:.0f} of 80 GiB each, above 50%" in reason_of_replicas(on_two_ranks)
    # The forecast counts a copy a node.
    memory = make_plan(run, [NodeResources("a", 8), NodeResources("b", 8)]).memory
    assert memory.state_peak == 16 * -(-sizes_8b.parameters // 8)


def test_one_node_has_one_copy_without_a_word(sizes: dict[str, ModelSizes]) -> None:
    run = settle_on_nodes(sizes["qwen3-0.6b"], H100, 8)
    assert run.trainer.replicas == 1
    assert "trainer.replicas" not in chosen_values(run)


def test_unequal_nodes_and_unknown_sizes_share_one_copy(sizes: dict[str, ModelSizes]) -> None:
    on_unequal = settle_on_nodes(sizes["qwen3-0.6b"], H100, 8, 4)
    assert reason_of_replicas(on_unequal) == "the nodes have unequal numbers of ranks: 8, 4"
    of_unknown_model = settle_on_nodes(None, H100, 8, 8)
    on_unknown_memory = settle_on_nodes(sizes["qwen3-0.6b"], None, 8, 8)
    assert reason_of_replicas(of_unknown_model) == reason_of_replicas(on_unknown_memory)
    on_cpus = settle_on_nodes(sizes["qwen3-0.6b"], None, 2, 2, device="cpu")
    assert (on_cpus.trainer.replicas, chosen_values(on_cpus)["trainer.replicas"]) == (2, 2)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_number_of_copies_that_no_ranks_can_share_is_refused(backend: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load("grpo", None, ["trainer.num_ranks=4", "trainer.replicas=3", f"trainer.backend={backend}"])
    messages = {
        "fsdp": "must divide trainer.num_ranks=4, not 3; try 2",
        "megatron": "3 needs trainer.backend=fsdp: copies of megatron follow from its layout; set auto here",
    }
    assert messages[backend] in str(raised.value)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_prefixes_are_not_kept_where_layers_carry_a_state(sizes: dict[str, ModelSizes], device: Device) -> None:
    config = config_of("model.max_length=64", "data.max_prompt_length=null", "generation.max_new_tokens=32")
    run = settle_for(config, device, replace(sizes["qwen3-0.6b"], state_layers=3), H200)
    choice = find_choice(run, "generation.prefix_caching")
    assert choice.value is False
    assert choice.why == "engines keep keys and values of a prefix, not the states of 3 layers"


def test_a_pack_holds_the_longest_sequence(sizes: dict[str, ModelSizes]) -> None:
    for device in ("cpu", "cuda"):
        long = settle_for(config_of("generation.max_new_tokens=34000"), device, sizes["qwen3-0.6b"], H200)  # type: ignore[arg-type]
        assert long.trainer.micro_batch_tokens >= 34512


def test_a_pack_holds_all_rows_of_a_rollout_where_the_loss_needs_them_and_memory_allows(
    sizes: dict[str, ModelSizes],
) -> None:
    strips = ("environment.name=guess", "environment.max_turns=8", "environment.history=strip", "rewards=[]")
    strips += ("data.max_prompt_length=null",)
    whole_rollouts = (*strips, "grpo.loss.name=gspo")
    for device, longest, tokens in (("cpu", 2048, 16384), ("cpu", 8192, 32768), ("cuda", 8192, 65536)):
        config = config_of(*whole_rollouts, f"environment.max_length={longest}")
        run = settle_for(config, device, sizes["qwen3-0.6b"], H200)  # type: ignore[arg-type]
        assert chosen_values(run)["trainer.micro_batch_tokens"] == tokens
    # Where memory allows no such pack, the choice is that for any other loss.
    long = ("environment.max_length=40960", "environment.max_turns=64")
    with_gspo = settle_for(config_of(*whole_rollouts, *long), "cuda", sizes["qwen3-8b"], H200)
    with_grpo = settle_for(config_of(*strips, *long), "cuda", sizes["qwen3-8b"], H200)
    reason = find_choice(with_gspo, "trainer.micro_batch_tokens").why
    assert reason.endswith("; rollouts whose rows have more, up to 2,621,440, are left out")
    assert chosen_values(with_gspo) == chosen_values(with_grpo)


def test_short_answers_of_a_small_model_leave_the_engine_awake_with_a_cache_for_all(
    sizes: dict[str, ModelSizes],
) -> None:
    run = settle_for(config_of(*SHORT), "cuda", sizes["qwen3-0.6b"], H200)
    values = chosen_values(run)
    assert (values["generation.sleep"], values["trainer.activation_checkpointing"]) == (False, False)
    assert (values["trainer.compile"], values["trainer.micro_batch_tokens"]) == (True, 32768)
    assert values["generation.max_num_seqs"] == 512
    assert run.generation.cache_mib is not None
    assert run.generation.cache_mib << 20 >= 512 * (128 + 256) * 2 * 28 * 8 * 128 * 2
    # The smaller device takes smaller packs before it lets the engine sleep.
    small = chosen_values(settle_for(config_of(*SHORT), "cuda", sizes["qwen3-0.6b"], H100))
    assert (small["generation.sleep"], small["trainer.micro_batch_tokens"]) == (False, 16384)


def test_a_cache_holds_episodes_between_their_turns_too(sizes: dict[str, ModelSizes]) -> None:
    """A step has 512 rollouts, of which engines decode 128 at a time."""
    few = "generation.max_num_seqs=128"
    turns = ("environment.name=guess", "environment.max_turns=8", "environment.max_length=1280")
    episodes = ("data.max_prompt_length=null", "rewards=[]", *turns)
    for overrides, sequences, longest in ((("model.max_length=1280",), 128, 384), (episodes, 256, 1280)):
        run = settle_for(config_of(*SHORT, few, *overrides), "cuda", sizes["qwen3-0.6b"], H200)
        assert run.generation.cache_mib
        reason = find_choice(run, "generation.gpu_memory_utilization").why
        assert reason == f"a cache for {sequences} sequences of {longest:,} tokens"


def test_a_cache_is_no_larger_than_a_step_fills(sizes: dict[str, ModelSizes]) -> None:
    """A step has 16 x 8 rollouts. Every sleep would empty and take back the memory of 256 sequences."""
    run = settle_for(config_of(*SHORT, "grpo.num_prompts_per_step=16"), "cuda", sizes["qwen3-8b"], H200)
    assert chosen_values(run)["generation.max_num_seqs"] == 256
    reason = find_choice(run, "generation.gpu_memory_utilization").why
    assert reason == "a cache for 128 sequences of 384 tokens"


def test_what_does_not_fit_side_by_side_takes_turns(sizes: dict[str, ModelSizes]) -> None:
    long = chosen_values(settle_for(config_of(), "cuda", sizes["qwen3-0.6b"], H200))
    assert (long["generation.sleep"], long["trainer.micro_batch_tokens"]) == (True, 32768)
    large = chosen_values(settle_for(config_of(), "cuda", sizes["qwen3-8b"], H200))
    assert (large["generation.sleep"], large["trainer.activation_checkpointing"]) == (True, True)
    moved = "trainer.offload_optimizer_for_generation=true"
    with_moved_state = chosen_values(settle_for(config_of(*SHORT, moved), "cuda", sizes["qwen3-0.6b"], H200))
    assert with_moved_state["generation.sleep"] is True


def test_engines_with_devices_of_their_own_never_sleep_for_want_of_room(sizes: dict[str, ModelSizes]) -> None:
    run = settle_for(config_of("placement.colocated=false"), "cuda", sizes["qwen3-8b"], H200)
    values = chosen_values(run)
    assert (values["generation.sleep"], values["generation.gpu_memory_utilization"]) == (False, 0.85)
    assert run.generation.cache_mib is None
    assert find_choice(run, "generation.sleep").why == "engines have devices of their own"


def test_logits_are_kept_where_the_forecast_leaves_room_and_no_further(sizes: dict[str, ModelSizes]) -> None:
    small_sizes = sizes["qwen3-0.6b"]
    for memory in (20 * GIB, 40 * GIB, H100):
        trainer = settle_for(config_of("placement.colocated=false"), "cuda", small_sizes, memory).trainer
        chunk = trainer.logprob_chunk_tokens
        beyond_chunk = trainer.logprob_kept_tokens - chunk
        assert beyond_chunk % chunk == 0 and 0 <= beyond_chunk < trainer.micro_batch_tokens
        forecast = sum(trainer_bytes(trainer, small_sizes, "cuda").values())
        one_chunk = replace(trainer, logprob_kept_tokens=chunk)
        of_one_chunk = sum(trainer_bytes(one_chunk, small_sizes, "cuda").values())
        assert forecast == of_one_chunk + 2 * beyond_chunk * small_sizes.vocab <= USABLE * memory
        if trainer.logprob_kept_tokens < trainer.micro_batch_tokens:
            assert forecast + 2 * chunk * small_sizes.vocab > USABLE * memory
    # An engine that stays awake has the room.
    awake = settle_for(config_of("generation.sleep=false"), "cuda", small_sizes, H200).trainer
    assert awake.logprob_kept_tokens == awake.logprob_chunk_tokens


def settle_sft_on_h100(sizes: ModelSizes, *overrides: str) -> Settled:
    config = load("sft", None, ["trainer.micro_batch_tokens=32768", "trainer.num_ranks=1", *overrides]).config
    config = replace(config, model=replace(config.model, max_length=4096))
    return settle(config, RunMachine("cuda", H100), sizes)


def test_one_micro_batch_has_its_logits_before_any_gradient(tmp_path: Path) -> None:
    """Measured on four layers of Qwen3-30B-A3B: 96,296 tokens/s with all logits kept, 83,842 with one chunk (H100)."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(COMMON | SHAPES["qwen3-30b-a3b"] | {"num_hidden_layers": 4}))
    sizes = read_sizes(file)
    of_one_batch = settle_sft_on_h100(sizes, "sft.batch_size=8").trainer
    of_two_batches = settle_sft_on_h100(sizes, "sft.batch_size=9").trainer
    assert (of_one_batch.activation_checkpointing, of_one_batch.logprob_kept_tokens) == (False, 32768)
    alone = trainer_bytes(of_one_batch, sizes, "cuda")
    after_another = trainer_bytes(replace(of_one_batch, update_tokens=40960), sizes, "cuda")
    logits = after_another["logits"] + after_another["output's gradient"]
    difference = min(logits, after_another["gradients"])
    assert sum(alone.values()) == sum(after_another.values()) - difference <= USABLE * H100
    # The second micro-batch finds the gradients of the first: the same logits would not fit.
    assert sum(after_another.values()) > USABLE * H100 >= sum(trainer_bytes(of_two_batches, sizes, "cuda").values())
    # Megatron-core allocates its gradients once.
    on_megatron = replace(of_one_batch, backend="megatron")
    of_several = replace(on_megatron, update_tokens=40960)
    assert trainer_bytes(on_megatron, sizes, "cuda") == trainer_bytes(of_several, sizes, "cuda")


def test_packs_of_any_size_are_chosen_for_at_once(sizes: dict[str, ModelSizes]) -> None:
    """A mistyped number is answered at once, too: a trial a chunk would take a minute for 30 billion tokens."""
    settled = settle_sft_on_h100(sizes["qwen3-0.6b"], "sft.batch_size=8")
    mistyped = replace(settled.config.trainer, micro_batch_tokens=10**15, logprob_chunk_tokens=1)
    of_mistyped = settle(replace(settled.config, trainer=mistyped), settled.machine, settled.facts).trainer
    assert of_mistyped.logprob_kept_tokens == 1
    finest = replace(settled.config.trainer, logprob_chunk_tokens=1)
    of_finest = settle(replace(settled.config, trainer=finest), settled.machine, settled.facts).trainer
    assert settled.trainer.logprob_kept_tokens <= of_finest.logprob_kept_tokens == 32768


def test_sequences_follow_the_rollouts_in_flight(sizes: dict[str, ModelSizes]) -> None:
    asynchronous = ("async.enabled=true", "async.max_trajectory_age_steps=2", "generation.num_engines=4")
    for overrides, expected_sequences in (
        (("grpo.num_prompts_per_step=8",), 256),
        (("grpo.num_prompts_per_step=64",), 512),
        (("grpo.num_prompts_per_step=512",), 512),
        (("grpo.num_prompts_per_step=64", *asynchronous), 384),
    ):
        run = settle_for(config_of(*overrides), "cuda", sizes["qwen3-0.6b"], H200)
        assert chosen_values(run)["generation.max_num_seqs"] == expected_sequences


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
    config = config_of(*(f"{key}={str(value).lower()}" for key, value in written.items()))
    run = settle_for(config, "cuda", sizes["qwen3-0.6b"], H200)
    assert run.choices == ()
    settled_values = vars(run.trainer) | vars(run.generation)
    assert {key: settled_values[key.partition(".")[2]] for key in written} == written
    config = config_of("generation.gpu_memory_utilization=0.5", *SHORT)
    half_for_engines = settle_for(config, "cuda", sizes["qwen3-0.6b"], H200)
    assert "generation.gpu_memory_utilization" not in chosen_values(half_for_engines)
    awake = settle_for(config_of("generation.sleep=false"), "cuda", sizes["qwen3-4b"], H100)
    assert awake.generation.sleep is False


def test_before_sizes_or_memory_are_known_nothing_is_promised() -> None:
    values = chosen_values(settle_for(config_of(), "cuda", None, H200))
    assert (values["trainer.compile"], values["trainer.micro_batch_tokens"]) == (True, 8192)
    assert values["generation.sleep"] is True


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
    plan = make_plan(settle_for(config_of(*overrides), device_of(1), sizes[name], gib * GIB), this_machine(1))
    assert plan.memory is not None
    values = {choice.key: choice.value for choice in plan.chosen}
    share = values["generation.gpu_memory_utilization"]
    if plan.memory.awake and share != 0.6:
        assert plan.memory.peak <= (USABLE + 0.02) * gib * GIB
    resident = sum(state.device for state in plan.memory.placed_states["generate"].values())
    if share != 0.6:
        assert resident + share * gib * GIB <= 0.93 * gib * GIB
        assert plan.memory.kv_sequences


def test_a_base_that_no_refit_brings_stays_in_the_engine_or_waits_on_the_host(sizes: dict[str, ModelSizes]) -> None:
    long = ("generation.max_new_tokens=16384", "data.max_prompt_length=1024", "lora={}")

    def choose_sleep(model: str, memory: int, *overrides: str) -> Choice:
        return find_choice(settle_for(config_of(*overrides), "cuda", sizes[model], memory), "generation.sleep")

    small = choose_sleep("qwen3-0.6b", H200, *SHORT, "lora={}")
    assert small.value is False
    assert small.why == "trainer and engine fit side by side; the base stays in both"
    large = choose_sleep("qwen3-8b", 48 * GIB, *long)
    assert large.value is True
    assert large.why.endswith("a refit brings adapters alone, so 15 GiB wait on the host")
    assert choose_sleep("qwen3-8b", H100, *SHORT).why == "trainer and engine do not fit side by side"
