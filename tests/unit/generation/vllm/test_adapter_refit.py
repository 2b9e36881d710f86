"""A refit of adapters finds and names each fault by which an engine would serve other adapters than were sent."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import torch

from rlctl.models.adapters import AdapterSpec
from rlctl.models.layer_kinds import LinearLayer
from rlctl.refit.param_slices import ParamSlice
from rlctl.refit.protocol import Header, LiveProof, RefitError, TransportSpec
from rlctl.refit.refit_plan import RefitPlan, TensorSlice
from rlctl.refit.transport import open_receiver, open_sender
from rlctl.refit.weight_source import Shard, WeightSource

if TYPE_CHECKING:
    from rlctl.generation.vllm.adapter_layers import EngineAdapters

CPU = torch.device("cpu")
RANK, WIDTH, ROWS = 4, 16, 24
LAYERS = tuple(
    LinearLayer(f"model.layers.0.self_attn.{name}", WIDTH, ROWS, "attention") for name in ("q_proj", "v_proj")
)
SPEC = AdapterSpec(RANK, 8.0, False, 0.0, LAYERS)
FIRST_B = "model.layers.0.self_attn.q_proj.lora_B.weight"


def make_engine_adapters(rows: int = ROWS, first: int = 0) -> "EngineAdapters":
    """Return a merged layer of both targets, of which this worker has some rows. Its module imports vLLM, 2.6 s."""
    from rlctl.generation.vllm.adapter_layers import EngineAdapters

    adapters = EngineAdapters(SPEC)
    a = torch.zeros(2 * RANK, WIDTH)
    b = torch.zeros(2 * rows, 2 * RANK)
    adapters.buffers = {"qkv.a": a, "qkv.b": b}
    for number, layer in enumerate(LAYERS):
        low = number * RANK
        box = TensorSlice(f"{layer.name}.lora_A.weight", (0, 0), (RANK, WIDTH))
        adapters.regions.append(ParamSlice(box, a[low : low + RANK]))
        box = TensorSlice(f"{layer.name}.lora_B.weight", (first, 0), (rows, RANK))
        adapters.regions.append(ParamSlice(box, b[number * rows : (number + 1) * rows, low : low + RANK]))
    return adapters


class Ends:
    """A trainer rank and a vLLM worker with adapters, joined by shared memory."""

    def __init__(self, folder: Path, engine_adapters: "EngineAdapters") -> None:
        from rlctl.generation.vllm.adapter_refit import AdapterLoader
        from rlctl.generation.vllm.weight_loader import WeightReceiver

        self.tensors = {tensor.name: torch.zeros(tensor.shape) for tensor in SPEC.tensors}
        self.plan = RefitPlan.build([(name, tuple(t.shape), "float32") for name, t in self.tensors.items()])
        spec = TransportSpec("shm", 1, 5.0, folder=str(folder))
        shards = [Shard(name, (0, 0), tensor) for name, tensor in self.tensors.items()]
        self.sender = open_sender(spec, WeightSource(self.plan, 0, shards), CPU)
        self.engine_adapters = engine_adapters
        self.loader = AdapterLoader(self.plan, engine_adapters, CPU, "")
        self.worker = WeightReceiver(open_receiver(spec, self.plan, 1, CPU), self.loader, CPU)

    def header(self, version: int) -> Header:
        return Header(version, self.plan.digest, "all", prove=True)

    def send(self, version: int) -> int:
        torch.manual_seed(version)
        for tensor in self.tensors.values():
            tensor.copy_(torch.randn(tensor.shape))
        return self.sender.send(self.header(version)).digest

    def refit(self, version: int) -> tuple[LiveProof | None, int]:
        digest = self.send(version)
        self.worker.receive(self.header(version))
        self.worker.commit()
        return self.worker.prove(self.header(version)), digest


@pytest.mark.parametrize(("rows", "first"), [(ROWS, 0), (ROWS // 2, ROWS // 2)])
def test_a_version_is_live_and_proven(tmp_path: Path, rows: int, first: int) -> None:
    ends = Ends(tmp_path, make_engine_adapters(rows, first))
    for version in (1, 2, 2, 3):
        proof, digest = ends.refit(version)
        assert proof == LiveProof(version, digest, 2, 2)
        for region in ends.engine_adapters.regions:
            assert torch.equal(region.view, ends.tensors[region.box.name][region.box.slices()])
        off = ends.engine_adapters.buffers["qkv.b"][:rows, RANK:]
        assert not off.any(), "B of a merged layer is on the diagonal"


def deliver_nothing(ends: Ends) -> None:
    """Let the engine report a change of its adapters without making it."""


def commit_a_alone(ends: Ends) -> None:
    """Make only the new A matrices live. The B matrices stay those of the version before."""
    shadow = {region.box: region.view for region in ends.loader._shadow.regions}
    for region in ends.engine_adapters.regions:
        if region.box.name.endswith("lora_A.weight"):
            region.view.copy_(shadow[region.box])


@pytest.mark.parametrize(
    ("commit", "message"),
    [
        (deliver_nothing, r"lora_A.weight is live with other numbers than version 2 was sent with \(4 of 4 tensors\)"),
        (commit_a_alone, rf"{FIRST_B} is live with other numbers than version 2 was sent with \(2 of 4 tensors\)"),
    ],
)
@pytest.mark.parametrize("rows", [ROWS, ROWS // 2])
def test_what_is_not_live_as_sent_is_named(
    tmp_path: Path, rows: int, commit: Callable[[Ends], None], message: str
) -> None:
    ends = Ends(tmp_path, make_engine_adapters(rows))
    ends.refit(1)
    with patch.object(ends.loader._shadow, "commit", lambda: commit(ends)), pytest.raises(RefitError, match=message):
        ends.refit(2)


def test_transport_memory_that_is_used_again_changes_nothing_that_is_live(tmp_path: Path) -> None:
    ends = Ends(tmp_path, make_engine_adapters())
    ends.refit(1)
    live = {name: buffer.clone() for name, buffer in ends.engine_adapters.buffers.items()}
    for slot in ("slot0", "slot1"):
        size = (tmp_path / slot).stat().st_size
        with (tmp_path / slot).open("r+b") as file:
            file.write(b"\xff" * size)
    assert all(torch.equal(live[name], buffer) for name, buffer in ends.engine_adapters.buffers.items())
    assert ends.refit(2)[0]


def test_a_live_buffer_that_is_written_to_is_named_before_the_next_version(tmp_path: Path) -> None:
    ends = Ends(tmp_path, make_engine_adapters())
    ends.refit(1)
    # As a transport would do that goes on to use memory it handed out.
    ends.engine_adapters.buffers["qkv.b"][0, 0] += 1.0
    with pytest.raises(RefitError, match=rf"{FIRST_B} was written to after version 1 became live"):
        ends.refit(2)


def make_renamed_adapters(layers: tuple[LinearLayer, ...], name: str) -> "EngineAdapters":
    adapters = make_engine_adapters()
    adapters.spec = AdapterSpec(RANK, 8.0, False, 0.0, (LinearLayer(name, WIDTH, ROWS, "attention"), *layers[1:]))
    return adapters


@pytest.mark.parametrize(
    ("layers", "counts"),
    [
        (LAYERS, "the engine has places for 2 A and 2 B"),
        (LAYERS[:1], "the engine has places for 1 A and 1 B"),
    ],
)
def test_a_renamed_layer_is_an_error_with_the_counts_of_both_ends(
    tmp_path: Path, layers: tuple[LinearLayer, ...], counts: str
) -> None:
    with pytest.raises(RefitError) as caught:
        Ends(tmp_path, make_renamed_adapters(layers, "model.layers.0.attn.q"))
    assert f"adapters: the trainer sends 2 A and 2 B, {counts}; " in str(caught.value)
    assert "model.layers.0.self_attn.q_proj.lora_A.weight has no place in the engine, and " in str(caught.value)
