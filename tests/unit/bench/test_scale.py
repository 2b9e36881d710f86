"""Plans for GPUs that this machine lacks: shards are those of FSDP2, and many ranks need few communicators."""

import json
from pathlib import Path

import torch

from rlctl.bench.scale import ScaleBench, _Model, _plan_run
from rlctl.bench.weights import RandomShards, parameters_of
from rlctl.bench.workload import model_folder
from rlctl.launch.worker_specs import refit_options
from rlctl.refit.refit_plan import RefitPlan


def test_the_boxes_are_those_that_ranks_hold(tmp_path: Path) -> None:
    folder = model_folder("tiny", tmp_path)
    rows = parameters_of(folder)
    for rank, boxes in enumerate(_Model(folder).boxes(3)):
        shards = RandomShards(rows, rank, 3, "float32", torch.device("meta")).shards()
        assert sorted(boxes, key=str) == sorted((shard.box for shard in shards), key=str)


def test_experts_of_one_parameter_make_up_the_plan_and_groups_stay_two(tmp_path: Path) -> None:
    folder = model_folder("qwen3-30b-a3b", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    model = _Model(folder)
    for gpus in (8, 64):
        settled, run = _plan_run(model, gpus)
        assert run.placement and not run.too_large
        options = refit_options(settled, run.placement, "")
        # Raises unless the boxes make up every tensor.
        senders = options.ranks_a_copy or gpus // 2
        plan = RefitPlan.build(model.layout(options.dtype), model.boxes(senders), 1 << 30)
        assert (len(plan.owners), len(plan.owner_groups)) == (senders, 2)


def test_a_part_of_a_node_and_an_unknown_model_are_named() -> None:
    model_problem, gpus_problem = ScaleBench(["qwen3-8"], [8, 12]).check()
    assert (model_problem.where, gpus_problem.where) == ("--model", "--gpus")
    assert "whole nodes of 8" in gpus_problem.what
