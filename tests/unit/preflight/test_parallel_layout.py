"""The parallel layout: each rank's part, every contradiction as one line, and the nearest working layout."""

import json
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.config.errors import ConfigError
from rlctl.models.facts import ModelSizes
from rlctl.models.model_sizes import read_sizes
from rlctl.preflight import check_inputs
from rlctl.preflight.backend import layout_of
from rlctl.preflight.backends.megatron import cpu_offload_problem
from rlctl.preflight.load import load
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.parallel_layout import Layout, find_clashes, nearest_layout
from rlctl.preflight.placement import this_machine
from rlctl.preflight.plan import RunPlan, make_plan
from tests.size_formulas import sizes_by_formula
from tests.unit.folders import MODEL

MEGATRON = "trainer.backend=megatron"
TENSOR = "trainer.megatron.tensor_model_parallel_size"
PIPELINE = "trainer.megatron.pipeline_model_parallel_size"
CONTEXT = "trainer.megatron.context_parallel_size"
EXPERT = "trainer.megatron.expert_model_parallel_size"
SEQUENCE = "trainer.megatron.sequence_parallel"
RESIDUAL = "trainer.megatron.fp32_residual_connection"
OFFLOAD = "trainer.megatron.optimizer_cpu_offload"
FRACTION = "trainer.megatron.optimizer_offload_fraction"
OVERLAP = "trainer.megatron.overlap_cpu_optimizer_d2h_h2d"
MIXTURE = {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 33, "num_experts_per_tok": 2}
QWEN3_8B = sizes_by_formula(
    {
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 40960,
    }
)  # fmt: skip


def problems(*overrides: str, kind: str = "grpo") -> list[tuple[str, str]]:
    """Return (key, message) of each problem of the recipe, under megatron unless the overrides say otherwise."""
    try:
        load(kind, f"{kind}.recipe.yaml", [MEGATRON, *overrides])
    except ConfigError as error:
        return [(problem.key, problem.what) for problem in error.problems]
    return []


def write_model(home: Path, **sizes: object) -> None:
    """Write the recipe's model with other sizes than 4 heads, 2 key-value heads, 2 layers, MLP 128, vocabulary 32."""
    (home / "model/config.json").write_text(json.dumps({**MODEL, **sizes}))


def plan_run(home: Path, *overrides: str, kind: str = "grpo") -> RunPlan:
    run = load(kind, f"{kind}.recipe.yaml", list(overrides)).settled
    return make_plan(run.settle_on(RunMachine("cpu"), read_sizes(home / "model/config.json")), this_machine(0))


@pytest.mark.parametrize(("tensor", "pipeline", "context", "data"), [(2, 1, 1, 2), (2, 3, 2, 4), (1, 2, 2, 3)])
def test_shards_follow_megatrons_order_of_ranks(tensor: int, pipeline: int, context: int, data: int) -> None:
    world = tensor * pipeline * context * data
    ranks = Layout(world, tensor=tensor, pipeline=pipeline, context=context, expert=1)
    # The index of the tensor rank changes fastest.
    order = product(range(pipeline), range(data), range(context), range(tensor))
    assert ranks.data == data
    assert ranks.shards == [shard for _, shard, _, _ in order]


def test_shards_are_the_ranks_of_megatrons_own_groups() -> None:
    generator = pytest.importorskip("megatron.core.parallel_state").RankGenerator
    ranks = Layout(24, tensor=2, pipeline=2, context=3, expert=1)
    groups = generator(tp=2, ep=1, dp=2, pp=2, cp=3, order="tp-cp-ep-dp-pp").get_ranks("dp")
    assert all([ranks.shard_of(rank) for rank in group] == [0, 1] for group in groups)


def test_the_layout_of_a_config(home: Path) -> None:
    fsdp = load("grpo", "grpo.recipe.yaml", ["trainer.num_ranks=4"]).config.trainer
    assert layout_of(fsdp) == Layout(4, tensor=1, pipeline=1, context=1, expert=1)
    assert layout_of(fsdp).shards == [0, 1, 2, 3]
    megatron = load("grpo", "grpo.recipe.yaml", [MEGATRON, "trainer.num_ranks=4", f"{TENSOR}=2"]).config.trainer
    assert layout_of(megatron) == Layout(4, tensor=2, pipeline=1, context=1, expert=1)
    assert str(layout_of(megatron)) == "tensor 2 x pipeline 1 x context 1 x data 2, experts over 1"


