"""A complete engine in one file. In each step a transformers model samples or scores for every request, on a CPU."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlctl.generation.engine import Engine, EngineStats, FinishedTurns, LoadMode, MemoryPart
from rlctl.generation.requests import (
    TOP_IDS,
    TOP_LOG_PROBS,
    VALUE,
    Completion,
    Finish,
    PackedCompletions,
    RequestId,
    ScoreRequest,
    TurnRequest,
)
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
        model_class = AutoModelForSequenceClassification if spec.values else AutoModelForCausalLM
        model = model_class.from_pretrained(spec.model_path, dtype=dtype, attn_implementation=options.attention)
        self._model = model.eval()
        self._turns: dict[RequestId, Turn] = {}
        self._to_score: dict[RequestId, ScoreRequest] = {}
        self._ended: dict[RequestId, Completion] = {}
        self._scored: dict[RequestId, Completion] = {}
        self._receiver: ChunkReceiver | None = None
        # Lock for all fields above. A decoding step, a change of weights and a call never run at the same time.
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, requests: list[TurnRequest]) -> None:
        with self._changed:
            for request in requests:
                if len(request.prompt_tokens) >= self._spec.max_model_len:
                    raise ValueError(f"{request.id}: a prompt of {len(request.prompt_tokens)} tokens does not fit")
            self._require_new([request.id for request in requests])
            for request in requests:
                self._turns[request.id] = Turn(request, torch.Generator().manual_seed(request.seed))
            self._changed.notify_all()

    def score(self, requests: list[ScoreRequest]) -> None:
        with self._changed:
            for request in requests:
                check = request.check_value if self._spec.values else request.check
                check(self._spec.max_model_len, self._model.config.vocab_size)
            self._require_new([request.id for request in requests])
            self._to_score |= {request.id: request for request in requests}
            self._changed.notify_all()

    def open_scores(self) -> str:
        return ""

    def collect(self, patience_s: float) -> FinishedTurns:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._scored, patience_s)
            ended = self._ended | self._scored
            self._ended = {}
            self._scored = {}
            stats = EngineStats(**{**vars(self._stats), "at": time.monotonic()})
        return FinishedTurns(list(ended), PackedCompletions.pack(list(ended.values())), stats)

    def abort(self, ids: list[RequestId]) -> int:
        with self._changed:
            tokens = 0
            for request_id in ids:
                self._to_score.pop(request_id, None)
                self._scored.pop(request_id, None)
                sampled = self._turns.pop(request_id, None) or self._ended.pop(request_id, None)
                tokens += len(sampled.tokens) if sampled else 0
            return tokens

    def _require_new(self, ids: list[RequestId]) -> None:
        known = {*self._turns, *self._to_score, *self._ended, *self._scored}
        for request_id in ids:
            if request_id in known:
                raise ValueError(f"{request_id} is in flight already")
            known.add(request_id)

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
                self._changed.wait_for(lambda: self._turns or self._to_score)
                begin = time.perf_counter()
                turns = list(self._turns.values())
                for turn in turns:
                    self._sample(turn)
                for request in self._to_score.values():
                    self._scored[request.id] = self._score_tokens(request)
                count = len(turns) + len(self._to_score)
                self._to_score = {}
                seconds = self._stats.busy + time.perf_counter() - begin
                self._stats = EngineStats(seconds, 0.0, self._stats.tokens + count, self._stats.steps + 1)
                if self._ended or self._scored:
                    self._changed.notify_all()

    @torch.no_grad()
    def _score_tokens(self, request: ScoreRequest) -> Completion:
        tokens = torch.tensor(request.tokens)
        if self._spec.values:
            value = self._model.score(self._model.model(tokens[None]).last_hidden_state[0, -1:])[0]
            versions = np.full(1, self._version, np.int32)
            return Completion(
                tokens[-1:].int().numpy(), np.zeros(1, np.float32), versions, "length", {VALUE: value.numpy()}
            )
        logits = self._model(tokens[None]).logits[0, request.start - 1 : -1].float()
        if request.num_tokens:
            logits[:, request.num_tokens :] = -torch.inf
        log_probs = (logits / request.temperature).log_softmax(-1)
        scored = tokens[request.start :]
        columns = {}
        if request.top or request.ids is not None:
            ids = log_probs.topk(request.top).indices if request.ids is None else torch.from_numpy(request.ids).long()
            columns = {TOP_IDS: ids.int().numpy(), TOP_LOG_PROBS: log_probs.gather(1, ids).numpy()}
        return Completion(
            scored.int().numpy(),
            log_probs.gather(1, scored[:, None])[:, 0].numpy(),
            np.full(len(scored), self._version, np.int32),
            "length",
            columns,
        )

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
            del self._turns[request.id]
            finish: Finish = "stop" if stops else "length"
            self._ended[request.id] = Completion(
                np.array(turn.tokens, np.int32),
                np.array(turn.log_probs, np.float32),
                np.array(turn.versions, np.int32),
                finish,
            )


def environment(device: str, devices: Sequence[str], beside: Sequence[str] = ()) -> dict[str, str]:
    """Return environment variables that give the engine one thread, because the trainer needs the other core."""
    return {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


KIND = EngineKind(TorchEngine, environment, TorchOptions)
