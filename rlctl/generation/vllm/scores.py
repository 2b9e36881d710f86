"""Scores of given tokens, computed in vLLM's workers from the hidden states of their prompts.

vLLM's own prompt log-probs are of temperature 1. Its first model runner holds the logits of a whole prompt at once, and
knows no given ids. So a scored request is a prompt, and the one token that vLLM samples is not read. Each step hands
the hidden states of its prompts to `ScoreTable`, which computes log-probs in chunks of `SCORE_ROWS` tokens. A scored
prompt does not read the prefix cache: every row is computed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlctl.generation.requests import TOP_IDS, TOP_LOG_PROBS, ScoreRequest
from rlctl.preflight.memory import SCORE_ROWS

# Calls a method of `RefitWorker` on all workers; returns their answers.
CallWorkers = Callable[..., list[Any]]
# Return the logits, [rows, vocabulary], of hidden states, [rows, h].
ComputeLogits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TokenScores:
    """Scores of one request: float32 [n], and further columns [n, k]."""

    log_probs: NDArray[np.float32]
    columns: dict[str, NDArray[Any]]


@dataclass(frozen=True)
class HiddenRows:
    """One request's rows of a step's hidden states."""

    name: str
    # Index of the first row.
    first: int
    # Index of the request's token whose hidden state this row is.
    position: int
    count: int


class EngineScores:
    """Requests that the workers of an engine score, by the names of `ActiveRequests`."""

    def __init__(self, call_workers: CallWorkers) -> None:
        self._call_workers = call_workers
        # Name -> vLLM's own name, which the workers use.
        self._worker_names: dict[str, str] = {}
        self._is_open = False

    def __contains__(self, name: str) -> bool:
        return name in self._worker_names

    def open(self) -> None:
        """Have the workers score from now on. Raises RuntimeError if this vLLM's model runner cannot."""
        if not self._is_open:
            self._call_workers("rl_open_scores")
            self._is_open = True

    def add(self, name: str, worker_name: str, request: ScoreRequest) -> None:
        """Have the workers score a request that was passed to vLLM and has not begun."""
        self._worker_names[name] = worker_name
        self._call_workers("rl_score", worker_name, request)

    def take(self, names: Iterable[str]) -> dict[str, TokenScores]:
        """Remove finished requests, and return their scores. Names of other requests are ignored."""
        finished = {name: self._worker_names.pop(name) for name in names if name in self._worker_names}
        if not finished:
            return {}
        scores: list[TokenScores] = self._call_workers("rl_take_scores", list(finished.values()))[0]
        return dict(zip(finished, scores))

    def forget(self, names: Iterable[str]) -> None:
        """Remove aborted requests. Names of other requests are ignored."""
        forgotten = [self._worker_names.pop(name) for name in names if name in self._worker_names]
        if forgotten:
            self._call_workers("rl_forget_scores", forgotten)


