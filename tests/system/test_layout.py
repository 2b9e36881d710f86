"""The place of each tensor in vLLM is found by watching its own loaders. Copies to these places leave every parameter
as the loaders leave it, bit by bit, for every architecture and tensor-parallel rank.

vLLM's models as they are before CPU kernels repack them, which is how GPUs keep them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.generation.vllm.kind import environment
from rlctl.generation.vllm.param_layout import UnsupportedLayout, prove, record_regions
from rlctl.models.hf_folder import WeightFiles
from rlctl.refit.param_slices import ParamSlice, ParamSliceSink, ShadowParams, verify_complete
from rlctl.refit.refit_plan import RefitPlan, TensorSlice
from rlctl.refit.weight_source import Shard, WeightSource
from rlctl.utils.ports import free_port
from tests.tiny_models import KINDS, Kind, make_model

# More tensor-parallel ranks than key-value heads: heads are then held more than once.
SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """Set up vLLM's distributed state for one process, without an engine."""
    before = dict(os.environ)
    os.environ.update(environment("cpu", []))
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as state

    with set_current_vllm_config(VllmConfig()):
        state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
        state.initialize_model_parallel(1)
    yield
    state.destroy_model_parallel()
    state.destroy_distributed_environment()
    os.environ.clear()
    os.environ.update(before)


@contextmanager
def tensor_parallel(size: int, rank: int) -> Iterator[None]:
    """Let vLLM build layers as tensor-parallel rank `rank` of `size`, within the block."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    group.world_size = size
    group.rank_in_group = rank
    yield
    group.world_size = 1
    group.rank_in_group = 0


def build(folder: Path, size: int, rank: int) -> Any:
    """Return vLLM's model for a folder, without loading its parameters."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(model=str(folder), skip_tokenizer_init=True, dtype="float32").create_engine_config()
    with set_current_vllm_config(config), tensor_parallel(size, rank), torch.device("cpu"):
        torch.set_default_dtype(torch.float32)
        return initialize_model(config, model_config=config.model_config)


def tensors(folder: Path) -> list[Shard]:
    files = WeightFiles(folder)
    return [Shard(name, (0,) * files.tensor(name).ndim, files.tensor(name)) for name in files.names()]


def plan_of(shards: list[Shard], rows: int | None = None) -> RefitPlan:
    """Return a plan. rows: of two trainer ranks, the first holds this many rows of every larger tensor."""
    layout = [(shard.name, shard.box.shape, "float32") for shard in shards]
    if rows is None:
        return RefitPlan.build(layout)
    ranks: list[list[TensorSlice]] = [[], []]
    for shard in shards:
        num_rows, *columns = shard.box.shape
        rows_of_first = min(rows, num_rows)
        ranks[0].append(TensorSlice(shard.name, shard.start, (rows_of_first, *columns)))
        rows_of_second = num_rows - rows_of_first
        ranks[1].append(TensorSlice(shard.name, (rows_of_first, *shard.start[1:]), (rows_of_second, *columns)))
    return RefitPlan.build(layout, ranks)


def fill(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))


def deliver(plan: RefitPlan, shards: list[Shard], sink: ParamSliceSink) -> None:
    for rank in plan.owners:
        source = WeightSource(plan, rank, shards)
        for _, chunk in plan.chunks_of(rank):
            sink.copies((n, source.view(n)) for n in chunk.numbers).run()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [*KINDS, "mistral"])
def test_copies_leave_what_the_loaders_leave(kind: Kind, size: int, world: None, tmp_path: Path) -> None:
    folder = make_model(tmp_path / kind, kind, heads=8)
    shards = tensors(folder)
    for rank in range(size):
        model = build(folder, size, rank)
        parameters = dict(model.named_parameters())
        with torch.no_grad(), tensor_parallel(size, rank):
            fill(model)
            model.load_weights((shard.name, shard.tensor) for shard in shards)
            expected = {name: parameter.detach().clone() for name, parameter in parameters.items()}
            plan = plan_of(shards, rows=5)
            regions = record_regions(model, plan)
            assert all(torch.equal(parameters[name], value) for name, value in expected.items())
            prove(regions, WeightFiles(folder))
            verify_complete(regions, parameters, {"model.embed_tokens.weight", "lm_head.weight"})
            shadow = ShadowParams(parameters, regions)
            for name, parameter in parameters.items():
                parameter.copy_(torch.where(expected[name].isnan(), expected[name], -1.0))
            deliver(plan, shards, ParamSliceSink(plan, regions))
            compare(parameters, expected)
            for parameter in parameters.values():
                parameter.fill_(-1.0)
            deliver(plan, shards, ParamSliceSink(plan, shadow.regions))
            shadow.commit()
            compare(parameters, expected)


def compare(parameters: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        assert torch.equal(parameters[name].nan_to_num(7.0), value.nan_to_num(7.0)), name


def test_weights_that_a_model_rearranges_after_loading_are_noticed(world: None, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "qwen3_moe")
    model = build(folder, 1, 0)
    shards = tensors(folder)
    with torch.no_grad():
        model.load_weights((shard.name, shard.tensor) for shard in shards)
        regions = record_regions(model, plan_of(shards))
        for name, parameter in model.named_parameters():
            if name.endswith("w13_weight"):
                parameter.copy_(parameter.roll(parameter.shape[1] // 2, 1))
        with pytest.raises(UnsupportedLayout, match=r"vLLM rearranges .*experts.* after loading it"):
            prove(regions, WeightFiles(folder))


def test_a_parameter_that_no_tensor_fills_is_named(world: None, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "qwen3")
    model = build(folder, 1, 0)
    shards = [shard for shard in tensors(folder) if not shard.name.endswith("0.self_attn.k_proj.weight")]
    regions: list[ParamSlice] = record_regions(model, plan_of(shards))
    with pytest.raises(Exception, match=r"layers.0.self_attn.qkv_proj.weight has \d+ numbers, the trainer's tensors"):
        verify_complete(regions, dict(model.named_parameters()), {"model.embed_tokens.weight"})