def test_sequence_parallelism_follows_tensor_parallelism_unless_told() -> None:
    settings = (None, True, False)
    two_tensor_ranks = Layout(2, tensor=2, pipeline=1, context=1, expert=1)
    assert [replace(two_tensor_ranks, sequence=value).sequence_parallel for value in settings] == [True, True, False]
    one_rank = Layout(1, tensor=1, pipeline=1, context=1, expert=1)
    assert not any(replace(one_rank, sequence=value).sequence_parallel for value in settings)


@pytest.mark.parametrize(
    ("override", "neutral"),
    [
        (f"{TENSOR}=2", "1"),
        (f"{PIPELINE}=2", "1"),
        (f"{CONTEXT}=2", "1"),
        (f"{EXPERT}=2", "1"),
        (f"{SEQUENCE}=true", "null"),
        (f"{RESIDUAL}=true", "false"),
        (f"{OFFLOAD}=true", "false"),
        (f"{FRACTION}=1.0", "null"),
        (f"{OVERLAP}=true", "false"),
    ],
)
def test_fsdp_has_none_of_megatrons_keys(home: Path, override: str, neutral: str) -> None:
    key, value = override.split("=")
    message = f"{value} needs trainer.backend=megatron: fsdp has no such thing; set {neutral} here"
    assert problems("trainer.backend=fsdp", override) == [(key, message)]


def test_one_broken_key_of_megatron_hides_no_other(home: Path) -> None:
    all_problems = problems("trainer.backend=fsdp", f"{TENSOR}=two", f"{CONTEXT}=2", f"{OFFLOAD}=true")
    assert [key for key, _ in all_problems] == [TENSOR, CONTEXT, OFFLOAD]


def test_ranks_are_a_multiple_of_the_sizes(home: Path) -> None:
    assert problems("trainer.num_ranks=7", f"{TENSOR}=2", f"{CONTEXT}=2") == [
        ("trainer.num_ranks", "must be a multiple of tensor 2 x pipeline 1 x context 2 = 4, not 7; "
         f"try trainer.num_ranks=4 or 8, or {TENSOR}=1 {CONTEXT}=1")
    ]  # fmt: skip
    assert "try trainer.num_ranks=2, or" in problems("trainer.num_ranks=1", f"{TENSOR}=2")[0][1]


@pytest.mark.parametrize(
    ("sizes", "ranks", "override", "message"),
    [
        ({}, 3, f"{TENSOR}=3", "must divide the model's 4 attention heads and 2 key-value heads and 128 MLP columns "
         "(intermediate_size) and 32 tokens of vocabulary, not 3: each rank needs a key-value head of its own, at most "
         f"2 ranks work; try {TENSOR}=1"),
        ({"num_attention_heads": 6, "vocab_size": 36}, 4, f"{TENSOR}=4", "must divide the model's 6 attention heads "
         f"and 2 key-value heads, not 4: each rank needs a key-value head of its own, at most 2 ranks work; try "
         f"{TENSOR}=2"),
        ({}, 4, f"{TENSOR}=4", "must divide the model's 2 key-value heads, not 4: each rank needs a key-value head of "
         f"its own, at most 2 ranks work; try {TENSOR}=2"),
        ({"intermediate_size": 127}, 2, f"{TENSOR}=2", "must divide the model's 127 MLP columns (intermediate_size), "
         f"not 2; try {TENSOR}=1"),
        ({"vocab_size": 33}, 2, f"{TENSOR}=2", f"must divide the model's 33 tokens of vocabulary, not 2; try "
         f"{TENSOR}=1"),
        ({"num_hidden_layers": 6}, 12, f"{PIPELINE}=4", f"must divide the model's 6 layers, not 4; try {PIPELINE}=3"),
        ({}, 8, f"{CONTEXT}=8", f"must divide the 4 attention heads of a tensor rank, not 8; try {CONTEXT}=4"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 4, f"{CONTEXT}=2", "must divide the 3 key-value heads "
         f"of a tensor rank or be a multiple of them, not 2; try {CONTEXT}=1"),
        ({}, 2, f"{EXPERT}=2", f"must be 1, not 2: the model is dense, without experts; try {EXPERT}=1"),
        (MIXTURE, 6, f"{EXPERT}=3", f"must divide the model's 8 experts, not 3; try {EXPERT}=2"),
        (MIXTURE, 6, f"{EXPERT}=4", f"must divide the 6 ranks of a pipeline stage, not 4; try {EXPERT}=2"),
    ],
)  # fmt: skip
def test_a_size_that_does_not_fit_the_model(
    home: Path, sizes: dict[str, object], ranks: int, override: str, message: str
) -> None:
    write_model(home, **sizes)
    assert problems(f"trainer.num_ranks={ranks}", override) == [(override.split("=")[0], message)]