class ScoredRows:
    """Scores of one request so far. They arrive on the host while the device works on later steps."""

    def __init__(self, request: ScoreRequest, device: torch.device) -> None:
        count = len(request.tokens) - request.start
        self.request = request
        self.targets = torch.tensor(request.tokens[request.start :], device=device)
        self.ids = None if request.ids is None else torch.from_numpy(request.ids).long().to(device)
        self.width = request.top if self.ids is None else self.ids.shape[1]
        is_pinned = device.type == "cuda"
        self.log_probs = torch.empty(count, pin_memory=is_pinned)
        self.top_ids = torch.empty(count, self.width, dtype=torch.int32, pin_memory=is_pinned)
        self.top_log_probs = torch.empty(count, self.width, pin_memory=is_pinned)
        # Recorded after the copies of the last step; None on a CPU.
        self.copied: torch.cuda.Event | None = None
        # True where a row was computed.
        self._computed = np.zeros(count, np.bool_)

    def overlap(self, rows: HiddenRows) -> range:
        """Return which of the n scored tokens these rows score."""
        # The hidden state of a token scores the next token.
        first_token = rows.position + 1 - self.request.start
        return range(max(0, first_token), min(len(self.targets), first_token + rows.count))

    def put(self, tokens: range, log_probs: Tensor, top_ids: Tensor, top_log_probs: Tensor) -> None:
        """Begin to copy scores to the host. tokens: which of the n scored tokens they belong to."""
        place = slice(tokens.start, tokens.stop)
        self.log_probs[place].copy_(log_probs, non_blocking=True)
        if self.width:
            self.top_ids[place].copy_(top_ids[:, : self.width], non_blocking=True)
            self.top_log_probs[place].copy_(top_log_probs[:, : self.width], non_blocking=True)
        self._computed[place] = True

    def scores(self) -> TokenScores:
        """Return the scores, once the device has copied them. Raises RuntimeError if a row was never computed."""
        if self.copied:
            self.copied.synchronize()
        if not self._computed.all():
            missing = int(np.count_nonzero(~self._computed))
            raise RuntimeError(f"vLLM computed no hidden state for {missing} tokens of request {self.request.id}")
        columns: dict[str, NDArray[Any]] = {}
        if self.request.top or self.ids is not None:
            columns = {TOP_IDS: self.top_ids.numpy().copy(), TOP_LOG_PROBS: self.top_log_probs.numpy().copy()}
        return TokenScores(self.log_probs.numpy().copy(), columns)


# Number of tokens above that of any vocabulary.
_NO_LIMIT = 2**31 - 1


