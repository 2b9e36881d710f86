"""Weights between processes on GPUs, by CUDA IPC and by NCCL: bit for bit, or an error that both ends survive."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlctl.refit.protocol import Header, Kind, PeerLost, RefitError, TransportSpec
from rlctl.refit.refit_plan import RefitPlan, TensorSlice
from rlctl.utils.ports import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
BUFFER = 64 << 20
ROWS = 4096
COLUMNS = 2048


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def set_visible_devices(device: int, *beside: int) -> None:
    """Set a new process's own device, and other visible ones, as an engine sees the devices that it reads."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, (device, *beside)))
    # As trainer ranks have it; engines do not.
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "" if beside else "expandable_segments:True"


@contextmanager
def process(device: int, *beside: int) -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), set_visible_devices, (device, *beside)) as pool:
        try:
            yield pool
        except BaseException:
            # The pool would wait for one that hangs, and a stopped one would stay.
            for child in multiprocessing.active_children():
                child.kill()
            raise


SHAPES = {"norm": (COLUMNS,), "q": (ROWS, COLUMNS), "k": (512, COLUMNS), "down": (COLUMNS, ROWS)}


def layout(dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
    rows: list[tuple[str, tuple[int, ...], str]] = [("embed", (ROWS, COLUMNS), dtype)]
    for layer in range(12):
        rows += [(f"layer{layer}.{name}", shape, dtype) for name, shape in SHAPES.items()]
    return rows


def make_plan(world: int) -> RefitPlan:
    """Plan to send bfloat16. Each rank holds its rows."""
    boxes: list[list[TensorSlice]] = [[] for _ in range(world)]
    for name, shape, _ in layout("bfloat16"):
        size = shape[0] // world
        for rank in range(world):
            boxes[rank].append(TensorSlice(name, (rank * size, *[0] * (len(shape) - 1)), (size, *shape[1:])))
    return RefitPlan.build(layout("bfloat16"), boxes, BUFFER)


def fill(tensors: dict[str, Any], version: int) -> None:
    """Fill this process's slices with the tensors of a version, which are the same on every process.

    tensors: {name: (first row, slice)}.
    """
    import torch

    generator = torch.Generator("cuda").manual_seed(version)
    for name, shape, _ in layout("float32"):
        full_tensor = torch.randn(shape, device="cuda", generator=generator)
        first_row, tensor = tensors[name]
        tensor.copy_(full_tensor[first_row : first_row + tensor.shape[0]])


def make_sender(spec: TransportSpec, plan: RefitPlan, rank: int, master: str) -> Any:
    """Return the slices of a trainer rank as `fill` takes them, and the rank's end of the transport."""
    import torch

    from rlctl.refit.transport import open_sender
    from rlctl.refit.weight_source import Shard, WeightSource

    slices = {}
    shards = []
    for box in make_boxes(plan, rank):
        tensor = torch.empty(box.shape, dtype=getattr(torch, master), device="cuda")
        slices[box.name] = (box.start[0], tensor)
        shards.append(Shard(box.name, (box.start[0], *[0] * (tensor.ndim - 1)), tensor))
    return slices, open_sender(spec, WeightSource(plan, rank, shards), torch.device("cuda:0"))


def make_boxes(plan: RefitPlan, rank: int) -> list[TensorSlice]:
    """Join the items of `rank` again, tensor by tensor."""
    boxes_by_tensor: dict[str, list[TensorSlice]] = {}
    for _, chunk in plan.chunks_of(rank):
        for number in chunk.numbers:
            box = plan.items[number].box
            boxes_by_tensor.setdefault(box.name, []).append(box)
    joined_boxes = []
    for name, boxes in boxes_by_tensor.items():
        first = min(boxes, key=lambda box: box.start)
        joined_boxes.append(TensorSlice(name, first.start, (sum(box.shape[0] for box in boxes), *first.shape[1:])))
    return joined_boxes


def send(spec: TransportSpec, plan: RefitPlan, rank: int, master: str, versions: int, drop_file: str) -> list[Any]:
    """Be a trainer rank: return reports, or the text of an error. Call `drop` once there is `drop_file`."""
    slices, end = make_sender(spec, plan, rank, master)

    def watch() -> None:
        while not Path(drop_file).exists():
            time.sleep(0.02)
        end.drop([1], "it was killed")

    if drop_file:
        threading.Thread(target=watch, daemon=True).start()
    answers: list[Any] = []
    for version in range(versions):
        if drop_file and Path(drop_file).exists():
            break
        fill(slices, version)
        try:
            answers.append(end.send(Header(version, plan.digest, "all")))
        except RefitError as error:
            answers.append(f"{type(error).__name__}: {error}")
            break
        Path(f"/tmp/rlctl-sent-{spec.port}").touch()
    # The process must have outlived it: the device still works.
    fill(slices, 0)
    end.close()
    return answers


def receive(spec: TransportSpec, plan: RefitPlan, rank: int, versions: int, fused: bool) -> list[Any]:
    """Be an engine worker: return reports of versions that arrived bit for bit, or the text of an error."""
    import torch

    from rlctl.refit.param_slices import ParamSlice, ParamSliceSink
    from rlctl.refit.transport import open_receiver
    from rlctl.refit.weight_sink import WholeTensorSink

    device = torch.device("cuda:0")
    memory = {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape, _ in layout("bfloat16")}
    for layer in range(12):
        # q and k are rows of one parameter, as fused projections are.
        qk = torch.empty(ROWS + 512, COLUMNS, dtype=torch.bfloat16, device=device)
        memory[f"layer{layer}.q"] = qk[:ROWS]
        memory[f"layer{layer}.k"] = qk[ROWS:]
    regions = [
        ParamSlice(TensorSlice(name, (0,) * tensor.ndim, tuple(tensor.shape)), tensor)
        for name, tensor in memory.items()
    ]
    end = open_receiver(spec, plan, rank, device)
    sink: Any = ParamSliceSink(plan, regions) if fused else WholeTensorSink(plan, device)
    expected = {name: (0, torch.empty_like(tensor)) for name, tensor in memory.items()}
    answers: list[Any] = []
    for version in range(versions):
        try:
            report = end.receive(Header(version, plan.digest, "all"), sink)
        except RefitError as error:
            answers.append(f"{type(error).__name__}: {error}")
            break
        fill(expected, version)
        arrived = memory if fused else dict(sink.tensors())
        is_exact = all(torch.equal(arrived[name], tensor) for name, (_, tensor) in expected.items())
        answers.append(report if is_exact else "changed")
    torch.zeros(1, device=device).add_(1).item()
    end.close()
    return answers


def make_spec(
    kind: Kind, folder: Path, receivers: int, timeout_s: float = 20, colocated: bool = False
) -> TransportSpec:
    return TransportSpec(kind, receivers, timeout_s, 2, str(folder), "127.0.0.1", free_port(), colocated)


def check_all(futures: list[Future[list[Any]]]) -> list[list[Any]]:
    """Return everyone's reports of three versions; raise an exception as soon as there is one."""
    wait(futures, 100, FIRST_EXCEPTION)
    for future in futures:
        if future.done():
            future.result()
    answers = [future.result(100) for future in futures]
    for reports in answers:
        assert len(reports) == 3 and not any(isinstance(report, str) for report in reports), answers
    return answers


@pytest.mark.skipif("gpus() < 1", reason="needs a CUDA device")
@pytest.mark.parametrize("master", ["bfloat16", "float32"])
@pytest.mark.parametrize("fused", [True, False], ids=["parameters", "whole"])
def test_ipc_within_a_device(tmp_path: Path, master: str, fused: bool) -> None:
    spec = make_spec("ipc", tmp_path, 1, colocated=True)
    plan = make_plan(1)
    with process(0) as trainer, process(0) as engine:
        sending = trainer.submit(send, spec, plan, 0, master, 3, "")
        receiving = engine.submit(receive, spec, plan, 1, 3, fused)
        check_all([sending, receiving])


@pytest.mark.skipif("gpus() < 2", reason="needs two CUDA devices")
@pytest.mark.parametrize("master", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["ipc", "broadcast"])
def test_between_devices(tmp_path: Path, kind: Kind, master: str) -> None:
    spec = make_spec(kind, tmp_path, 1)
    plan = make_plan(1)
    with process(0) as trainer, process(1, 0) as engine:
        sending = trainer.submit(send, spec, plan, 0, master, 3, "")
        sent, received = check_all([sending, engine.submit(receive, spec, plan, 1, 3, True)])
        assert sent[-1].extra_bytes <= 2 * BUFFER + (1 << 20)
        print(kind, master, received[-1])


@pytest.mark.skipif("gpus() < 4", reason="needs four CUDA devices")
@pytest.mark.parametrize("kind", ["ipc", "broadcast"])
@pytest.mark.parametrize(("trainers", "engines"), [(2, 2), (1, 3)])
def test_several_trainers_and_engines(tmp_path: Path, kind: Kind, trainers: int, engines: int) -> None:
    spec = make_spec(kind, tmp_path, engines)
    plan = make_plan(trainers)
    with ExitStack() as stack:
        pools = [stack.enter_context(process(device)) for device in range(4)]
        senders = pools[:trainers]
        receivers = pools[trainers : trainers + engines]
        sending = [pool.submit(send, spec, plan, rank, "bfloat16", 3, "") for rank, pool in enumerate(senders)]
        receiving = [pool.submit(receive, spec, plan, rank, 3, True) for rank, pool in enumerate(receivers, 1)]
        check_all([*receiving, *sending])


@pytest.mark.skipif("gpus() < 2", reason="needs two CUDA devices")
@pytest.mark.parametrize("master", ["bfloat16", "float32"])
@pytest.mark.parametrize(("trainers", "engines"), [(2, 2), (4, 1), (1, 2)])
def test_engines_of_one_device_read_from_trainers_of_another(
    tmp_path: Path, trainers: int, engines: int, master: str
) -> None:
    spec = make_spec("ipc", tmp_path, engines)
    plan = make_plan(trainers)
    with ExitStack() as stack:
        senders = [stack.enter_context(process(0)) for _ in range(trainers)]
        receivers = [stack.enter_context(process(1, 0)) for _ in range(engines)]
        sending = [pool.submit(send, spec, plan, rank, master, 3, "") for rank, pool in enumerate(senders)]
        receiving = [pool.submit(receive, spec, plan, rank, 3, True) for rank, pool in enumerate(receivers, 1)]
        check_all([*receiving, *sending])


def error_of(answers: Future[list[Any]], seconds: float) -> str:
    """Return the text of the error that ended a loop of refits."""
    last = answers.result(seconds)[-1]
    assert isinstance(last, str), last
    return last


@pytest.mark.skipif("gpus() < 2", reason="needs two CUDA devices")
@pytest.mark.parametrize("kind", ["ipc", "broadcast"])
def test_a_receiver_killed_on_the_way_leaves_the_trainer_alive(tmp_path: Path, kind: Kind) -> None:
    spec = make_spec(kind, tmp_path, 1)
    plan = make_plan(1)
    drop = tmp_path / "drop"
    with process(0) as trainer:
        sending = trainer.submit(send, spec, plan, 0, "bfloat16", 10_000, str(drop))
        engine = multiprocessing.get_context("spawn").Process(target=receive_on, args=(1, spec, plan))
        engine.start()
        await_first(spec)
        os.kill(engine.pid or 0, signal.SIGKILL)
        engine.join()
        time.sleep(1)
        drop.touch()
        answers = sending.result(60)
        if kind == "broadcast":
            assert "engine workers 1 dropped out: it was killed" in str(answers[-1])


@pytest.mark.skipif("gpus() < 2", reason="needs two CUDA devices")
@pytest.mark.parametrize("kind", ["ipc", "broadcast"])
def test_a_receiver_that_stands_still_is_named_in_time(tmp_path: Path, kind: Kind) -> None:
    spec = make_spec(kind, tmp_path, 1, timeout_s=5)
    plan = make_plan(1)
    with process(0) as trainer:
        sending = trainer.submit(send, spec, plan, 0, "bfloat16", 10_000, "")
        engine = multiprocessing.get_context("spawn").Process(target=receive_on, args=(1, spec, plan))
        engine.start()
        await_first(spec)
        os.kill(engine.pid or 0, signal.SIGSTOP)
        begin = time.monotonic()
        text = error_of(sending, 60)
        assert time.monotonic() - begin < 20
        assert text.startswith(PeerLost.__name__)
        assert "trainer rank 0 waited 5 s for" in text
        print(kind, text)
        os.kill(engine.pid or 0, signal.SIGKILL)
        engine.join()


@pytest.mark.skipif("gpus() < 2", reason="needs two CUDA devices")
@pytest.mark.parametrize("kind", ["ipc", "broadcast"])
def test_a_sender_that_stands_still_is_named_in_time(tmp_path: Path, kind: Kind) -> None:
    spec = make_spec(kind, tmp_path, 1, timeout_s=5)
    plan = make_plan(1)
    with process(1, 0) as engine:
        receiving = engine.submit(receive, spec, plan, 1, 10_000, True)
        trainer = multiprocessing.get_context("spawn").Process(target=send_on, args=(0, spec, plan))
        trainer.start()
        await_first(spec)
        os.kill(trainer.pid or 0, signal.SIGSTOP)
        text = error_of(receiving, 60)
        assert text.startswith(PeerLost.__name__)
        assert "engine worker 1 waited 5 s for trainer rank 0" in text
        print(kind, text)
        os.kill(trainer.pid or 0, signal.SIGKILL)
        trainer.join()


def receive_on(device: int, spec: TransportSpec, plan: RefitPlan) -> None:
    set_visible_devices(device, 0)
    receive(spec, plan, 1, 10_000, True)


def send_on(device: int, spec: TransportSpec, plan: RefitPlan) -> None:
    set_visible_devices(device)
    send(spec, plan, 0, "bfloat16", 10_000, "")


def await_first(spec: TransportSpec) -> None:
    """Wait until a first version has gone over."""
    end = time.monotonic() + 100
    while not Path(f"/tmp/rlctl-sent-{spec.port}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.3)
