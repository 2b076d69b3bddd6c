"""vLLM's own hidden-states connector on a machine without a GPU.

vLLM 0.32 copies through a CUDA stream even on CPU, and dies at the first request. Only that copy is replaced here: the
lock, the path, the rows and the file are vLLM's.
"""

import os

from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)

import torch


class Done:
    """Stands for a CUDA event that has come to pass."""

    def query(self):
        return True

    def synchronize(self):
        pass


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending):
        size = self._block_size
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks.reshape(-1, 1) * size + torch.arange(size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": states.contiguous().clone(), "token_ids": pending.token_ids.clone()}
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id)
        done = Done()
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = self._executor.submit(
            self._write_tensors, tensors, done, pending.filename, lock)
        self._req_futures[pending.req_id].add_done_callback(lambda future: self._on_write_done(pending.req_id, future))
