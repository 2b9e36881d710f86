"""Compares engines with and without shortened steps, and vLLM's schedulers driven without a model by a seed."""

import random
from collections import Counter, deque
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlctl.generation.engine import Engine
from rlctl.generation.requests import Completion, Purpose, RequestId, TurnRequest
from rlctl.generation.spec import EngineSpec
from rlctl.generation.vllm.engine import VllmEngine
from rlctl.generation.vllm.fast.next_token import NextTokens
from rlctl.generation.vllm.fast.step_outputs import StepOutputs
from rlctl.generation.vllm.kind import environment
from rlctl.workers.group import Worker, WorkerSpec
from tests.system.engines import collect_all
from tests.turns import turn
from tests.unit.generation.vllm.fast.test_step_outputs import make_state

STOP = 1
DEADLINE = 600.0
ROLLOUTS = 48


class WatchedEngine(VllmEngine):
    """Engine that builds schedulers without a model from its config, and reports the state of its cache."""

    def blocks(self) -> dict[str, int]:
        """Return the numbers of free blocks, of blocks that other requests can find, and of tokens found so far."""

        def count() -> dict[str, int]:
            stats = self._scheduler.kv_cache_manager.prefix_cache_stats
            return count_blocks(self._scheduler) | {"found": stats.hits, "asked": stats.queries}

        return self._call_on_thread(count)  # type: ignore[no-any-return]

    def replay(self, ahead: bool, shortened: bool, seed: int) -> "dict[str, Any]":
        """Drive a separate scheduler. ahead: each step is scheduled before the last one's tokens are known."""
        return self._call_on_thread(lambda: Replay(self._scheduler, ahead, shortened, seed).run())  # type: ignore[no-any-return]


def make_watched_engine(spec: EngineSpec) -> Engine:
    """Build an engine whose steps are shortened, or are vLLM's own, as its spec says."""
    return WatchedEngine(spec, "rlctl.generation.vllm.worker_extension.RefitWorker")


def start_engines(spec: EngineSpec, devices: list[str], logs: Path) -> list[Worker]:
    """Start an engine with shortened steps and one without."""
    engines = []
    for name, shortened in (("shortened", True), ("plain", False)):
        engine_spec = replace(spec, options={**spec.options, "fast_path": shortened})
        worker_spec = WorkerSpec(
            name,
            partial(make_watched_engine, engine_spec),
            environment(spec.device, devices),
            log=str(logs / f"{name}.log"),
            threads=4,
        )
        engines.append(Worker(worker_spec))
    return engines


def check_conversations(engines: list[Worker], give_up: bool) -> None:
    """Check that both engines sample the same bits, end in the same way, and leave equal caches."""
    shortened_engine, plain_engine = engines
    shortened_answers = converse(shortened_engine, give_up)
    plain_answers = converse(plain_engine, give_up)
    assert {"stop", "length"} == {answer.finish for answer in shortened_answers}
    for shortened_answer, plain_answer in zip(shortened_answers, plain_answers, strict=True):
        assert shortened_answer.tokens.tolist() == plain_answer.tokens.tolist()
        assert shortened_answer.finish == plain_answer.finish
        assert np.array_equal(shortened_answer.log_probs, plain_answer.log_probs)
    (shortened_blocks,) = shortened_engine.start(WatchedEngine.blocks).wait(DEADLINE)
    (plain_blocks,) = plain_engine.start(WatchedEngine.blocks).wait(DEADLINE)
    # Aborted requests made as many steps as time allowed, and left as many blocks: compare only free blocks.
    equal_counts = ("free",) if give_up else tuple(plain_blocks)
    assert [shortened_blocks[name] for name in equal_counts] == [plain_blocks[name] for name in equal_counts]
    assert plain_blocks["found"] > 500


def check_schedules(engines: list[Worker], ahead: bool) -> None:
    """Check that schedulers with and without shortened steps give the device equal orders in each step.

    ahead: True if each step is scheduled before the tokens of the last step are known.
    """
    for seed in range(3):
        (shortened,) = engines[0].start(WatchedEngine.replay, ahead, True, seed).wait(DEADLINE)
        (plain,) = engines[0].start(WatchedEngine.replay, ahead, False, seed).wait(DEADLINE)
        assert shortened["preemptions"] == plain["preemptions"] > 0
        for name in ("slot_calls", "continued_requests", "appended_tokens"):
            assert seed or 4 * shortened["work_of_vllm"][name] < plain["work_of_vllm"][name], name
        for number, (step, plain_step) in enumerate(zip(shortened["steps"], plain["steps"], strict=True)):
            assert step == plain_step, f"step {number}"


