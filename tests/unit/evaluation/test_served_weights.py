"""`model check`: every tensor of a model is sent, has another value in between, and is taken in by the engine."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlctl.evaluation.served_weights import OtherValues, Served, is_rounded, judge_served, names_to_send
from rlctl.generation.engine import LoadMode
from rlctl.models.facts import find_facts
from rlctl.refit.weight_source import Shard
from tests.tiny_models import make_model

NAMES = ["layer.norm.weight", "layer.bias", "router.correction"]
# Tensors of an engine before a refit: two have names of the folder, one is computed from another tensor.
BEFORE = {"0: layer.norm.weight": 1, "0: router.correction": 2, "0: layer.fused": 3}
BETWEEN = {name: checksum + 10 for name, checksum in BEFORE.items()}
STAGED = LoadMode("staged", "it must", 0, False)


def make_served(**changes: object) -> Served:
    served = Served(
        before=BEFORE, between=BETWEEN, after=BEFORE, sent=NAMES, required=set(NAMES), has_same_answers=True
    )
    return served._replace(**changes)


def test_an_engine_that_took_all_in_and_came_back_holds() -> None:
    finding = judge_served(make_served(), STAGED)
    assert finding.holds and finding.text.startswith("3 tensors sent, twice, staged (it must): "), finding


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sent": NAMES[:2]}, "router.correction of the model's 3 tensors not sent: engines would serve others"),
        ({"sent": NAMES[1:2]}, "layer.norm.weight and 1 more of the model's 3 tensors not sent"),
        ({"between": BETWEEN | {"0: router.correction": 2}}, "changed 2 of the engine's 3, but not router.correction;"),
        ({"between": BETWEEN | {"0: layer.fused": 3}}, "changed 2 of the engine's 3, but not layer.fused;"),
        ({"after": BETWEEN}, "then 0 were bit for bit those of the start, but not layer.norm.weight"),
        (
            {"between": BEFORE, "sent": ["layer.bias"], "required": {"layer.bias"}},
            "changed 0 of the engine's 3, but not layer.fused;",
        ),
        ({"has_same_answers": False}, "; answers were not"),
    ],
)
def test_each_way_to_serve_something_else_is_refused_by_name(changes: dict[str, object], text: str) -> None:
    finding = judge_served(make_served(**changes), STAGED)
    assert finding.holds is False and text in finding.text, finding.text


def test_a_tensor_that_an_engine_made_by_itself_may_stay_as_it_is() -> None:
    own_tensors = {"0: layer.scale (buffer)": 4, "0: layer.backend (0)": 5}
    before = BEFORE | own_tensors
    assert judge_served(make_served(before=before, between=BETWEEN | own_tensors, after=before), STAGED).holds


def test_adapters_change_buffers_and_leave_the_frozen_parameters_as_they_are() -> None:
    adapters = {"0: layer.rl_lora_a (buffer)": 4, "0: layer.rl_lora_b (buffer)": 5}
    before = BEFORE | adapters
    changed = before | dict.fromkeys(adapters, 6)
    served = make_served(before=before, between=changed, after=before, adapts=True)
    assert judge_served(served, STAGED).holds
    assert judge_served(served._replace(between=before), STAGED).holds is False
    finding = judge_served(served._replace(between=changed | {"0: layer.fused": 9}), STAGED)
    assert finding.holds is False and "also layer.fused, which is frozen" in finding.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_that_an_update_leaves_alone_have_other_values_until_it_is_undone(dtype: str) -> None:
    moved = torch.full((8,), 1.0)
    rounded = torch.full((8,), 1.0)
    buffer = torch.full((8,), 3.0)
    zeros = torch.full((8,), 0.0)
    table = torch.arange(3)
    tensors = {"moved": moved, "rounded": rounded, "buffer": buffer, "zeros": zeros, "table": table}
    values = OtherValues([Shard(name, (0,), tensor) for name, tensor in tensors.items()])
    # This is the update. `rounded` moves by less than bfloat16 tells apart.
    moved.add_(0.1)
    rounded.add_(1e-4)
    values.put(dtype)
    kind = getattr(torch, dtype)
    assert torch.equal(moved, torch.full((8,), 1.1))
    for tensor, before in ((rounded, 1.0), (buffer, 3.0), (zeros, 0.0)):
        assert (tensor.to(kind) != before).any() and (tensor - before).abs().max() < 3.0
    assert (rounded == 1.0001).all() == (dtype == "float32")
    values.undo()
    for tensor, before in ((moved, 1.0), (rounded, 1.0), (buffer, 3.0), (zeros, 0.0)):
        assert (tensor == before).all()
    assert table.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("sent", "rounded"), [("float32", False), ("bfloat16", True), ("float16", True), ("float64", False)]
)
def test_a_refit_of_fewer_digits_than_the_folder_has_rounds(sent: str, rounded: bool, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    layout = [("a", (2,), sent), ("b", (2,), "bfloat16"), ("an adapter's", (2,), "bfloat16")]
    assert is_rounded(layout, tmp_path) is rounded


def test_all_that_a_model_holds_must_be_sent(tmp_path: Path) -> None:
    """A tied output weight that is also saved counts with the embedding. A tensor that the model ignores is copied."""
    folder = make_model(tmp_path / "m", "qwen3")
    tensors = load_file(folder / "model.safetensors")
    facts = find_facts(folder)
    assert facts.sizes.tied and names_to_send(folder, facts) == tensors.keys()
    further = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone(), "mtp.norm.weight": torch.ones(4)}
    save_file({**tensors, **further}, folder / "model.safetensors", {"format": "pt"})
    assert names_to_send(folder, find_facts(folder)) == tensors.keys()
