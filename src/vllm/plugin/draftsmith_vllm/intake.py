"""The way of a step's rows from the engine to the row store, and the order of all that happens to the store.

On CUDA a step's rows are copied aside on the GPU, from there into a ring of a few steps' rows in pinned host memory on a
side stream, and from there to their place in the store by a thread. On the CPU the first two are one copy. The engine's
thread waits for none of this: where the ring is full, the step counts as overrun. Its stream waits for the copy of the
step before, which had a whole step's time for it.
"""

import queue
import threading
from collections.abc import Callable

import numpy as np
import torch
from vllm.logger import init_logger

from .rows import RowStore, SegmentRing, StepGuard
from .state import Counters

logger = init_logger("vllm.draftsmith.intake")


class StepBuffers:
    """Rows [.., width] and slots of one step on the GPU, and of the last few steps in pinned host memory.

    Made with the draft model, before vLLM measures what is left for the KV cache.
    """

    def __init__(
        self, step_rows: int, waiting_steps: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._step_rows = step_rows
        rows = step_rows * waiting_steps
        self._ring = SegmentRing(rows)
        self._ring_lock = threading.Lock()
        self._cuda = device.type == "cuda"
        self.host_rows = torch.empty((rows, width), dtype=dtype, device="cpu", pin_memory=self._cuda)
        self.host_slots = torch.empty(rows, dtype=torch.int64, device="cpu", pin_memory=self._cuda)
        if self._cuda:
            self._device_rows = torch.empty((step_rows, width), dtype=dtype, device=device)
            self._device_slots = torch.empty(step_rows, dtype=torch.int64, device=device)
            self._stream = torch.cuda.Stream(device)
            self._arrived: torch.cuda.Event | None = None  # after it the GPU's part may be written again

    def device_bytes(self) -> int:
        return self._device_rows.nbytes + self._device_slots.nbytes if self._cuda else 0

    def host_bytes(self) -> int:
        return self.host_rows.nbytes + self.host_slots.nbytes

    def take(self, count: int) -> int | None:
        """The first of `count` rows of the ring, for start_copy(); None where there is no room."""
        if count > self._step_rows:
            return None
        with self._ring_lock:
            return self._ring.take(count)

    def give_back(self) -> None:
        """The rows that were taken first are in the store."""
        with self._ring_lock:
            self._ring.give_back()

    def start_copy(self, begin: int, states: torch.Tensor, slots: torch.Tensor) -> torch.cuda.Event | None:
        """Copies to the ring's rows from `begin` on; the event says when the host has them, None: now."""
        count = states.shape[0]
        part = slice(begin, begin + count)
        if not self._cuda:
            self.host_rows[part].copy_(states)
            self.host_slots[part].copy_(slots)
            return None
        # on the engine's own stream, since it overwrites both soon
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
        self._device_rows[:count].copy_(states)
        self._device_slots[:count].copy_(slots)
        taken = torch.cuda.Event()
        taken.record()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(taken)
            self.host_rows[part].copy_(self._device_rows[:count], non_blocking=True)
            self.host_slots[part].copy_(self._device_slots[:count], non_blocking=True)
            # blocking: the thread that waits for it sleeps
            self._arrived = torch.cuda.Event(blocking=True)
            self._arrived.record(self._stream)
        return self._arrived


def as_bytes(rows: torch.Tensor) -> np.ndarray:
    """[n, width] of any type as [n, bytes], the same memory."""
    return rows.view(torch.uint8).numpy()


class Intake:
    def __init__(self, store: RowStore, buffers: StepBuffers, counters: Counters, fewer_rows: bool) -> None:
        self.store = store
        self.guard = StepGuard()
        self._buffers = buffers
        self._counters = counters
        self._fewer_rows = fewer_rows
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="draftsmith-intake", daemon=True)
        self._thread.start()

    def host_bytes(self) -> int:
        return self.store.bytes + self._buffers.host_bytes()

    def submit(self, job: Callable[[], None]) -> None:
        """Runs the job after all that was submitted before it, so after the rows of all steps before it. Only jobs touch
        the store."""
        self._jobs.put(job)

    def begin_step(self, tokens: int) -> None:
        """The engine begins a step of so many tokens."""
        if self.guard.begin(tokens):
            return
        self._counters.add(missed_steps=1)
        if self._counters.missed_steps == 1:
            logger.error(
                "tap: vLLM ran a step without handing over its states (a request near the draft model's maximum length "
                "has this effect); requests that ran are not exported; counted as missed_steps"
            )
        self.submit(self.store.forget_all)

    def take_step(self, states: torch.Tensor, slots: torch.Tensor) -> None:
        """states [rows, width] of the running step, slots [>= rows]; ignored where none runs (warm-up, graph capture)."""
        if slots.shape[0] < states.shape[0]:
            return  # the guard will tell
        count = self.guard.take(states.shape[0], self._fewer_rows)
        if count == 0:
            return
        states, slots = states[:count], slots[:count]
        begin = self._buffers.take(count)
        if begin is None:
            self._counters.add(overrun_steps=1)
            if self._counters.overrun_steps == 1:
                logger.error(
                    "tap: no room for a step's %d rows, the host is behind the engine; requests that run are not "
                    "exported; counted as overrun_steps", count,
                )
            self.submit(self.store.forget_all)
            return
        arrived = self._buffers.start_copy(begin, states, slots)
        self.submit(lambda: self._store_step(begin, count, arrived))

    def _store_step(self, begin: int, count: int, arrived: torch.cuda.Event | None) -> None:
        try:
            if arrived is not None:
                arrived.synchronize()
            part = slice(begin, begin + count)
            self.store.write(self._buffers.host_slots[part].numpy(), as_bytes(self._buffers.host_rows[part]))
        except BaseException:
            self.store.forget_all()
            raise
        finally:
            self._buffers.give_back()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # serving comes first
                logger.exception("tap: a job failed")
                self._counters.add(failed=1)

    def shutdown(self) -> None:
        self._jobs.put(None)
        self._thread.join()
