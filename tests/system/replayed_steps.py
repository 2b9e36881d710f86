"""Engines with shortened steps and without; vLLM's schedulers driven without a model, as a seed has it."""

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
from tests.unit.generation.vllm.fast.test_step_outputs import state

STOP = 1
DEADLINE = 600.0
ROLLOUTS = 48


class WatchedEngine(VllmEngine):
    """Lends its config to schedulers without a model, and tells the state of a cache."""

    def blocks(self) -> dict[str, int]:
        """Count the cache's free blocks, the blocks that other requests can find, and the tokens found."""

        def count() -> dict[str, int]:
            stats = self._scheduler.kv_cache_manager.prefix_cache_stats
            return count_blocks(self._scheduler) | {"found": stats.hits, "asked": stats.queries}

        return self._call_on_thread(count)  # type: ignore[no-any-return]

    def replay(self, ahead: bool, shortened: bool, seed: int) -> "dict[str, Any]":
        """Drive a separate scheduler. ahead: each step is scheduled before the last one's tokens are known."""
        return self._call_on_thread(lambda: Replay(self._scheduler, ahead, shortened, seed).run())  # type: ignore[no-any-return]


def watched(spec: EngineSpec) -> Engine:
    """Build an engine whose steps are shortened, or are vLLM's own, as its spec says."""
    return WatchedEngine(spec, "rlctl.generation.vllm.worker_extension.RefitWorker")


def two_engines(spec: EngineSpec, devices: list[str], logs: Path) -> list[Worker]:
    """Start an engine with shortened steps and one without."""
    made = []
    for name, shortened in (("shortened", True), ("plain", False)):
        own = replace(spec, options={**spec.options, "fast_path": shortened})
        make, log = partial(watched, own), str(logs / f"{name}.log")
        made.append(Worker(WorkerSpec(name, make, environment(spec.device, devices), log, 4)))
    return made


def check_conversations(engines: list[Worker], give_up: bool) -> None:
    """Check that both engines sample the same bits, end in the same way, and leave equal caches."""
    ours, plain = (conversations(engine, give_up) for engine in engines)
    assert {"stop", "length"} == {each.finish for each in ours}
    for one, other in zip(ours, plain, strict=True):
        assert (one.tokens.tolist(), one.finish) == (other.tokens.tolist(), other.finish)
        assert np.array_equal(one.log_probs, other.log_probs)
    (shortened,), (own,) = (engine.start(WatchedEngine.blocks).wait(DEADLINE) for engine in engines)
    # Requests that are given up have made as many steps as time allowed, and leave as many blocks to be found.
    same = ("free",) if give_up else tuple(own)
    assert [shortened[each] for each in same] == [own[each] for each in same] and own["found"] > 500


def check_schedules(engines: list[Worker], ahead: bool) -> None:
    """Check that schedulers with shortened steps and without tell the device the same, step by step. ahead: each step
    is scheduled before the last one's tokens are known."""
    for seed in range(3):
        (ours,), (plain,) = (
            engines[0].start(WatchedEngine.replay, ahead, shortened, seed).wait(DEADLINE) for shortened in (True, False)
        )
        assert ours["preemptions"] == plain["preemptions"] > 0
        for what in ("asked", "scheduled", "appended"):
            assert seed or 4 * ours["left"][what] < plain["left"][what], what
        for number, (one, other) in enumerate(zip(ours["steps"], plain["steps"], strict=True)):
            assert one == other, f"step {number}"