def test_context_ranks_share_the_heads_that_tensor_ranks_leave(home: Path) -> None:
    assert problems("trainer.num_ranks=4", f"{CONTEXT}=4") == []
    assert problems("trainer.num_ranks=8", f"{TENSOR}=2", f"{CONTEXT}=4") == [
        (CONTEXT, f"must divide the 2 attention heads of a tensor rank, not 4; try {CONTEXT}=2")
    ]


def test_experts_are_shared_among_all_ranks_of_a_stage_and_keep_their_width(home: Path) -> None:
    write_model(home, **MIXTURE)
    assert problems("trainer.num_ranks=8", f"{TENSOR}=2", f"{CONTEXT}=2", f"{EXPERT}=8") == []
    assert problems("trainer.num_ranks=8", f"{PIPELINE}=2", f"{EXPERT}=8") == [
        (EXPERT, f"must divide the 4 ranks of a pipeline stage, not 8; try {EXPERT}=4")
    ]


def test_the_mlp_of_a_model_without_dense_layers_is_not_cut(home: Path) -> None:
    write_model(home, **{**MIXTURE, "intermediate_size": 127})
    assert problems("trainer.num_ranks=2", f"{TENSOR}=2") == []


def test_experts_with_tensor_ranks_need_sequence_parallelism(home: Path) -> None:
    off = f"{SEQUENCE}=false"
    assert problems("trainer.num_ranks=2", f"{TENSOR}=2", off) == []
    write_model(home, **MIXTURE)
    message = "must not be false: Megatron-core trains experts on 2 tensor ranks only with it"
    assert problems("trainer.num_ranks=2", f"{TENSOR}=2", off) == [(SEQUENCE, f"{message}; try {SEQUENCE}=null")]
    assert problems("trainer.num_ranks=2", off) == []


def test_sequence_parallelism_of_one_tensor_rank_is_a_note(home: Path) -> None:
    for kind in ("grpo", "sft"):
        loaded = load(kind, f"{kind}.recipe.yaml", [MEGATRON, f"{SEQUENCE}=true"])
        assert loaded.notes == [f"override 2: {SEQUENCE}=true: no effect while {TENSOR} is 1"]


def test_a_float32_residual_is_a_note_where_all_is_float32(home: Path) -> None:
    note = f"override 2: {RESIDUAL}=true: no effect while trainer.dtype is float32"
    for dtype, expected_notes in (("float32", [note]), ("bfloat16", [])):
        loaded = load("sft", "sft.recipe.yaml", [MEGATRON, f"{RESIDUAL}=true", f"trainer.dtype={dtype}"])
        assert loaded.notes == expected_notes


def test_a_model_that_is_not_here_is_checked_as_far_as_it_goes(home: Path) -> None:
    away = "model.path=acme/large"
    assert problems(away, "trainer.num_ranks=6", f"{TENSOR}=3", f"{EXPERT}=2") == []
    all_problems = problems(away, "trainer.num_ranks=6", f"{TENSOR}=3", f"{EXPERT}=4", f"{SEQUENCE}=false")
    assert [key for key, _ in all_problems] == [EXPERT, SEQUENCE]


def test_a_shard_needs_a_sequence(home: Path) -> None:
    few = ["grpo.num_prompts_per_step=1", "grpo.num_generations_per_prompt=2"]
    assert problems("trainer.num_ranks=4", *few) == [
        ("trainer.num_ranks", "4 data-parallel shards but only 2 rollouts an update: at least one a data-parallel "
         f"shard is needed; try {TENSOR}=2")
    ]  # fmt: skip
    assert problems("trainer.num_ranks=4", f"{CONTEXT}=2", *few) == []
    assert problems("trainer.num_ranks=4", "sft.batch_size=2", kind="sft") == [
        ("sft.batch_size", f"must be at least the 4 data-parallel shards of the trainer, not 2; try {TENSOR}=2")
    ]
    assert "; try trainer.num_ranks=2" in problems("trainer.num_ranks=7", *few)[0][1]