class ScoreTable:
    """Requests that one worker scores, by vLLM's names."""

    def __init__(self, compute_logits: ComputeLogits, device: torch.device) -> None:
        self._compute_logits = compute_logits
        self._device = device
        self._requests: dict[str, ScoredRows] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._requests

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, name: str, request: ScoreRequest) -> None:
        """Begin to score a request."""
        self._requests[name] = ScoredRows(request, self._device)

    def forget(self, names: Iterable[str]) -> None:
        """Remove requests."""
        for name in names:
            self._requests.pop(name, None)

    def take(self, names: Sequence[str]) -> list[TokenScores]:
        """Remove finished requests, and return their scores."""
        return [self._requests.pop(name).scores() for name in names]

    @torch.inference_mode()
    def score(self, hidden_states: Tensor, spans: Iterable[HiddenRows]) -> None:
        """Score the tokens that follow a step's rows. hidden_states: [rows, h] of the step."""
        # Rows of all requests together, so that a product with the head has many rows.
        owners: list[tuple[ScoredRows, range]] = []
        hidden_parts: list[Tensor] = []
        for rows in spans:
            scored = self._requests[rows.name]
            tokens = scored.overlap(rows)
            if tokens:
                begin = rows.first + tokens.start + scored.request.start - 1 - rows.position
                hidden_parts.append(hidden_states[begin : begin + len(tokens)])
                owners.append((scored, tokens))
        if not owners:
            return
        outputs = self._score_rows(torch.cat(hidden_parts), owners)
        parts = [torch.split(output, [len(tokens) for _, tokens in owners]) for output in outputs]
        for (scored, tokens), log_probs, top_ids, top_log_probs in zip(owners, *parts):
            scored.put(tokens, log_probs, top_ids, top_log_probs)
        if self._device.type == "cuda":
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            for scored, _ in owners:
                scored.copied = copied

    def _score_rows(self, hidden: Tensor, owners: list[tuple[ScoredRows, range]]) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probs [rows], and top ids and top log-probs [rows, k], with k the largest of the requests."""
        width = max(scored.width for scored, _ in owners)
        top = max(scored.request.top for scored, _ in owners)
        targets = torch.cat([scored.targets[tokens.start : tokens.stop] for scored, tokens in owners])
        temperatures = torch.cat(
            [torch.full((len(tokens), 1), scored.request.temperature) for scored, tokens in owners]
        ).to(hidden.device, non_blocking=True)
        # Rows without a limit have more than any vocabulary.
        sizes = torch.cat(
            [torch.full((len(tokens), 1), scored.request.num_tokens or _NO_LIMIT) for scored, tokens in owners]
        ).to(hidden.device, non_blocking=True)
        has_limit = any(scored.request.num_tokens for scored, _ in owners)
        wanted = torch.zeros(len(hidden), width, dtype=torch.long, device=hidden.device)
        # True in the rows of requests with given ids.
        is_given = torch.zeros(len(hidden), 1, dtype=torch.bool, device=hidden.device)
        first = 0
        for scored, tokens in owners:
            rows = slice(first, first + len(tokens))
            if scored.ids is not None:
                wanted[rows, : scored.width] = scored.ids[tokens.start : tokens.stop]
                is_given[rows] = True
            first += len(tokens)
        log_probs = []
        top_ids = []
        top_log_probs = []
        chunks = (
            torch.split(tensor, SCORE_ROWS) for tensor in (hidden, targets, temperatures, sizes, wanted, is_given)
        )
        for hidden_rows, row_targets, row_temperatures, row_sizes, row_ids, row_is_given in zip(*chunks):
            logits = self._compute_logits(hidden_rows).float() / row_temperatures
            if has_limit:
                is_padding = torch.arange(logits.shape[1], device=logits.device) >= row_sizes
                logits.masked_fill_(is_padding, -torch.inf)
            below_peak = logits.sub_(logits.amax(-1, keepdim=True))
            log_sum = below_peak.exp().sum(-1, keepdim=True).log()
            log_probs.append((below_peak.gather(1, row_targets[:, None]) - log_sum)[:, 0])
            if top:
                likeliest = below_peak.topk(top, -1).indices
                row_ids[:, :top] = torch.where(row_is_given, row_ids[:, :top], likeliest)
            top_ids.append(row_ids)
            top_log_probs.append(below_peak.gather(1, row_ids) - log_sum)
        return torch.cat(log_probs), torch.cat(top_ids), torch.cat(top_log_probs)


def watch_steps(runner: Any, table: ScoreTable) -> None:
    """Have a model runner hand the hidden states of each step to `table`. Raises RuntimeError if the runner lacks a
    name that this needs.
    """
    second_runner = getattr(runner, "prompt_logprobs_worker", None)
    if second_runner is not None and hasattr(second_runner, "compute_prompt_logprobs"):
        _watch_second_runner(second_runner, table)
    elif hasattr(runner, "_get_prompt_logprobs_dict"):
        _watch_first_runner(runner, table)
    else:
        import vllm

        raise RuntimeError(f"vLLM {vllm.__version__} has no place where the hidden states of prompts can be read")


def _watch_first_runner(runner: Any, table: ScoreTable) -> None:
    compute = runner._get_prompt_logprobs_dict

    def compute_and_score(hidden_states: Tensor, num_scheduled_tokens: dict[str, int]) -> Any:
        if table:
            table.score(hidden_states, [*find_rows(num_scheduled_tokens)])
        return compute(hidden_states, num_scheduled_tokens)

    def find_rows(num_scheduled_tokens: dict[str, int]) -> Iterable[HiddenRows]:
        for name, count in num_scheduled_tokens.items():
            if name in table:
                first = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]])
                yield HiddenRows(name, first, runner.requests[name].num_computed_tokens, count)

    runner._get_prompt_logprobs_dict = compute_and_score


def _watch_second_runner(prompt_worker: Any, table: ScoreTable) -> None:
    compute = prompt_worker.compute_prompt_logprobs

    def compute_and_score(
        logits_fn: ComputeLogits, hidden_states: Tensor, input_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if table:
            table.score(hidden_states, [*find_rows(input_batch)])
        return compute(logits_fn, hidden_states, input_batch, *args, **kwargs)

    def find_rows(batch: Any) -> Iterable[HiddenRows]:
        for index, name in enumerate(batch.req_ids):
            if name in table:
                first = int(batch.query_start_loc_np[index])
                position = int(batch.num_computed_prefill_tokens_np[index])
                yield HiddenRows(name, first, position, int(batch.num_scheduled_tokens[index]))

    prompt_worker.compute_prompt_logprobs = compute_and_score
