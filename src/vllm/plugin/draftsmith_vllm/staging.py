"""A head on its way to the device while the engine steps: file, pinned memory, GPU, on a stream of its own."""

import threading
import time

import torch
from vllm.logger import init_logger

from .head_file import LiveHead, read_head_file

logger = init_logger("vllm.draftsmith.staging")
CHUNK = 8 << 20
ALIGNMENT = 256
# what the load itself and vLLM's next steps may want beside the head
SPARE = 256 << 20


def refuse_without_memory(device: torch.device, needed: int) -> None:
    """Raises ValueError where the GPU lacks so many bytes: vLLM's accounting knows nothing of them."""
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if free < needed + SPARE:
        raise ValueError(
            f"{free >> 20} MiB of GPU memory are free, the head needs {(needed + SPARE) >> 20}: start vLLM with a lower "
            "--gpu-memory-utilization"
        )


class Staging:
    """At most one head at a time. The GPU buffer is kept, since all heads of a server have one size."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._state = "none"  # none, running, ready, failed
        self._path: str | None = None
        self._digest: str | None = None
        self._error: str | None = None
        self._seconds = 0.0
        self._tensors: dict[str, torch.Tensor] | None = None
        self._buffer: torch.Tensor | None = None
        self._chunks: list[torch.Tensor] = []
        self._loaded: torch.cuda.Event | None = None  # after it the buffer may be written again

    def status(self) -> dict:
        with self._lock:
            return {
                "state": self._state,
                "digest": self._digest,
                "error": self._error,
                "seconds": self._seconds,
                "device_bytes": 0 if self._buffer is None else self._buffer.nbytes,
            }

    def start(self, path: str, digest: str, live: LiveHead) -> None:
        with self._lock:
            if self._state == "running":
                raise ValueError(f"head {self._digest} is being staged; ask again when it is done")
            self._state, self._path, self._digest, self._error = "running", path, digest, None
            self._tensors = None
        threading.Thread(target=self._stage, args=(path, digest, live), name="draftsmith-staging", daemon=True).start()

    def take(self, path: str, digest: str | None) -> tuple[dict[str, torch.Tensor], str] | None:
        """The staged head, if it is this one and ready. It is no longer staged then."""
        with self._lock:
            if self._state != "ready" or self._path != path or digest not in (None, self._digest):
                return None
            tensors, self._tensors, self._state = self._tensors, None, "none"
            return tensors, self._digest

    def loaded(self) -> None:
        """The load of what was taken is on the engine's stream."""
        if self._device.type == "cuda":
            self._loaded = torch.cuda.Event()
            self._loaded.record()

    def _stage(self, path: str, digest: str, live: LiveHead) -> None:
        begun = time.perf_counter()
        tensors, error = None, None
        try:
            loaded, _ = read_head_file(path, digest)
            tensors = live.check(loaded)
            if self._device.type == "cuda":
                tensors = self._copy(tensors)
        except Exception as caught:
            logger.exception("head %s was not staged", path)
            error = str(caught)
        with self._lock:
            self._tensors, self._error = tensors, error
            self._state = "ready" if error is None else "failed"
            self._seconds = time.perf_counter() - begun

    def _copy(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        torch.cuda.set_device(self._device)
        offsets, size = {}, 0
        for name, tensor in tensors.items():
            offsets[name] = size
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            if self._buffer is None or self._buffer.nbytes < size:
                # the load makes each layer anew on the GPU before it copies it into place
                refuse_without_memory(self._device, 2 * size)
                self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            if not self._chunks:
                self._chunks = [torch.empty(CHUNK, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
            if self._loaded is not None:
                stream.wait_event(self._loaded)
            free = [torch.cuda.Event(blocking=True) for _ in self._chunks]
            staged, turn = {}, 0
            for name, tensor in tensors.items():
                place = self._buffer[offsets[name] : offsets[name] + tensor.nbytes]
                source = tensor.reshape(-1).view(torch.uint8)
                for begin in range(0, tensor.nbytes, CHUNK):
                    count = min(CHUNK, tensor.nbytes - begin)
                    chunk, event = self._chunks[turn % 2], free[turn % 2]
                    event.synchronize()
                    chunk[:count].copy_(source[begin : begin + count])
                    place[begin : begin + count].copy_(chunk[:count], non_blocking=True)
                    event.record(stream)
                    turn += 1
                staged[name] = place.view(tensor.dtype).view(tensor.shape)
            done = torch.cuda.Event(blocking=True)
            done.record(stream)
        done.synchronize()
        return staged
