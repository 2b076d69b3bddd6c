"""An EAGLE-3 draft model that also gives the verifier's states, which vLLM hands it, to the tap, with their KV slots."""

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

from .config import WAITING_STEPS, is_tapped, layer_ids
from .intake import StepBuffers
from .state import TAP


def context_slots() -> torch.Tensor | None:
    """The slots that the running forward pass writes: of any layer, since all share one KV cache group."""
    mappings = getattr(get_forward_context(), "slot_mapping", None)
    return next(iter(mappings.values())) if isinstance(mappings, dict) and mappings else None


class TappedEagle3LlamaForCausalLM(Eagle3LlamaForCausalLM):
    _states = None  # held from combine_hidden_states() to forward() of the same step

    def __init__(self, *, vllm_config, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if is_tapped(vllm_config) and get_tensor_model_parallel_rank() == 0:
            width = len(layer_ids(self.config)) * vllm_config.model_config.get_hidden_size()
            device = next(self.parameters()).device
            step_rows = vllm_config.scheduler_config.max_num_batched_tokens
            TAP.step_buffers = StepBuffers(step_rows, WAITING_STEPS, width, vllm_config.model_config.dtype, device)

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if TAP.intake is not None and hidden_states.dim() == 2:
            if TAP.slot_row is None:
                self._states = hidden_states
            else:
                # V2 runner: forward() is not called where a full CUDA graph is replayed; this method always is, and
                # the row still holds the verifier's slots
                TAP.intake.take_step(hidden_states, TAP.slot_row)
        # layers beyond num_aux_hidden_states feed the trainer alone
        return super().combine_hidden_states(hidden_states[..., : self.model.fc_input_size])

    def forward(self, input_ids, positions, hidden_states, inputs_embeds=None):
        if TAP.intake is not None:
            self._take_slots()
        return super().forward(input_ids, positions, hidden_states, inputs_embeds)

    def _take_slots(self) -> None:
        slots = context_slots()
        if slots is None:
            return
        states, self._states = self._states, None
        if states is not None:
            TAP.intake.take_step(states, slots)
        if TAP.persistent_slots and TAP.slot_row is None:
            # every slot mapping of this runner is a view, from its start, of one row; known from CUDA graph capture on
            TAP.slot_row = torch.as_strided(slots, (TAP.step_tokens,), (1,), slots.storage_offset())
