from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rlctl.models.facts import ModelSizes, RowBytes
from rlctl.models.model_sizes import read_sizes
from rlctl.preflight.check_model import model_notes
from rlctl.preflight.load import load
from rlctl.preflight.machine import RunMachine, device_of
from rlctl.preflight.memory import PlacedState
from rlctl.preflight.placement import this_machine
from rlctl.preflight.plan import RunPlan, make_plan
from rlctl.preflight.settled import settle
from rlctl.preflight.update_memory import activation_bytes, kept_bytes
from tests.size_formulas import sizes_by_formula

GIB = 1 << 30
ONE_LAYER = sizes_by_formula(
    {
        "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 16, "vocab_size": 10,
        "max_position_embeddings": 64,
    }
)  # fmt: skip


def plan_run(
    home: Path,
    *overrides: str,
    kind: str = "grpo",
    gpus: int = 0,
    memory: int | None = 16 * GIB,
    disk: int | None = None,
) -> RunPlan:
    run = load(kind, f"{kind}.recipe.yaml", list(overrides)).settled
    settled = run.settle_on(RunMachine(device_of(gpus), memory), read_sizes(home / "model/config.json"))
    return make_plan(settled, this_machine(gpus), disk)


def count_parameters(home: Path) -> int:
    return read_sizes(home / "model/config.json").parameters


def test_the_arithmetic_of_a_step(home: Path) -> None:
    step = plan_run(
        home,
        "grpo.num_prompts_per_step=6",
        "grpo.num_generations_per_prompt=4",
        "grpo.updates_per_step=2",
        "trainer.num_ranks=5",
        "trainer.micro_batch_tokens=300",
    ).batch
    assert (step.rollouts, step.per_update, step.per_rank) == (24, 12, 3)
    assert (step.longest, step.tokens) == (128, 24 * 128)
    assert (step.full_sequences, step.micro_batches) == (2, 2)


def test_the_arithmetic_of_an_sft_step(home: Path) -> None:
    step = plan_run(home, "sft.batch_size=10", "trainer.num_ranks=4", kind="sft").batch
    assert (step.rollouts, step.per_rank, step.longest) == (10, 3, 256)


def test_steps_validations_and_checkpoints_are_counted(home: Path) -> None:
    overrides = ["grpo.num_steps=25", "grpo.updates_per_step=4", "data.validation.path=train.jsonl"]
    schedule = plan_run(home, *overrides, "checkpoint.every=10").schedule
    assert (schedule.steps, schedule.updates) == (25, 100)
    assert schedule.validations == 4  # at the start, after 10, 20 and 25
    assert schedule.checkpoints == 3  # after 10, 20 and 25
    assert schedule.kept == 3
    assert schedule.checkpoint_bytes == count_parameters(home) * (12 + 4)
    narrow = plan_run(home, "checkpoint.export_dtype=bfloat16").schedule
    assert narrow.checkpoint_bytes == count_parameters(home) * (12 + 2)
    assert plan_run(home, "checkpoint.every=0").schedule.checkpoints == 1
    assert plan_run(home, "validation.every=0").schedule.validations == 0
    even = ["grpo.num_steps=20", "data.validation.path=train.jsonl", "validation.at_start=false"]
    assert plan_run(home, *even).schedule.validations == 2  # after 10 and 20


