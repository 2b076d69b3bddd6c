"""An EAGLE-3 draft model that also keeps the verifier's states which vLLM hands it, by KV slot.

A row is written when its token is computed; a rejected draft's row is overwritten with its slot; a prefix hit finds
the rows of whoever computed that block. So the rows of a finished request are those of its blocks.
"""

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

from .state import TAP


def remember_slot_row(forward_context) -> None:
    """V2 runner: every slot mapping is a view, from its start, of one persistent row."""
    mappings = getattr(forward_context, "slot_mapping", None)
    if TAP.slots is None and isinstance(mappings, dict) and mappings:
        view = next(iter(mappings.values()))
        TAP.slots = torch.as_strided(view, (TAP.step_tokens,), (1,), view.storage_offset())


def scatter(states: torch.Tensor, slots: torch.Tensor) -> None:
    """states [tokens, layers * hidden] to the rows `slots` [tokens]; padding (-1) goes to the null block's slot 0."""
    if slots.shape[0] < states.shape[0]:
        return  # not counted, so the connector refuses to export
    rows = slots[: states.shape[0]].clamp_min(0)
    TAP.buffer.index_copy_(0, rows, states.to(TAP.buffer.dtype))
    TAP.scattered += 1


class TappedEagle3LlamaForCausalLM(Eagle3LlamaForCausalLM):
    _states = None  # V1 runner: held from combine_hidden_states() to forward() of the same step

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if TAP.buffer is not None and hidden_states.dim() == 2:
            TAP.combined += 1
            if not TAP.persistent_slots:
                self._states = hidden_states
            elif TAP.slots is not None:
                # the draft's forward() is not called when a full CUDA graph is replayed; this method always is, and
                # the row still holds the verifier's slots
                scatter(hidden_states, TAP.slots)
        # layers beyond num_aux_hidden_states feed the trainer alone
        return super().combine_hidden_states(hidden_states[..., : self.model.fc_input_size])

    def forward(self, input_ids, positions, hidden_states, inputs_embeds=None):
        if TAP.persistent_slots:
            if TAP.buffer is not None and TAP.slots is None:
                remember_slot_row(get_forward_context())  # while CUDA graphs are captured
        elif self._states is not None:
            states, self._states = self._states, None
            mappings = get_forward_context().slot_mapping
            if isinstance(mappings, dict) and mappings:
                scatter(states, next(iter(mappings.values())))
        return super().forward(input_ids, positions, hidden_states, inputs_embeds)

