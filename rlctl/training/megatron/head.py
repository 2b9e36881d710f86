"""From the last stage's hidden states to log-probs: a rank has part of the tokens and words, and all the result."""

from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from rlctl.config.schema import TrainerSection
from rlctl.training.logprobs import Split, chunked_log_probs
from rlctl.training.megatron.inputs import Inputs
from rlctl.training.megatron.model import MegatronPolicy
from rlctl.training.packing import Packed


class Head:
    """log-probs and entropy under the tempered policy."""

    def __init__(self, policy: MegatronPolicy, section: TrainerSection, temperature: float) -> None:
        self._policy, self._section, self._temperature = policy, section, temperature
        self._context = parallel_state.get_context_parallel_group()

    def __call__(self, hidden: Tensor, given: Inputs, packed: Packed, rows: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [T] each, 0 but at `rows` (int64, each after its sequence's first); equal on all ranks of the stage.

        hidden: [t or its sequence part, 1, hidden], of this rank's tokens.
        """
        mine = rows[(rows > given.first) & (rows <= given.first + len(given.tokens))]
        weight = self._policy.head()
        log_probs, entropy = chunked_log_probs(
            self._whole(hidden).index_select(0, mine - 1 - given.first),
            weight,
            packed.tokens[mine],
            self._temperature,
            self._section.logprob_chunk_tokens,
            compiled=self._section.compile,
            split=self._split(weight),
        )
        return self._placed(log_probs, packed, mine), self._placed(entropy, packed, mine)

    def _whole(self, hidden: Tensor) -> Tensor:
        """[t, hidden]; its gradient is summed over the tensor-parallel ranks.

        Reshaped before and not after: Megatron loses the sum of a gradient that is not contiguous.
        """
        flat = hidden.reshape(-1, hidden.shape[-1])
        if self._policy.config.sequence_parallel:
            whole: Tensor = gather_from_sequence_parallel_region(flat)
        else:
            whole = copy_to_tensor_model_parallel_region(flat)
        return whole

    def _split(self, weight: Tensor) -> Split | None:
        if parallel_state.get_tensor_model_parallel_world_size() == 1:
            return None
        first = parallel_state.get_tensor_model_parallel_rank() * len(weight)
        return Split(parallel_state.get_tensor_model_parallel_group(), first)

    def _placed(self, values: Tensor, packed: Packed, rows: Tensor) -> Tensor:
        """In the whole pack; each rank's gradient is that of its own rows."""
        whole = values.new_zeros(len(packed.tokens)).index_copy(0, rows, values)
        placed: Tensor = reduce_from_tensor_model_parallel_region(whole, group=self._context)
        return placed