def test_trainer_state_is_sharded_over_the_ranks_and_exact(home: Path) -> None:
    memory = plan_run(home, "trainer.num_ranks=2", gpus=2).memory
    assert memory
    half = -(-count_parameters(home) // 2)
    assert memory.trainer["weights, float32"] == memory.trainer["gradients"] == 4 * half
    assert memory.trainer["AdamW moments"] == 8 * half


def test_a_reference_is_counted_only_with_kl_and_never_on_a_gpu_since_it_stands_in_host_memory(home: Path) -> None:
    without_kl = plan_run(home).memory
    with_kl = plan_run(home, "grpo.loss.kl_coef=0.1").memory
    assert without_kl and "reference" not in without_kl.trainer
    assert with_kl and with_kl.trainer["reference"] == 4 * count_parameters(home)
    assert with_kl.peak - without_kl.peak == 4 * count_parameters(home)
    for placed in ("placement.colocated=true", "placement.colocated=false"):
        without_kl = plan_run(home, placed, "grpo.loss.kl_coef=0", gpus=2).memory
        with_kl = plan_run(home, placed, "grpo.loss.kl_coef=0.1", gpus=2).memory
        assert without_kl and with_kl
        assert (without_kl.trainer, without_kl.peak) == (with_kl.trainer, with_kl.peak)
        in_bfloat16 = PlacedState("host", 0, 2 * count_parameters(home))
        assert {states["reference"] for states in with_kl.placed_states.values()} == {in_bfloat16}
        assert all("reference" not in states for states in without_kl.placed_states.values())


def test_the_output_takes_the_logits_of_a_chunk_and_the_gradient_of_its_weight(home: Path) -> None:
    # 100 tokens, a vocabulary of 32 and 64 hidden numbers, as in folders.MODEL.
    chunk = ("trainer.logprob_chunk_tokens=100", "trainer.logprob_kept_tokens=100")
    gpu = plan_run(home, *chunk, "trainer.compile=false", gpus=1).memory
    fused = plan_run(home, *chunk, gpus=1).memory
    assert gpu and gpu.trainer["logits"] == 16 * 100 * 32
    assert fused and fused.trainer["logits"] == 6 * 100 * 32
    # The gradient is summed in float32. One product is bfloat16, on a CPU float32.
    assert gpu.trainer["output's gradient"] == (4 + 2) * 32 * 64
    cpu = plan_run(home, *chunk).memory
    two_tensor_ranks = plan_run(home, *MEGATRON, *chunk, "trainer.compile=false", kind="sft", gpus=8).memory
    assert cpu and cpu.trainer["output's gradient"] == (4 + 4) * 32 * 64
    assert two_tensor_ranks and two_tensor_ranks.trainer["output's gradient"] == (4 + 2) * 32 * 64 // 2
    assert two_tensor_ranks.trainer["logits"] == 16 * 100 * 32 // 2


def test_logits_that_are_kept_take_two_bytes_beyond_one_chunk(home: Path) -> None:
    for tokens, beyond_chunk in ((0, 0), (100, 0), (300, 200)):
        overrides = ("trainer.logprob_chunk_tokens=100", f"trainer.logprob_kept_tokens={tokens}")
        memory = plan_run(home, *overrides, gpus=1).memory
        assert memory and memory.trainer["logits"] == (6 * 100 + 2 * beyond_chunk) * 32


def test_one_rank_casts_its_weights_and_several_gather_a_layer_at_a_time(home: Path) -> None:
    sizes = read_sizes(home / "model/config.json")
    outside_layers = (1 if sizes.tied else 2) * sizes.embedding_parameters
    for overrides, numbers in (
        (("trainer.activation_checkpointing=false",), sizes.parameters),
        (("trainer.activation_checkpointing=true",), outside_layers + sizes.largest_layer),
        (("trainer.num_ranks=2",), outside_layers + 2 * sizes.largest_layer),
        (("trainer.dtype=float32",), 0),
        (("lora.rank=2", "lora.targets=[q_proj]"), 2 * sum(q_proj_widths(sizes))),
    ):
        memory = plan_run(home, *overrides, gpus=2).memory
        size = 4 if "trainer.dtype=float32" in overrides else 2
        assert memory and memory.trainer.get("weights to compute with", 0) == numbers * size, overrides


def q_proj_widths(sizes: ModelSizes) -> list[int]:
    """Return the input and output width together of each query projection."""
    return [linear.inputs + linear.outputs for linear in sizes.linears if linear.name.endswith("q_proj")]


def test_padded_rows_keep_what_was_recorded_and_scores_by_the_square() -> None:
    run = load("grpo", "grpo-tiny", []).settled.settle_on(RunMachine("cuda", GIB), ONE_LAYER)
    trainer = replace(run.trainer, dtype="bfloat16", micro_batch_tokens=1000, activation_checkpointing=False)
    rows = replace(ONE_LAYER, layers=2, row_bytes=(RowBytes("float32", 7, 9), RowBytes("bfloat16", 5, 3)))
    count_kept_bytes = partial(kept_bytes, sizes=rows, size=2, residual=2)
    assert count_kept_bytes(trainer) == activation_bytes(rows, tokens=1000, size=2, residual=2, checkpointing=False)
    padded = replace(trainer, row_tokens=100)
    assert count_kept_bytes(padded) == 1000 * (5 + 3 * 100)
    assert count_kept_bytes(replace(padded, row_tokens=4000)) == 1000 * (5 + 3 * 1000)
    checkpointed = replace(padded, activation_checkpointing=True)
    assert count_kept_bytes(checkpointed) == 1000 * 2 * 8 * 2 + 1000 * (5 + 3 * 100) // 2


def test_activations_of_one_layer_counted_by_hand() -> None:
    # Norms 4 x 8, queries and output 2 x 8, keys and values 2 x 4, MLP 4 x 16 = 120 numbers a token.
    bytes_of_three_tokens = partial(activation_bytes, ONE_LAYER, tokens=3, size=2)
    assert bytes_of_three_tokens(residual=2, checkpointing=False) == 3 * 120 * 2
    assert bytes_of_three_tokens(residual=2, checkpointing=True) == 3 * (8 + 120) * 2
    # The residual is the input of two norms, and checkpointing keeps the residual alone of each layer.
    assert bytes_of_three_tokens(residual=4, checkpointing=False) == 3 * (120 + 16) * 2
    assert bytes_of_three_tokens(residual=4, checkpointing=True) == 3 * (8 + 120 + 24) * 2
    # Each token also keeps the inputs of its two experts.
    mixture = replace(ONE_LAYER, experts=4, experts_per_token=2)
    assert activation_bytes(mixture, tokens=3, size=2, residual=2, checkpointing=False) == 3 * (120 + 2 * 8) * 2


def test_a_float32_residual_takes_memory_where_compute_is_bfloat16(home: Path) -> None:
    option = "trainer.megatron.fp32_residual_connection=true"
    for dtype, takes_more in (("bfloat16", True), ("float32", False)):
        overrides = (*MEGATRON, f"trainer.dtype={dtype}")
        without_option = plan_run(home, *overrides, kind="sft", gpus=8).memory
        with_option = plan_run(home, *overrides, option, kind="sft", gpus=8).memory
        assert without_option and with_option
        is_larger = with_option.trainer["activations"] > without_option.trainer["activations"]
        assert is_larger is takes_more


def test_the_cache_of_an_engine_in_sequences(home: Path) -> None:
    memory = plan_run(home, "generation.kv_cache_mib=1").memory
    assert memory
    bytes_per_token = 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, head_dim, float32
    assert memory.kv_sequences == (1 << 20) // (bytes_per_token * 128)
    share = plan_run(home, gpus=1, memory=GIB).memory
    assert share and share.engine["key-value cache"] == int(0.6 * GIB) - 2 * count_parameters(home)


def test_on_one_cpu_everything_adds_up_and_a_shared_gpu_takes_turns(home: Path) -> None:
    cpu = plan_run(home, "trainer.num_ranks=2", "generation.num_engines=2").memory
    assert cpu and cpu.peak == sum(cpu.trainer.values())
    assert cpu.trainer["engines: key-value cache"] == 2 * (256 << 20)
    gpu = plan_run(home, gpus=1, memory=GIB).memory
    assert gpu
    resident = gpu.trainer["weights, float32"] + gpu.trainer["AdamW moments"]
    assert gpu.peak == resident + sum(gpu.engine.values())


def test_communicators_of_a_refit_by_broadcast_take_memory_of_both_sides(home: Path) -> None:
    apart = ("placement.colocated=false", "generation.num_engines=2")
    for ranks, groups in (("1", 1), ("4", 2)):
        memory = plan_run(home, *apart, f"trainer.num_ranks={ranks}", gpus=6).memory
        assert memory and memory.trainer["refit's communicator"] == GIB // 2
        assert memory.engine["refit's communicators"] == groups * GIB // 2
    pair = plan_run(home, "placement.colocated=false", gpus=2)
    assert pair.refit_way == "ipc" and pair.memory and "refit's communicators" not in pair.memory.engine


def test_a_checkpoint_is_copied_to_host_memory_while_training_goes_on(home: Path) -> None:
    state = 12 * count_parameters(home)
    gpu = plan_run(home, "trainer.num_ranks=2", gpus=2).memory
    assert gpu and gpu.host == {"copies of a checkpoint": state // 2} and "copies of a checkpoint" not in gpu.trainer
    cpu = plan_run(home, "trainer.num_ranks=2").memory
    assert cpu and cpu.trainer["copies of a checkpoint"] == state and not cpu.host
    for never in (("checkpoint.beside_training=false",), ("checkpoint.every=0", "checkpoint.at_end=false")):
        memory = plan_run(home, *never, gpus=1).memory
        assert memory and not memory.host


def test_where_state_stands_is_forecast_by_phase(home: Path) -> None:
    state = 4 * count_parameters(home)
    without_offload = plan_run(home, gpus=1, memory=GIB).memory
    assert without_offload and list(without_offload.placed_states) == ["generate", "train", "refit", "checkpoint"]
    at_rest = {"parameters": state, "gradients": 0, "optimizer": 2 * state}
    for phase, states in without_offload.placed_states.items():
        bytes_on_device = {name: placed.device for name, placed in states.items()}
        assert bytes_on_device == (at_rest | {"gradients": state} if phase == "train" else at_rest)
    assert without_offload.state_peak == 4 * state
    moved = plan_run(
        home, "trainer.offload_optimizer_for_generation=true", "grpo.loss.kl_coef=0.1", gpus=1, memory=GIB
    ).memory
    assert moved and moved.state_peak == without_offload.state_peak
    away = {
        phase
        for phase, states in moved.placed_states.items()
        if states["optimizer"] == PlacedState("host", 0, 2 * state)
    }
    assert away == {"generate", "log_probs", "refit", "checkpoint"}
    assert moved.peak == max(sum(moved.trainer.values()), state + sum(moved.engine.values()))
    assert without_offload.peak - moved.peak == 2 * state


def test_on_a_cpu_all_state_stands_in_host_memory_and_a_note_says_so(home: Path) -> None:
    plan = plan_run(home, "trainer.offload_optimizer_for_generation=true")
    assert plan.memory and plan.memory.state_peak == 0
    assert plan.memory.placed_states["train"]["optimizer"] == PlacedState("host", 0, 8 * count_parameters(home))
    assert "nothing is offloaded on a CPU: optimizer state is in host memory at all times" in plan.notes


MEGATRON = ("trainer.backend=megatron", "trainer.num_ranks=8", "trainer.megatron.tensor_model_parallel_size=2")


@pytest.mark.parametrize(
    ("overrides", "per_parameter"),
    [
        ((), (2 / 2, 4 / 2, 12 / 8, 0)),
        (("trainer.dtype=float32",), (4 / 2, 4 / 2, 8 / 8, 0)),
        (("trainer.megatron.pipeline_model_parallel_size=2",), (2 / 4, 4 / 4, 12 / 8, 0)),
        (("trainer.megatron.optimizer_cpu_offload=true",), (2 / 2, 4 / 2, 0, 16 / 8)),
        (("trainer.megatron.optimizer_cpu_offload=true", "trainer.megatron.optimizer_offload_fraction=0.5"),
         (2 / 2, 4 / 2, 6 / 8, 8 / 8)),
    ],
)  # fmt: skip
def test_bytes_of_megatron_core_a_parameter(
    home: Path, overrides: tuple[str, ...], per_parameter: tuple[float, ...]
) -> None:
    memory = plan_run(home, *MEGATRON, *overrides, kind="sft", gpus=8).memory
    assert memory
    states = memory.placed_states["train"]
    optimizer = states["optimizer"]
    state_bytes = (states["parameters"].device, states["gradients"].device, optimizer.device, optimizer.host)
    assert state_bytes == pytest.approx([count * count_parameters(home) for count in per_parameter], rel=1e-3)
    assert optimizer.place == ("host" if optimizer.host else "device")
    assert memory.placed_states["checkpoint"]["optimizer"] == optimizer


def test_state_that_no_device_holds_is_refused_and_estimates_are_not(home: Path) -> None:
    state = 16 * count_parameters(home)
    assert plan_run(home, gpus=1, memory=state).too_large is None
    assert "expect to run out of it" in plan_run(home, gpus=1, memory=state).notes[-1]
    roomy = plan_run(home, gpus=1, memory=100 * state)
    assert roomy.memory and not any("forecast" in note for note in roomy.notes)
    tight = plan_run(home, gpus=1, memory=int(17.6 * state))
    assert tight.memory and 0.93 < tight.memory.peak / (17.6 * state) < 1
    assert "% of the device's memory, and an estimate: it may run out; smaller packs (" in tight.notes[-1]
    refused = plan_run(home, gpus=1, memory=state - 1).too_large
    assert refused is not None and refused.endswith("it takes 2 ranks at least")
    assert plan_run(home, "trainer.num_ranks=2", gpus=2, memory=state - 1).too_large is None
    assert plan_run(home, gpus=0, memory=1 << 10).too_large is None
    assert plan_run(home, gpus=1, memory=None).too_large is None


def test_a_refit_moves_every_parameter_once_in_the_generators_dtype(home: Path) -> None:
    assert plan_run(home).refit == 4 * count_parameters(home)
    assert plan_run(home, gpus=1).refit == 2 * count_parameters(home)
    assert plan_run(home, "generation.dtype=float32", gpus=1).refit == 4 * count_parameters(home)
    assert plan_run(home, kind="sft").refit is None


def test_too_few_devices_are_said_with_the_arithmetic(home: Path) -> None:
    plan = plan_run(home, "placement.colocated=false", "generation.num_engines=2", gpus=2)
    assert plan.placement is None
    assert plan.misplaced is not None and "3 GPUs needed" in plan.misplaced


def test_notes_say_what_will_disappoint(home: Path) -> None:
    notes = plan_run(home, "trainer.optimizer.warmup_steps=200", "generation.kv_cache_mib=1", memory=1 << 20).notes
    assert [note.split(":")[0] for note in notes] == [
        "nothing is validated",
        "validation/accuracy is never measured",
        "warm-up takes 200 updates, the run only 100",
        "the forecast is above the device's memory",
    ]


def test_more_processes_than_cores_are_told(home: Path) -> None:
    def notes_on_cores(cores: int | None, *overrides: str, gpus: int = 0) -> list[str]:
        run = load("grpo", "grpo.recipe.yaml", list(overrides)).settled
        settled = run.settle_on(RunMachine(device_of(gpus), 16 * GIB), read_sizes(home / "model/config.json"))
        plan = make_plan(settled, this_machine(gpus), cores=cores)
        return [note for note in plan.notes if "take turns" in note]

    assert notes_on_cores(2) == []
    assert notes_on_cores(None, "trainer.num_ranks=64") == []
    assert notes_on_cores(2, "trainer.num_ranks=64", gpus=64) == []
    assert notes_on_cores(2, "trainer.num_ranks=64") == [
        "trainer.num_ranks=64: 64 processes take turns on 2 cores, and each has a copy of the libraries; "
        "trainer.num_ranks=2 is faster"
    ]
    assert notes_on_cores(1, "generation.num_engines=3")[0].startswith(
        "generation.num_engines=3: 3 processes take turns on 1 core,"
    )


def test_checkpoints_that_the_disk_does_not_hold_are_told(home: Path) -> None:
    """25 steps save three times. At the third save both kept checkpoints and the new one are on disk."""
    saves = ["grpo.num_steps=25", "checkpoint.every=10", "checkpoint.keep_last=2", "checkpoint.keep_best=0"]
    size = plan_run(home, *saves).schedule.checkpoint_bytes
    assert size

    def judge_disk(disk: int | None, *overrides: str) -> tuple[bool, list[str]]:
        """Return True if the plan refuses the disk, and its notes on checkpoints."""
        plan = plan_run(home, *saves, *overrides, disk=disk)
        return plan.unsaved is not None, [note for note in plan.notes if note.startswith("checkpoints take")]

    assert judge_disk(None) == judge_disk(3 * size) == (False, [])
    assert judge_disk(size - 1) == (True, [])
    assert judge_disk(size - 1, "checkpoint.every=0", "checkpoint.at_end=false") == (False, [])
    assert judge_disk(2 * size, "checkpoint.keep_last=1") == (False, [])
    assert judge_disk(2 * size, "checkpoint.every=20") == (False, [])
    is_refused, notes = judge_disk(2 * size)
    assert not is_refused and notes == [
        f"checkpoints take up to {3 * size / 2**20:.1f} MiB, and {2 * size / 2**20:.1f} MiB are free in run.dir: "
        "a lower checkpoint.keep_last or keep_best takes less"
    ]


def test_a_model_that_is_not_here_has_a_plan_without_bytes(home: Path) -> None:
    run = load("grpo", "grpo.recipe.yaml", ["model.path=acme/large"]).settled
    plan = make_plan(run.settle_on(RunMachine("cpu"), None), this_machine(0))
    assert (plan.parameters, plan.memory, plan.refit) == (None, None, None)
    assert plan.batch.rollouts == 256


def test_a_frozen_base_takes_2_bytes_a_parameter_and_adapters_16(home: Path) -> None:
    lora = ("lora.rank=4", "lora.targets=[q_proj]", "grpo.loss.kl_coef=0.1")
    plan = plan_run(home, *lora, "trainer.num_ranks=2", gpus=2)
    sizes = read_sizes(home / "model/config.json")
    adapters = 4 * sum(q_proj_widths(sizes))
    assert plan.memory
    assert plan.memory.trainer["frozen weights, adapters"] == count_parameters(home) + 4 * adapters // 2
    assert plan.memory.trainer["gradients of adapters"] == 4 * adapters // 2
    assert plan.memory.trainer["AdamW moments of adapters"] == 8 * adapters // 2
    # The output weight is frozen, and the reference is the base model with adapters off, so neither needs memory.
    assert not {"output's gradient", "reference"} & plan.memory.trainer.keys()
    assert all("reference" not in states for states in plan.memory.placed_states.values())
    # A refit brings adapters in the compute dtype. A checkpoint holds them, their moments and their export.
    assert plan.refit == 2 * adapters
    assert plan.schedule.checkpoint_bytes == 16 * adapters


@pytest.mark.parametrize(
    ("layers", "hidden", "width", "heads", "rank"), [(36, 4096, 12288, 32, 32), (40, 5120, 17408, 40, 32)]
)
def test_8b_and_14b_train_colocated_on_one_gpu_of_80_gb(
    home: Path, layers: int, hidden: int, width: int, heads: int, rank: int
) -> None:
    raw = {
        "model_type": "qwen3", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8, "intermediate_size": width, "vocab_size": 151936, "max_position_embeddings": 40960,
    }  # fmt: skip
    peaks = []
    for lora in (f"lora.rank={rank}", "lora=null"):
        config = load("grpo", "grpo-tiny", [lora]).settled.config
        data = replace(config.data, max_prompt_length=512)
        generation = replace(config.generation, max_new_tokens=1024)
        config = replace(config, data=data, generation=generation)
        run = settle(config, RunMachine("cuda", 79 * GIB), sizes_by_formula(raw))
        plan = make_plan(run, this_machine(1))
        assert plan.memory
        peaks.append(plan.memory.peak / GIB)
        assert bool(plan.too_large) == (lora == "lora=null")
    assert peaks[0] < 0.93 * 79 < 100 < peaks[1]


def test_costs_of_a_model_are_noted_once_each() -> None:
    rows = replace(ONE_LAYER, one_sequence_a_row="LlamaAttention is not told", dropout=("attention_dropout",))
    first, second = model_notes(rows, "cpu")
    assert first.startswith(
        "the model trains one sequence a row, not packs: LlamaAttention is not told; rows are padded"
    )
    assert second == "dropout is off in training, since engines have none: attention_dropout of config.json"
    assert model_notes(ONE_LAYER, "cuda") == [] == model_notes(replace(ONE_LAYER, state_layers=2), "cpu")


def test_missing_kernels_of_states_are_noted_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    states = replace(ONE_LAYER, state_layers=2)
    for is_installed, number_of_notes in ((False, 1), (True, 0)):
        monkeypatch.setattr("rlctl.preflight.check_model.has_kernels", lambda answer=is_installed: answer)
        notes = [note for note in model_notes(states, "cuda") if "(fla-core) is not installed" in note]
        assert len(notes) == number_of_notes
