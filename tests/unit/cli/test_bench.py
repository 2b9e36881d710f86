"""`rlctl bench`: all mistakes are reported at once, before a start, and the table fits the terminal."""

import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from rich.console import Console

from rlctl.bench.dispatch import UNITS, DispatchResults, DispatchRow
from rlctl.bench.frame import Bench, Results, Say, numbers, until_interrupted
from rlctl.bench.offload import CopyRates, OffloadResults, StepRow
from rlctl.bench.refit_results import RefitResults, SchemeRow
from rlctl.bench.sft import SftResults, SftRow
from rlctl.cli.bench_frame import run_bench, show
from rlctl.config.builtin import RECIPES, algorithm_names
from tests.unit.cli.conftest import Rlctl


def render(results: Results, width: int = 80) -> str:
    out = io.StringIO()
    show(results, Console(file=out, width=width, force_terminal=True, color_system=None))
    return out.getvalue()


class FailingBench(Bench):
    """A bench that writes a log, then fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def measure(self, folder: Path, say: Say) -> Results:
        (folder / "worker.log").write_text("why")
        say("measuring")
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(KeyboardInterrupt(), 130, "interrupted"), (RuntimeError("no memory"), 1, "error: no memory\nlogs: {folder}")],
)
def test_logs_stay_after_an_error_and_go_after_ctrl_c(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(typer.Exit) as exit_info:
        run_bench(FailingBench(error), as_json=False)
    assert exit_info.value.exit_code == code
    logs = list(tmp_path.glob("rlctl-bench-*/worker.log"))
    assert len(logs) == (1 if code == 1 else 0)
    folder = logs[0].parent if logs else ""
    assert capsys.readouterr().err == f"measuring\n{message.format(folder=folder)}\n"


def test_all_mistakes_are_told_at_once(rlctl: Rlctl) -> None:
    options = ["--model", "qwen3-9b", "--mode", "dirct", "--num-buffers", "0,2", "--transport", "nccl"]
    options += ["--master", "fp8", "--checksum", "some", "--tensor-parallel", "2"]
    done = rlctl("bench", "refit", *options)
    assert done.code == 2
    lines = done.err.splitlines()
    expected = [
        "--model: qwen3-9b is no model; did you mean qwen3-8b?",
        "--tensor-parallel: on CPU an engine is one process: allowed is 1",
        "--mode: 'dirct' is not allowed; did you mean direct?; allowed: auto, direct, staged",
        "--transport: 'nccl' is not allowed; allowed: shm, broadcast, ipc",
        "--checksum: 'some' is not allowed; allowed: all, sampled, off",
        "--master: 'fp8' is not allowed; allowed: float32, bfloat16",
        "--num-buffers: '0': numbers from 1 on with commas, like 1,2,3",
    ]
    assert [text for text in expected if not any(text in line for line in lines)] == []
    assert lines[-1].endswith("problems; nothing was started")


def test_direct_needs_a_gpu(rlctl: Rlctl) -> None:
    done = rlctl("bench", "refit", "--mode", "direct")
    assert done.code == 2
    assert "direct needs a GPU: on CPU vLLM repacks its weights; allowed: auto, staged" in done.err


def test_too_few_gpus_are_told_with_the_arithmetic(rlctl: Rlctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    done = rlctl("bench", "refit", "--trainers", "2", "--generators", "2")
    assert done.code == 2
    assert "4 GPUs needed, apart for 2 trainer ranks and 2 engines x 1" in done.err


def test_mistakes_of_bench_dispatch_are_told_at_once(rlctl: Rlctl) -> None:
    done = rlctl("bench", "dispatch", "--workers", "1,zero", "--payloads", "1KB,2TB")
    assert done.code == 2
    expected = [
        "--workers: 'zero': numbers from 1 on with commas, like 1,2,4",
        "--payloads: '2TB': numbers from 1 on with commas, like 1KB,8MB",
    ]
    assert [text for text in expected if text not in done.err] == []


def test_mistakes_of_bench_sft_are_told_at_once(rlctl: Rlctl) -> None:
    done = rlctl("bench", "sft", "--model", "tiy", "--modes", "eagre", "--ranks", "4", "--batch", "2")
    assert done.code == 2
    assert done.err.splitlines() == [
        "error: --batch: 2: at least one sample for each of the 4 ranks",
        "error: --modes: eagre: allowed are eager, eager-graph, compiled, compiled-graph, "
        "megatron[-tpN][-ppN][-cpN][-epN][-compiled][-graph]; did you mean eager?",
        "error: --model: tiy is no model; did you mean tiny?; allowed: tiny, qwen3-0.6b, qwen3-1.7b, qwen3-4b, "
        "qwen3-8b, qwen3-30b-a3b, qwen3-235b-a22b, llama-8b, or a folder with a config.json",
        "3 problems; nothing was started",
    ]
    longer = rlctl("bench", "sft", "--model", str(RECIPES / "tiny/qwen3-tiny"), "--seq-len", "65")
    assert longer.err.splitlines()[0] == "error: --seq-len: 65: the model's longest sequence is 64"


def test_the_table_of_bench_sft_fits_the_terminal() -> None:
    rows = [
        SftRow(mode="eager", first=3.0, step=2.0, rate=100.0, mfu=None),
        SftRow(mode="compiled", first=9.0, step=1.0, rate=200.0, mfu=0.475),
    ]
    lines = render(SftResults(model="tiny", ranks=2, tokens=64, batch=8, rows=rows)).splitlines()
    assert lines[0] == "tiny on 2 ranks: 8 samples of 64 tokens a step"
    assert lines[2].split() == ["eager", "3.000", "2.000", "100", "1.00"]
    assert lines[3].split() == ["compiled", "9.000", "1.000", "200", "47.5%", "2.00"]
    assert max(map(len, lines)) <= 80


def test_mistakes_of_bench_generation_are_told_at_once(rlctl: Rlctl) -> None:
    tiny = str(RECIPES / "tiny/qwen3-tiny")
    options = ("--turns", "2,3,5", "--tokens", "6", "--set", "trainer.compile=true")
    done = rlctl("bench", "generation", "--model", tiny, *options)
    assert (done.code, done.err.splitlines()) == (
        2,
        [
            "error: --turns: 5: --tokens 6 does not divide into as many turns",
            "error: --tokens: 6: 118 with prompt and answers, and the model's longest sequence is 64",
            "error: --set: trainer.compile: keys of generation, environment, placement, lora and run are "
            "what can change",
            "3 problems; nothing was started",
        ],
    )
    done = rlctl("bench", "generation", "--turns", "x", "--set", "generation.max_num_seq=3")
    assert done.err.splitlines()[0] == "error: --turns: 'x': numbers from 1 on with commas, like 1,8"
    done = rlctl("bench", "generation", "--set", "generation.max_num_seq=3")
    error = "error: --set generation.max_num_seq=3: unknown key; did you mean max_num_seqs?"
    assert done.err.splitlines() == [error, "1 problem; nothing was started"] and done.code == 2


def test_ctrl_c_leaves_what_was_measured() -> None:
    def measure_rows(count: int) -> Iterator[int]:
        yield from range(count)
        raise KeyboardInterrupt

    assert until_interrupted(measure_rows(2)) == ([0, 1], True)
    assert until_interrupted(range(3)) == ([0, 1, 2], False)
    with pytest.raises(KeyboardInterrupt):
        until_interrupted(measure_rows(0))


def test_mistakes_in_settings_are_told_before_weights_are_made(
    rlctl: Rlctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = rlctl("bench", "sft", "--modes", "eager,megatron-tp2", "--set", "trainer.optimizer.lrr=1")
    assert done.code == 2
    lines = done.err.splitlines()
    assert lines[-4] == "error: eager: trainer.optimizer.lrr=1: unknown key; did you mean lr?"
    assert lines[-3] == "error: megatron-tp2: trainer.optimizer.lrr=1: unknown key; did you mean lr?"
    assert lines[-2].startswith(
        "error: megatron-tp2: trainer.megatron.tensor_model_parallel_size=2: trainer.num_ranks:"
    )
    assert lines[-1] == "3 problems; nothing was started"
    done = rlctl("bench", "grpo", "--modes", "colocated", "--set", "grpo.loss.clip_low=-1")
    assert (done.code, "error: sync, colocated: grpo.loss.clip_low=-1: must be" in done.err) == (2, True)
    assert not list(tmp_path.glob("rlctl-*"))


@pytest.mark.parametrize("lengths", ["600,nan,4096", "inf,1,4096"])
def test_lengths_are_finite(rlctl: Rlctl, lengths: str) -> None:
    assert f"error: --lengths: '{lengths}'" in rlctl("bench", "grpo", "--lengths", lengths).err


def test_mistakes_of_bench_offload_are_told_at_once(rlctl: Rlctl) -> None:
    done = rlctl("bench", "offload", "--model", "tiy", "--backend", "fsp")
    assert done.code == 2
    lines = done.err.splitlines()
    assert lines[0] == "error: --backend: 'fsp' is not allowed; did you mean fsdp?; allowed: fsdp, megatron"
    assert lines[1].startswith("error: --model: tiy is no model; did you mean tiny?")
    longer = rlctl("bench", "offload", "--micro-batch-tokens", "1000", "--seq-len", "1001")
    assert longer.err.splitlines()[0] == "error: --seq-len: 1001: the model, or a pass, holds 1000 at most"
    unknown = rlctl("bench", "offload", "--set", "trainer.dtyp=float32")
    assert (unknown.code, "did you mean dtype?" in unknown.err) == (2, True)


def make_offload_results(copies: CopyRates | None) -> OffloadResults:
    on_device = StepRow(
        kind="left", log_probs=1.0, train=3.0, peak=90e9, moved=(0.0, 0.0), device=16.0, host=1.0, losses=[2.0]
    )
    offloaded = StepRow(
        kind="moved", log_probs=1.1, train=3.2, peak=25e9, moved=(65e9, 65e9), device=16.0, host=9.0, losses=[2.0]
    )
    return OffloadResults(
        model="qwen3-8b", backend="fsdp", tokens=4096, batch=8, copies=copies, rows=[on_device, offloaded]
    )


def test_the_tables_of_bench_offload_say_what_is_hidden() -> None:
    copies = CopyRates(nbytes=int(40e9), link=(52e9, 54e9), mover=(50e9, 52e9), first=30.0)
    results = make_offload_results(copies)
    assert results.cost == pytest.approx(0.3)
    # Only bytes moved by steps count, not those of the measurement of the link.
    assert results.moving == pytest.approx(1.3 + 1.25)
    lines = render(results).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "qwen3-8b, backend fsdp: 8 sequences of 4,096 tokens a step"
    assert lines[2].split() == ["to", "host", "52.0", "50.0", "96%"]
    assert lines[3].split() == ["to", "device", "54.0", "52.0", "96%"]
    assert lines[5].split() == ["left", "1.000", "3.000", "4.000", "90.00", "0.00", "16.0", "1.0"]
    assert lines[6].split() == ["moved", "1.100", "3.200", "4.300", "25.00", "130.00", "16.0", "9.0"]
    assert lines[7] == "a step takes +0.300 s longer; the moves alone take 2.550 s: 88% of them hidden"
    assert json.loads(json.dumps(results.as_json()))["hidden"] == results.hidden


def test_bench_offload_without_a_gpu_says_that_nothing_moved() -> None:
    assert render(make_offload_results(None)).splitlines()[-1].endswith("0 bytes were moved")


def test_a_payload_without_a_unit_is_bytes() -> None:
    assert numbers("--payloads", "512, 1kb,8MB", "1KB", [], UNITS) == (512, 1024, 8 << 20)


def test_rows_of_bench_dispatch_are_shown_with_and_without_a_graph() -> None:
    rows = [
        DispatchRow(workers=4, payload=1024, ordinary=0.0026, compiled=0.0004, idle=0.06, why=""),
        DispatchRow(
            workers=4,
            payload=8 << 20,
            ordinary=0.0026,
            compiled=None,
            idle=0.0,
            why="Ray 3.0 is none of the releases",
        ),
    ]
    table = render(DispatchResults(rows))
    assert "…" not in table and max(map(len, table.splitlines())) <= 80
    text = " ".join(table.split())
    assert "4 1 KB 2.60 ms 400 us 6.5x 0.06" in text
    assert "4 8 MB 2.60 ms 0.00" in text
    assert "no compiled graph: Ray 3.0 is none of the releases" in text


def make_refit_results() -> RefitResults:
    rows = [
        SchemeRow(
            label="raw link",
            mode="",
            seconds=0.0445,
            commit=0.0,
            phases={"wire": 0.0443},
            trainer_extra=1 << 30,
            engine_extra=1 << 30,
            trainer_growth=0,
            engine_growth=0,
            checked=False,
        ),
        SchemeRow(
            label="rlctl ipc, staged, 2 buffers, checks sampled",
            mode="staged",
            seconds=0.0471,
            commit=0.0082,
            phases={"pack": 0.0156, "wire": 0.0452},
            trainer_extra=0,
            engine_extra=0,
            trainer_growth=0,
            engine_growth=0,
            checked=True,
            driver=0.1,
            stall=0.02,
        ),
        SchemeRow(
            label="rlctl shm, staged, 2 buffers, checks off",
            mode="staged",
            seconds=0.05,
            commit=0.0,
            phases={},
            trainer_extra=0,
            engine_extra=0,
            trainer_growth=0,
            engine_growth=0,
            checked=True,
            wrong=["w"],
        ),
    ]
    return RefitResults(
        model="qwen3-8b", payload=16_381_000_000, trainers=2, engines=2, tensor_parallel=2, bound=0.0445, rows=rows
    )


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_fits_and_says_what_decides(width: int) -> None:
    text = render(make_refit_results(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "qwen3-8b, 2 trainer ranks to 2 engines x 2 devices" in text
    for cell in ("44.5", "368.1", "100%", "94%", "8.2", "20.0", "equal", "differ"):
        assert cell in text
    assert "…" not in text
    assert ("88%" in text) == (width == 140)


def test_mistakes_of_bench_algorithms_are_told_at_once_each_with_whom_it_concerns(rlctl: Rlctl) -> None:
    algorithms = ("grp", "rloo rloo", "grpo", "grpo", "rloo grpo.loss.clip_lw=1")
    done = rlctl("bench", "algorithms", *algorithms, "--set", "grpo.num_step=3", "--plot", "x.pdf")
    allowed = ", ".join(algorithm_names())
    assert done.code == 2
    assert done.err.splitlines() == [
        "error: --plot: x.pdf: allowed are names that end in .png or .svg",
        "error: grpo: named twice",
        f"error: grp: no such algorithm; did you mean grpo?; allowed: {allowed}, a file, or key=value",
        "error: rloo rloo: rloo and rloo: an algorithm is at most one file",
        "error: grpo, rloo grpo.loss.clip_lw=1: grpo.num_step=3: unknown key; did you mean num_steps?",
        "error: rloo grpo.loss.clip_lw=1: grpo.loss.clip_lw=1: unknown key; did you mean clip_low?",
        "6 problems; nothing was started",
    ]


def test_a_recipe_without_validation_cannot_be_compared(rlctl: Rlctl) -> None:
    done = rlctl("bench", "algorithms", "grpo", "rloo", "--set", "validation.every=0")
    assert done.code == 2 and done.err.startswith("error: grpo, rloo: held-out accuracy is compared: ")
