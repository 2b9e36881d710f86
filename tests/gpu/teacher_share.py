"""A teacher's share of a step of one trainer rank, on random weights: before the update, and within it.

    python -m tests.gpu.teacher_share [--shape qwen3-4b] [--sequences 512] [--tokens 1024] [--lora 16]

Prints one line of JSON for each pass. over=sampled: the teacher's log-probs of the sampled tokens, then the update.
over=vocabulary: the update computes the divergence, `teacher_s` of its `update_s`. A share is that of both together;
sampling and the weight update are not in it. A policy of 4 billion weights trains whole in 80 GiB and more, and with
--lora in 40. Policy and teacher have the same weights: their cost does not depend on them.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlctl.bench.workload import SHAPES
from rlctl.config.role_schema import DistillationSection
from rlctl.preflight.declared_columns import RoleModel
from rlctl.sft.loss import NllLoss
from rlctl.telemetry.throughput import peak_flops
from rlctl.training.micro_batching import TrainingSample
from tests.gpu.random_model import make
from tests.gpu.score_rate import forward_flops
from tests.system.training.scenario import adapters_of, open_trainer, share, totals

PASSES = 3
REVERSE_KL = DistillationSection(
    coef=1.0,
    over="vocabulary",
    divergence="reverse_kl",
    beta=0.5,
    num_top_tokens=20,
    rest="bin",
    log_ratio_floor=-10.0,
)


def main() -> None:
    """Open a trainer with a teacher, and measure `PASSES` steps of each kind of divergence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--lora", type=int, default=0, help="rank of the policy's adapters; 0 trains all weights")
    parser.add_argument("--place", choices=("resident", "swapped"), default="resident")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder), arguments.shape, prompts=1) / "model"
        on_gpu = arguments.device == "cuda"
        trainer = open_trainer(
            model,
            Path(folder),
            device="cuda:0" if on_gpu else "cpu",
            teacher=RoleModel(str(model), arguments.place),
            adapters=adapters_of(model, arguments.lora) if arguments.lora else None,
            dtype="bfloat16",
            compile=on_gpu,
            activation_checkpointing=True,
            micro_batch_tokens=arguments.micro_batch_tokens,
            logprob_chunk_tokens=1024,
        )
        with trainer as rank:
            for number in range(PASSES):
                for over in ("sampled", "vocabulary"):
                    samples = _draw(number, arguments)
                    print(json.dumps(_measure(rank, samples, over, arguments)), flush=True)


def _draw(number: int, arguments: argparse.Namespace) -> list[TrainingSample]:
    """Return new random sequences, of which all tokens but the first are trained."""
    draws = np.random.default_rng(number)
    vocab = SHAPES[arguments.shape]["vocab_size"]
    mask = np.arange(arguments.tokens) > 0
    rows = draws.integers(3, vocab, (arguments.sequences, arguments.tokens)).astype(np.int32)
    return [TrainingSample(row, mask) for row in rows]


def _measure(trainer: Any, samples: list[TrainingSample], over: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one step."""
    batches = share(samples, arguments.micro_batch_tokens)
    if over == "sampled":
        teacher_s = _time(lambda: trainer.log_probs(batches, "teacher"), arguments.device)
        loss = NllLoss()
        update_s = _time(lambda: trainer.train(batches, loss, totals(samples)), arguments.device)
        step_s = teacher_s + update_s
    else:
        loss = NllLoss(distillation=REVERSE_KL)
        metrics: dict[str, float] = {}
        step_s = _time(lambda: metrics.update(trainer.train(batches, loss, totals(samples))), arguments.device)
        teacher_s = metrics["train/teacher"]
        update_s = step_s
    tokens = arguments.sequences * arguments.tokens
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    peak = peak_flops(device)
    flops = tokens * forward_flops(SHAPES[arguments.shape], arguments.tokens)
    return {
        "device": device,
        "over": over,
        "place": arguments.place,
        "teacher_s": round(teacher_s, 3),
        "update_s": round(update_s, 3),
        "teacher_share": round(teacher_s / step_s, 3),
        "teacher_tokens_per_s": round(tokens / teacher_s),
        "teacher_forward_mfu": round(flops / teacher_s / peak, 3) if peak else None,
        "peak_gib": round(trainer.memory()["device_peak"] / 2**30, 2),
    }


def _time(work: Callable[[], object], device: str) -> float:
    """Return the seconds of the work, until the device has done it."""
    begin = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