def test_the_cpu_optimizer_has_its_own_rules(home: Path) -> None:
    for override in (f"{FRACTION}=0.5", f"{OVERLAP}=true"):
        message = f"needs {OFFLOAD}=true: without it nothing of the optimizer is on the host"
        assert problems(override) == [(override.split("=")[0], message)]
        assert problems(override, f"{OFFLOAD}=true") == []
    assert problems(f"{OFFLOAD}=true", "trainer.dtype=float32") == [(OFFLOAD, cpu_offload_problem("float32"))]
    assert [cpu_offload_problem(dtype) for dtype in ("auto", "bfloat16")] == [None, None]


def test_megatron_that_is_not_installed_is_an_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_inputs, "find_spec", lambda name: None)
    assert problems() == [("trainer.backend", "megatron needs megatron-core: pip install 'rlctl[megatron]'")]
    assert problems("trainer.backend=fsdp") == []


def test_all_contradictions_come_at_once_and_their_advice_works(home: Path) -> None:
    sizes = [f"{TENSOR}=3", f"{PIPELINE}=5", f"{EXPERT}=2"]
    all_problems = problems("trainer.num_ranks=8", *sizes, f"{FRACTION}=0.5", "grpo.num_prompts_per_step=many")
    assert [key for key, _ in all_problems] == [
        "grpo.num_prompts_per_step", "trainer.num_ranks", TENSOR, PIPELINE, EXPERT, FRACTION
    ]  # fmt: skip
    advice = {message.rpartition("; try ")[2] for key, message in all_problems if key in (TENSOR, PIPELINE, EXPERT)}
    assert len(advice) == 1
    assert problems("trainer.num_ranks=8", *sizes, *advice.pop().split()) == []


def test_a_batch_is_shared_among_shards_in_the_plan(home: Path) -> None:
    two_shards = [MEGATRON, "trainer.num_ranks=4", f"{TENSOR}=2"]
    plan = plan_run(home, *two_shards, "trainer.micro_batch_tokens=256")
    assert str(plan.layout) == "tensor 2 x pipeline 1 x context 1 x data 2, experts over 1"
    assert (plan.batch.per_rank, plan.batch.full_sequences, plan.batch.micro_batches) == (128, 2, 64)
    assert plan_run(home, *two_shards, "sft.batch_size=5", kind="sft").batch.per_rank == 3
    assert plan_run(home, "trainer.num_ranks=4").layout is None


SIZE = st.integers(1, 12)


@st.composite
def architectures(draw: st.DrawFn) -> ModelSizes:
    kv_heads = draw(SIZE)
    layers = draw(SIZE)
    sparse = draw(st.sampled_from((0, 1, layers)))
    return replace(
        QWEN3_8B, kv_heads=kv_heads, heads=kv_heads * draw(SIZE), layers=layers, intermediate=draw(st.integers(1, 48)),
        vocab=draw(st.integers(1, 48)), sparse_layers=sparse, experts=draw(SIZE) if sparse else 0,
    )  # fmt: skip


LAYOUTS = st.builds(Layout, st.integers(1, 48), SIZE, SIZE, SIZE, SIZE, st.sampled_from((None, True, False)))


@given(LAYOUTS, st.none() | architectures())
def test_the_nearest_layout_has_as_many_ranks_and_no_contradiction(layout: Layout, sizes: ModelSizes | None) -> None:
    nearest = nearest_layout(layout, sizes)
    assert nearest.world == layout.world
    assert list(find_clashes(nearest, sizes)) == []
    assert (nearest == layout) == (not list(find_clashes(layout, sizes)))


@given(LAYOUTS, st.none() | architectures(), st.integers(1, 48))
def test_the_nearest_layout_has_a_sequence_for_each_shard(
    layout: Layout, sizes: ModelSizes | None, sequences: int
) -> None:
    nearest = nearest_layout(layout, sizes, sequences)
    assert 1 <= nearest.data <= sequences
    assert nearest.world <= layout.world
    assert list(find_clashes(nearest, sizes)) == []


def test_the_nearest_layout_of_thousands_of_ranks_is_found_at_once() -> None:
    of_1000_ranks = Layout(1000, tensor=16, pipeline=8, context=2, expert=1)
    of_4096_ranks = Layout(4096, tensor=16, pipeline=8, context=1, expert=1)
    start = time.process_time()
    assert nearest_layout(of_1000_ranks, QWEN3_8B, sequences=8) == Layout(64, tensor=8, pipeline=1, context=1, expert=1)
    assert nearest_layout(of_4096_ranks, QWEN3_8B) == Layout(4096, tensor=8, pipeline=4, context=1, expert=1)
    assert time.process_time() - start < 20