def conversations(engine: Worker, give_up: bool) -> list[Completion]:
    """Sample three turns of each rollout, of lengths that differ. give_up: some end while they run.

    Temperatures differ, and a third samples without the engine's top_p and top_k.
    """
    random, answers = np.random.default_rng(0), list[Completion]()
    prompts = [random.integers(3, 64, random.integers(1, 60)).tolist() for _ in range(ROLLOUTS)]
    longest = random.integers(1, 60, (3, ROLLOUTS)).tolist()
    for number in range(3):
        asked: list[TurnRequest] = []
        for place, prompt in enumerate(prompts):
            warmth = (0.0, 1.0, 0.7, 1.3)[place % 4]
            purpose: Purpose = "train" if place % 3 else "parity"
            one = turn(place, 0, prompt, longest[number][place], warmth, 100 * number + place, purpose)
            asked.append(replace(one, id=RequestId(one.id.rollout, number)))
        given_up = [each.id for each in asked[::8] if give_up]
        kept = [each for each in asked if each.id not in given_up]
        engine.start(Engine.submit, asked).wait(DEADLINE)
        engine.start(Engine.abort, given_up).wait(DEADLINE)
        found = dict(zip((each.id for each in kept), collect_all(engine, kept), strict=True))
        answers += found.values()
        for place, each in enumerate(asked):
            said = found[each.id].tokens.tolist() if each.id in found else []
            # Some histories are rewritten, in the middle or from the first token on.
            kept_from = {1: 1, 2: len(prompts[place]) // 2}.get(place % 12, 0)
            prompts[place] = prompts[place][kept_from:] + said + [3 + place]
    return answers


def told(scheduled: Any) -> tuple[Any, ...]:
    """Return a step's orders to the device, in sequence."""
    cached, new = scheduled.scheduled_cached_reqs, scheduled.scheduled_new_reqs
    assert scheduled.total_num_scheduled_tokens == sum(scheduled.num_scheduled_tokens.values())
    return (
        list(scheduled.num_scheduled_tokens.items()),
        (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens),
        [(each.req_id, each.block_ids, each.num_computed_tokens) for each in new],
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
        # Not even the requests that run fit into some steps.
        self._narrow = seed == 2
        self._depth, self._random = 2 if ahead else 1, random.Random(seed)
        self._sampled, self._states, self._begun = Counter[str](), dict[str, Any](), 0
        self.steps, self.preemptions = list[Any](), 0
        # Work left to vLLM: calls for slots, continued requests, and tokens.
        self._asked = self._scheduled = self._appended = 0
        self._count_what_is_left()
        if shortened:
            StepOutputs(self._scheduler, self._states, NextTokens(self._scheduler))
        else:
            StepOutputs(self._scheduler, self._states)
        self._hasher = block_hasher(like)

    def run(self) -> "dict[str, Any]":
        queue = deque[tuple[Any, Any]]()
        for step in range(600):
            if step < 500:
                self._come_and_go()
            if self._narrow:
                self._scheduler.max_num_scheduled_tokens = self._random.choice((8, 64, 64))
            scheduled = self._scheduler.schedule()
            self.preemptions += len(scheduled.preempted_req_ids or ())
            queue.append((scheduled, self._sample(scheduled)))
            ended = []
            if len(queue) == self._depth:
                outputs = self._scheduler.update_from_output(*queue.popleft()).get(0)
                ended = [self._end(each) for each in outputs.outputs] if outputs else []
            self.steps.append((told(scheduled), ended, count_blocks(self._scheduler)))
        left = {"asked": self._asked, "scheduled": self._scheduled, "appended": self._appended}
        return {"steps": self.steps, "preemptions": self.preemptions, "left": left}

    def _count_what_is_left(self) -> None:
        manager, scheduler = self._scheduler.kv_cache_manager, self._scheduler
        allocate, update = manager.allocate_slots, scheduler.update_from_output
        describe = scheduler._make_cached_request_data

        def asked(*arguments: Any, **named: Any) -> Any:
            self._asked += 1
            return allocate(*arguments, **named)

        def described(running: list[Any], *arguments: Any) -> Any:
            self._scheduled += len(running)
            return describe(running, *arguments)

        def updated(scheduled: Any, sampled: Any) -> Any:
            self._appended += len(scheduled.num_scheduled_tokens)
            return update(scheduled, sampled)

        manager.allocate_slots, scheduler.update_from_output = asked, updated
        scheduler._make_cached_request_data = described

    def _come_and_go(self) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request, RequestStatus

        for _ in range(self._random.choice((0, 0, 0, 1, 3))):
            self._begun += 1
            name, group = f"r{self._begun}", self._random.randrange(6)
            shared = random.Random(group)
            prompt = [shared.randrange(3, 64) for _ in range(self._random.randrange(1, 180))]
            params = SamplingParams(
                max_tokens=self._random.randrange(1, 100), stop_token_ids=[STOP], logprobs=0, flat_logprobs=True
            )
            self._states[name] = state()
            request = Request(name, prompt, params, None, cache_salt="v0", block_hasher=self._hasher)
            self._scheduler.add_request(request)
        running = [each.request_id for each in self._scheduler.running]
        if self._random.random() < 0.01:
            # As a change of weights that recomputes running requests; tokens may be in flight.
            self._scheduler.reset_prefix_cache(reset_running_requests=True)
        if running and self._random.random() < 0.05:
            name = self._random.choice(running)
            del self._states[name]
            self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _sample(self, scheduled: Any) -> Any:
        """Return a token of each request, the same for its so-manieth in every replay."""
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        names = sorted(scheduled.num_scheduled_tokens, reverse=True)
        tokens, log_probs = [], np.zeros((len(names), 1), np.float32)
        for row, name in enumerate(names):
            if self._scheduler.requests[name].is_prefill_chunk:
                tokens.append([])
                continue
            own = random.Random(f"{name} {self._sampled[name]}")
            self._sampled[name] += 1
            tokens.append([STOP if own.random() < 0.02 else own.randrange(3, 64)])
            log_probs[row] = -own.random()
        lists = LogprobsLists(np.zeros((len(names), 1), np.int32), log_probs, np.zeros(len(names), np.int32), None)
        return ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, tokens, lists)

    def _end(self, output: Any) -> tuple[Any, ...]:
        kept = self._states.pop(output.request_id).logprobs_processor.logprobs.logprobs
        return output.request_id, output.new_token_ids, kept, output.finish_reason


def block_hasher(scheduler: Any) -> Any:
    """Return the function that names the full blocks of a request."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    function = get_hash_fn_by_name(scheduler.vllm_config.cache_config.prefix_caching_hash_algo)
    init_none_hash(function)
    return get_request_block_hasher(scheduler.block_size, function)
