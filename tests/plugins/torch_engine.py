"""A complete engine in one file. In each step a transformers model samples one token for every request, on a CPU."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM

from rlctl.generation.engine import Engine, EngineStats, FinishedTurns, LoadMode, MemoryPart
from rlctl.generation.requests import Completion, Finish, PackedCompletions, RequestId, TurnRequest
from rlctl.generation.spec import EngineKind, EngineSpec
from rlctl.refit.pipeline import ChunkReceiver
from rlctl.refit.protocol import EngineReport, Header, Mode, TransportSpec, Untouched
from rlctl.refit.refit_plan import RefitPlan
from rlctl.refit.transport import open_receiver
from rlctl.refit.weight_sink import WholeTensorSink

CPU = torch.device("cpu")


@dataclass
class Turn:
    """A request in progress, with the tokens sampled so far."""

    request: TurnRequest
    draws: torch.Generator
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class TorchOptions:
    """Options of this engine, from the config."""

    attention: Literal["eager", "sdpa"] = "sdpa"


class TorchEngine(Engine):
    """Engine that samples from a transformers model, without a key-value cache."""

    def __init__(self, spec: EngineSpec) -> None:
        options = TorchOptions(**spec.options)
        if spec.top_p != 1 or spec.top_k or spec.forced_lengths:
            raise ValueError("this engine samples by temperature alone, and ends by tokens")
        self._spec = spec
        self._version = spec.version
        self._stats = EngineStats()
        dtype = getattr(torch, spec.dtype)
        model = AutoModelForCausalLM.from_pretrained(
            spec.model_path, dtype=dtype, attn_implementation=options.attention
        )
        self._model = model.eval()
        self._turns: dict[RequestId, Turn] = {}
        self._ended: list[tuple[Turn, Finish]] = []
        self._receiver: ChunkReceiver | None = None
        # Lock for all fields above. A decoding step, a change of weights and a call never run at the same time.
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, requests: list[TurnRequest]) -> None:
        with self._changed:
            ids = {turn.request.id for turn, _ in self._ended}
            ids.update(self._turns)
            for request in requests:
                if len(request.prompt_tokens) >= self._spec.max_model_len:
                    raise ValueError(f"{request.id}: a prompt of {len(request.prompt_tokens)} tokens does not fit")
                if request.id in ids:
                    raise ValueError(f"{request.id} is being sampled already")
                ids.add(request.id)
            for request in requests:
                self._turns[request.id] = Turn(request, torch.Generator().manual_seed(request.seed))
            self._changed.notify_all()

    def collect(self, patience_s: float) -> FinishedTurns:
        with self._changed:
            self._changed.wait_for(lambda: self._ended, patience_s)
            ended = self._ended
            self._ended = []
            stats = EngineStats(**{**vars(self._stats), "at": time.monotonic()})
        completions = [
            Completion(
                np.array(turn.tokens, np.int32),
                np.array(turn.log_probs, np.float32),
                np.array(turn.versions, np.int32),
                finish,
            )
            for turn, finish in ended
        ]
        return FinishedTurns([turn.request.id for turn, _ in ended], PackedCompletions.pack(completions), stats)

    def abort(self, ids: list[RequestId]) -> int:
        with self._changed:
            aborted_turns = [turn for turn, _ in self._ended if turn.request.id in ids]
            self._ended = [(turn, finish) for turn, finish in self._ended if turn.request.id not in ids]
            aborted_turns += [self._turns.pop(request_id) for request_id in ids if request_id in self._turns]
            return sum(len(turn.tokens) for turn in aborted_turns)

    def refit_open(
        self, spec: TransportSpec, plan: RefitPlan, first_rank: int, mode: Mode, in_flight: bool
    ) -> LoadMode:
        if self._receiver:
            self._receiver.close()
        self._receiver = open_receiver(spec, plan, first_rank, CPU)
        self._sink = WholeTensorSink(plan, CPU)
        return LoadMode("staged", "this engine loads whole tensors", plan.nbytes, overwrites=False)

    def refit_receive(self, header: Header) -> EngineReport:
        assert self._receiver, "refit_open comes first"
        begin = time.perf_counter()
        try:
            received = self._receiver.receive(header, self._sink)
        except Exception as error:
            raise Untouched(str(error)) from error
        with self._changed:
            commit = time.perf_counter()
            self._model.load_state_dict(dict(self._sink.tensors()), strict=False)
            self._version = header.version
        end = time.perf_counter()
        return EngineReport(received, end - begin, end - commit, end - commit)

    def sleep(self) -> None:
        """Do nothing: there is no device memory to give back."""

    def wake(self, part: MemoryPart) -> None:
        """Do nothing: there is no device memory to take."""

    def memory(self) -> dict[str, float]:
        return {"device_allocated": 0.0, "device_peak": 0.0, "host_rss": float(psutil.Process().memory_info().rss)}

    def notes(self) -> list[str]:
        attention = self._model.config._attn_implementation
        return [f"{Path(__file__).name} samples without a key-value cache, by {attention} attention"]

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._turns)
                begin = time.perf_counter()
                turns = list(self._turns.values())
                for turn in turns:
                    self._sample(turn)
                seconds = self._stats.busy + time.perf_counter() - begin
                self._stats = EngineStats(seconds, 0.0, self._stats.tokens + len(turns), self._stats.steps + 1)
                if self._ended:
                    self._changed.notify_all()

    @torch.no_grad()
    def _sample(self, turn: Turn) -> None:
        request = turn.request
        spec = self._spec
        tokens = [*request.prompt_tokens, *turn.tokens]
        logits = self._model(torch.tensor([tokens])).logits[0, -1].float()
        log_probs = (logits / (request.temperature or 1.0)).log_softmax(-1)
        drawn = torch.multinomial(log_probs.exp(), 1, generator=turn.draws) if request.temperature else logits.argmax()
        token = int(drawn)
        turn.tokens.append(token)
        turn.log_probs.append(float(log_probs[token]))
        turn.versions.append(self._version)
        stops = token in (*spec.stop_token_ids, *request.stops)
        if stops or len(turn.tokens) == request.max_new_tokens or len(tokens) + 1 == spec.max_model_len:
            self._ended.append((self._turns.pop(request.id), "stop" if stops else "length"))


def environment(device: str, devices: Sequence[str], beside: Sequence[str] = ()) -> dict[str, str]:
    """Return environment variables that give the engine one thread, because the trainer needs the other core."""
    return {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


KIND = EngineKind(TorchEngine, environment, TorchOptions)