def converse(engine: Worker, give_up: bool) -> list[Completion]:
    """Sample three turns of each rollout, of lengths that differ. give_up: some end while they run.

    Temperatures differ, and a third samples without the engine's top_p and top_k.
    """
    random = np.random.default_rng(0)
    answers: list[Completion] = []
    prompts = [random.integers(3, 64, random.integers(1, 60)).tolist() for _ in range(ROLLOUTS)]
    max_tokens = random.integers(1, 60, (3, ROLLOUTS)).tolist()
    for number in range(3):
        requests: list[TurnRequest] = []
        for rollout, prompt in enumerate(prompts):
            temperature = (0.0, 1.0, 0.7, 1.3)[rollout % 4]
            purpose: Purpose = "train" if rollout % 3 else "parity"
            seed = 100 * number + rollout
            request = turn(rollout, 0, prompt, max_tokens[number][rollout], temperature, seed, purpose)
            requests.append(replace(request, id=RequestId(request.id.rollout, number)))
        given_up = [request.id for request in requests[::8]] if give_up else []
        finishing = [request for request in requests if request.id not in given_up]
        engine.start(Engine.submit, requests).wait(DEADLINE)
        engine.start(Engine.abort, given_up).wait(DEADLINE)
        finishing_ids = [request.id for request in finishing]
        finished = dict(zip(finishing_ids, collect_all(engine, finishing), strict=True))
        answers += finished.values()
        for rollout, request in enumerate(requests):
            answer_tokens = finished[request.id].tokens.tolist() if request.id in finished else []
            # Some later turns rewrite the history, in the middle or from the first token on.
            first_token = {1: 1, 2: len(prompts[rollout]) // 2}.get(rollout % 12, 0)
            prompts[rollout] = prompts[rollout][first_token:] + answer_tokens + [3 + rollout]
    return answers


def orders_of(scheduled: Any) -> tuple[Any, ...]:
    """Return the orders of one step to the device, such as requests, new tokens and blocks, as a tuple to compare."""
    cached = scheduled.scheduled_cached_reqs
    assert scheduled.total_num_scheduled_tokens == sum(scheduled.num_scheduled_tokens.values())
    return (
        list(scheduled.num_scheduled_tokens.items()),
        (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens),
        [(request.req_id, request.block_ids, request.num_computed_tokens) for request in scheduled.scheduled_new_reqs],
        (sorted(cached.resumed_req_ids), dict(cached.all_token_ids), sorted(scheduled.finished_req_ids)),
    )


def count_blocks(scheduler: Any) -> dict[str, int]:
    pool = scheduler.kv_cache_manager.block_pool
    return {"free": pool.get_num_free_blocks(), "findable": len(pool.cached_block_hash_to_block)}


class Replay:
    """Record of 600 steps: scheduled requests, finished ones with tokens and log-probs, free blocks."""

    def __init__(self, like: Any, ahead: bool, shortened: bool, seed: int) -> None:
        """Make a scheduler with the config of `like`."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        kind = AsyncScheduler if ahead else Scheduler
        self._scheduler = kind(
            vllm_config=like.vllm_config,
            kv_cache_config=like.kv_cache_config,
            structured_output_manager=like.structured_output_manager,
            block_size=like.block_size,
        )
        if seed:
            # Long prompts take several steps.
            self._scheduler.max_num_scheduled_tokens = 64
            self._scheduler.scheduler_config = copy(self._scheduler.scheduler_config)
            self._scheduler.scheduler_config.enable_chunked_prefill = True
        # With seed 2 some steps have too few tokens even for the running requests.
        self._narrow = seed == 2
        # Number of steps that are scheduled before the oldest of these steps is sampled.
        self._depth = 2 if ahead else 1
        self._random = random.Random(seed)
        self._sampled = Counter[str]()
        self._states: dict[str, Any] = {}
        self._num_requests = 0
        self.steps: list[Any] = []
        self.preemptions = 0
        # Work that shortened steps leave to vLLM: calls that allocate slots, continued requests, and tokens.
        self._slot_calls = 0
        self._continued_requests = 0
        self._appended_tokens = 0
        self._count_work_of_vllm()
        if shortened:
            StepOutputs(self._scheduler, self._states, NextTokens(self._scheduler))
        else:
            StepOutputs(self._scheduler, self._states)
        self._hasher = block_hasher(like)

    def run(self) -> "dict[str, Any]":
        queue = deque[tuple[Any, Any]]()
        for step in range(600):
            if step < 500:
                self._add_and_abort_requests()
            if self._narrow:
                self._scheduler.max_num_scheduled_tokens = self._random.choice((8, 64, 64))
            scheduled = self._scheduler.schedule()
            self.preemptions += len(scheduled.preempted_req_ids or ())
            queue.append((scheduled, self._sample(scheduled)))
            ended = []
            if len(queue) == self._depth:
                outputs = self._scheduler.update_from_output(*queue.popleft()).get(0)
                ended = [self._end(output) for output in outputs.outputs] if outputs else []
            self.steps.append((orders_of(scheduled), ended, count_blocks(self._scheduler)))
        work = {
            "slot_calls": self._slot_calls,
            "continued_requests": self._continued_requests,
            "appended_tokens": self._appended_tokens,
        }
        return {"steps": self.steps, "preemptions": self.preemptions, "work_of_vllm": work}

    def _count_work_of_vllm(self) -> None:
        scheduler = self._scheduler
        manager = scheduler.kv_cache_manager
        allocate_slots = manager.allocate_slots
        update_from_output = scheduler.update_from_output
        make_cached_request_data = scheduler._make_cached_request_data

        def count_slot_call(*arguments: Any, **keywords: Any) -> Any:
            self._slot_calls += 1
            return allocate_slots(*arguments, **keywords)

        def count_continued_requests(running: list[Any], *arguments: Any) -> Any:
            self._continued_requests += len(running)
            return make_cached_request_data(running, *arguments)

        def count_appended_tokens(scheduled: Any, sampled: Any) -> Any:
            self._appended_tokens += len(scheduled.num_scheduled_tokens)
            return update_from_output(scheduled, sampled)

        manager.allocate_slots = count_slot_call
        scheduler._make_cached_request_data = count_continued_requests
        scheduler.update_from_output = count_appended_tokens

    def _add_and_abort_requests(self) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request, RequestStatus

        for _ in range(self._random.choice((0, 0, 0, 1, 3))):
            self._num_requests += 1
            name = f"r{self._num_requests}"
            # Prompts of a group have the same beginning.
            group_random = random.Random(self._random.randrange(6))
            prompt = [group_random.randrange(3, 64) for _ in range(self._random.randrange(1, 180))]
            params = SamplingParams(
                max_tokens=self._random.randrange(1, 100), stop_token_ids=[STOP], logprobs=0, flat_logprobs=True
            )
            self._states[name] = make_state()
            request = Request(name, prompt, params, None, cache_salt="v0", block_hasher=self._hasher)
            self._scheduler.add_request(request)
        running = [request.request_id for request in self._scheduler.running]
        if self._random.random() < 0.01:
            # Reset the cache as a change of weights that recomputes running requests does. Tokens may be in flight.
            self._scheduler.reset_prefix_cache(reset_running_requests=True)
        if running and self._random.random() < 0.05:
            name = self._random.choice(running)
            del self._states[name]
            self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _sample(self, scheduled: Any) -> Any:
        """Return a token for each request, which depends only on the request and on the token's index."""
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        names = sorted(scheduled.num_scheduled_tokens, reverse=True)
        tokens = []
        log_probs = np.zeros((len(names), 1), np.float32)
        for row, name in enumerate(names):
            if self._scheduler.requests[name].is_prefill_chunk:
                tokens.append([])
                continue
            token_random = random.Random(f"{name} {self._sampled[name]}")
            self._sampled[name] += 1
            tokens.append([STOP if token_random.random() < 0.02 else token_random.randrange(3, 64)])
            log_probs[row] = -token_random.random()
        lists = LogprobsLists(np.zeros((len(names), 1), np.int32), log_probs, np.zeros(len(names), np.int32), None)
        return ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, tokens, lists)

    def _end(self, output: Any) -> tuple[Any, ...]:
        log_probs = self._states.pop(output.request_id).logprobs_processor.logprobs.logprobs
        return output.request_id, output.new_token_ids, log_probs, output.finish_reason


def block_hasher(scheduler: Any) -> Any:
    """Return the function that computes the hashes of a request's full blocks."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    function = get_hash_fn_by_name(scheduler.vllm_config.cache_config.prefix_caching_hash_algo)
    init_none_hash(function)
    return get_request_block_hasher(scheduler.block_size, function)
