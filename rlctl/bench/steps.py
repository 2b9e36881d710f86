"""Training steps of one trainer rank in a separate process, on random sequences of one length."""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rlctl.training.worker import RankBatch

Result = TypeVar("Result")
_LOOK_S = 1.0


def in_process(work: Callable[..., Result], *arguments: Any) -> Result:
    """Return `work(*arguments)` from a separate process. Its end frees device memory and process groups.

    The process ends with this one, and at Ctrl-C. Raises RuntimeError with the first line of the work's error.
    """
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=_end_with, initargs=(os.getpid(),)
    ) as pool:
        try:
            return pool.submit(work, *arguments).result()
        except Exception as error:  # of any kind: it is that process's
            said = str(error).strip().splitlines()
            raise RuntimeError(f"{type(error).__name__}: {said[0] if said else 'no reason given'}") from error
        except BaseException:
            for child in active_children():
                child.kill()
            raise


def _end_with(parent: int) -> None:
    """End this process once its parent is gone, killed perhaps: it may hold a device."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    Thread(target=watch, name="parent", daemon=True).start()


def random_batch(model: Path, tokens: int, count: int, micro_batch: int) -> "RankBatch":
    """Return `count` random sequences of `tokens` tokens, packed into micro-batches of at most `micro_batch`.

    All tokens but each sequence's first are trained on.
    """
    import numpy as np

    from rlctl.training.micro_batching import TrainingSample, plan_micro_batches
    from rlctl.training.worker import RankBatch

    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    rng, mask = np.random.default_rng(0), np.arange(tokens) > 0
    samples = [TrainingSample(rng.integers(vocabulary, size=tokens).astype(np.int32), mask, {}) for _ in range(count)]
    [plan] = plan_micro_batches([tokens] * count, 1, micro_batch)
    return RankBatch.from_micro_batches([[samples[index] for index in batch] for batch in plan])


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
