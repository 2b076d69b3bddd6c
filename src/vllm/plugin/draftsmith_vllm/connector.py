"""A KV connector that moves no KV: at a request's end it gathers the tapped states and writes them to a file.

kv_connector_extra_config: transfer_dir (required), writer_threads (2), max_pending_bytes (2 GiB: memory of states
not yet written), min_free_bytes (256 MiB of the directory's file system stay free).

The file also says how much was drafted for the request and accepted, as vLLM itself counts it, and for which head.

Nothing is put into the response, and a request fails for nothing that happens here: what cannot be written is
counted and logged.
"""

import hashlib
import json
import os
import threading
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from .state import HEAD, TAP, Drafting, remember_first_head
from .tap import remember_slot_row

try:
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
except ImportError:  # vLLM 0.26 counts for the whole server alone
    RequestSpecDecodeMetrics = None

logger = init_logger("vllm.draftsmith.connector")
FORMAT = "draftsmith-states-1"
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
UNFINISHED = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_IGNORED, RequestStatus.FINISHED_ERROR)


@dataclass
class FinishedRequest:
    request_id: str
    token_ids: list[int]  # prompt and all output ids; the last one was sampled but never computed
    prompt_tokens: int
    block_ids: list[int]
    drafting: Drafting | None  # None: this vLLM does not count per request


@dataclass
class DraftsmithMetadata(KVConnectorMetadata):
    begun: list[str]  # ids of the requests that this step begins, or begins again
    finished: list[FinishedRequest]
    ended: Drafting  # of all requests that ended since the last step, also of those that are not in `finished`


def layer_ids(hf_config) -> list[int]:
    """The captured layers in vLLM's order: sorted, without doubles."""
    ids = getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None)
    if not ids:
        ids = (getattr(hf_config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
    return sorted(set(ids or []))


def file_name(request_id: str) -> str:
    """A client may choose its request id, so the name must not reach outside the directory."""
    name = urllib.parse.quote(request_id, safe="")
    if name.startswith(".") or len(name) > 200:
        name = "id-" + hashlib.sha256(request_id.encode()).hexdigest()
    return name + ".safetensors"


def write_states(directory: str, states: torch.Tensor, token_ids: torch.Tensor, metadata: dict[str, str]) -> int:
    """Writes one safetensors file, mode 0600, under a hidden name, then renames it. Returns its length in bytes.

    No fsync: after a power cut the states are gone or fail their sha256, and can be computed again.
    """
    raw = [memoryview(tensor.view(-1).view(torch.uint8).numpy()) for tensor in (states, token_ids)]
    digest = hashlib.sha256()
    for bytes_ in raw:
        digest.update(bytes_)
    split, end = len(raw[1]), len(raw[0]) + len(raw[1])
    header = json.dumps({
        "__metadata__": {**metadata, "sha256": digest.hexdigest()},
        "token_ids": {"dtype": "I64", "shape": list(token_ids.shape), "data_offsets": [0, split]},
        "hidden_states": {"dtype": DTYPE_NAMES[states.dtype], "shape": list(states.shape), "data_offsets": [split, end]},
    }).encode()
    header += b" " * (-len(header) % 8)
    final = os.path.join(directory, file_name(metadata["request_id"]))
    temporary = os.path.join(directory, "." + os.path.basename(final) + ".tmp")
    descriptor = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(len(header).to_bytes(8, "little"))
            file.write(header)
            file.write(raw[1])
            file.write(raw[0])
        os.rename(temporary, final)
    except BaseException:
        os.unlink(temporary)
        raise
    return 8 + len(header) + end


class DraftsmithConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        speculative = vllm_config.speculative_config
        if speculative is None or speculative.draft_model_config is None:
            raise ValueError("draftsmith's tap needs an EAGLE-3 head: give --speculative-config")
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError("draftsmith's tap does not support pipeline parallelism: set --pipeline-parallel-size 1")
        self._layer_ids = layer_ids(speculative.draft_model_config.hf_config)
        layers = vllm_config.model_config.get_total_num_hidden_layers()
        if not self._layer_ids or self._layer_ids[-1] != layers:
            raise ValueError(
                f"the head's config.json names layer ids {self._layer_ids}; the trainer also needs {layers}, the last "
                "layer: add it to eagle_aux_hidden_state_layer_ids and set num_aux_hidden_states to what the head uses"
            )
        extra = vllm_config.kv_transfer_config.get_from_extra_config
        self._directory = extra("transfer_dir", None)
        if not self._directory:
            raise ValueError("kv_connector_extra_config lacks transfer_dir, the directory that states are written to")
        self._max_pending_bytes = int(extra("max_pending_bytes", 2 << 30))
        self._min_free_bytes = int(extra("min_free_bytes", 256 << 20))
        self._block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        # scheduler side
        # with the flag --per-request-spec-decode-metrics vLLM counts by itself, and tells clients
        self._ask_for_counts = (
            RequestSpecDecodeMetrics is not None
            and vllm_config.observability_config.per_request_spec_decode_metrics == "none"
        )
        self._finished: list[FinishedRequest] = []
        self._ended = Drafting()
        # worker side
        self._executor = ThreadPoolExecutor(int(extra("writer_threads", 2)), thread_name_prefix="draftsmith-states")
        self._lock = threading.Lock()  # guards TAP's counters and _pending_bytes against the writers
        self._pending_bytes = 0
        self._copies: dict[str, object] = {}  # request id to a CUDA event, None where the copy is done
        self._swaps_at_begin: dict[str, int] = {}  # request id to HEAD.swaps when its first step ran
        self._copy_stream = None
        self._counting = False

    # scheduler side

    def on_new_request(self, request):
        """Has vLLM's scheduler count this request's drafts, where it feeds its own counters."""
        if self._ask_for_counts:
            request.spec_decode_metrics = RequestSpecDecodeMetrics.new(self._vllm_config.num_speculative_tokens)

    def _take_drafting(self, request) -> Drafting | None:
        counted = getattr(request, "spec_decode_metrics", None)
        if counted is None:
            return None
        if self._ask_for_counts:
            request.spec_decode_metrics = None  # or it would be put into the response
        accepted = sum(tokens * drafts for tokens, drafts in enumerate(counted.histogram))
        drafting = Drafting(sum(counted.histogram), counted.num_draft_tokens, accepted)
        self._ended.add(drafting)
        return drafting

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        begun = [new.req_id for new in scheduler_output.scheduled_new_reqs]
        metadata = DraftsmithMetadata(begun, self._finished, self._ended)
        self._finished, self._ended = [], Drafting()
        return metadata

    def request_finished(self, request, block_ids):
        """True delays the freeing of the blocks until get_finished() has copied their states."""
        drafting = self._take_drafting(request)
        if request.status in UNFINISHED or request.prompt_token_ids is None:
            return False, None
        token_ids = list(request.all_token_ids)
        if len(token_ids) < 2 or len(token_ids) - 1 > len(block_ids) * self._block_size:
            return False, None
        self._finished.append(
            FinishedRequest(request.request_id, token_ids, request.num_prompt_tokens, list(block_ids), drafting)
        )
        return True, None

    def get_finished_count(self):
        return 1  # rank 0 alone reports

    # worker side

    def register_kv_caches(self, kv_caches):
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        if get_tensor_model_parallel_rank() != 0:
            return
        config = self._vllm_config
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        slots = self._kv_cache_config.num_blocks * self._block_size
        width = len(self._layer_ids) * config.model_config.get_hidden_size()
        device = next(iter(kv_caches.values())).device
        TAP.step_tokens = config.scheduler_config.max_num_batched_tokens
        TAP.persistent_slots = bool(getattr(config, "use_v2_model_runner", False))
        TAP.buffer = torch.zeros((slots, width), dtype=config.model_config.dtype, device=device)
        remember_first_head(config)
        logger.info(
            "tap: layers %s, %d KV slots, %.3f GiB outside vLLM's memory budget, V2 runner %s, to %s",
            self._layer_ids, slots, slots * width * TAP.buffer.element_size() / 2**30, TAP.persistent_slots,
            self._directory,
        )

    def start_load_kv(self, forward_context, **kwargs):
        if TAP.buffer is None:
            return
        if TAP.persistent_slots:
            remember_slot_row(forward_context)  # with --enforce-eager no graph capture has done so
        if not self._counting:
            # warm-up steps have no slots; from the first real step on every one must reach the buffer
            self._counting = True
            TAP.combined = TAP.scattered = 0

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass

    def get_finished(self, finished_req_ids):
        if TAP.buffer is None:
            return None, None
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            TAP.ended.add(metadata.ended)
            for request_id in metadata.begun:
                # one that was preempted may begin again, and then keeps what it began with
                self._swaps_at_begin.setdefault(request_id, HEAD.swaps)
            for finished in metadata.finished:
                self._copies[finished.request_id] = None
                try:
                    self._export(finished)
                except Exception:  # serving comes first
                    logger.exception("states of %s were not exported", finished.request_id)
                    with self._lock:
                        TAP.failed += 1
        for request_id in finished_req_ids:
            self._swaps_at_begin.pop(request_id, None)
        # a request comes in the metadata of the step that also names it in finished_req_ids
        done = {request_id for request_id, copied in self._copies.items() if copied is None or copied.query()}
        for request_id in done:
            del self._copies[request_id]
        return done or None, None

    def _export(self, finished: FinishedRequest) -> None:
        if not TAP.complete():
            with self._lock:
                TAP.refused += 1
                first = TAP.refused == 1
            if first:
                logger.error(
                    "tap: %d steps had states but %d reached the buffer; no states are exported until a restart",
                    TAP.combined, TAP.scattered,
                )
            return
        rows = len(finished.token_ids) - 1
        size = rows * TAP.buffer.shape[1] * TAP.buffer.element_size()
        space = os.statvfs(self._directory)
        free = space.f_bavail * space.f_frsize
        with self._lock:
            fits = self._pending_bytes + size <= self._max_pending_bytes
            fits = fits and free >= size + self._pending_bytes + self._min_free_bytes
            if fits:
                self._pending_bytes += size
            else:
                TAP.dropped += 1
                first = TAP.dropped == 1
        if not fits:
            if first:
                logger.warning(
                    "tap: no room for the states of %s (%d bytes free in %s, %d bytes waiting); counted as dropped",
                    finished.request_id, free, self._directory, self._pending_bytes,
                )
            return
        try:
            states, copied = self._gather(finished.block_ids, rows)
            self._copies[finished.request_id] = copied
            swapped = self._swaps_at_begin.get(finished.request_id) != HEAD.swaps
            self._executor.submit(self._write, finished, states, copied, size, HEAD.digest, swapped)
        except BaseException:
            with self._lock:
                self._pending_bytes -= size
            raise

    def _gather(self, block_ids: list[int], rows: int):
        """Rows of the blocks, on the CPU: [rows, layers, hidden], and the event after which they are there."""
        offsets = torch.arange(self._block_size)
        slots = (torch.tensor(block_ids).unsqueeze(1) * self._block_size + offsets).flatten()[:rows]
        shape = (rows, len(self._layer_ids), -1)
        if not TAP.buffer.is_cuda:
            return TAP.buffer.index_select(0, slots).view(shape), None
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream()
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):
            gathered = TAP.buffer.index_select(0, slots.to(TAP.buffer.device, non_blocking=True))
            states = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            states.copy_(gathered, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._copy_stream)
        return states.view(shape), copied

    def _write(self, finished, states, copied, size, head_digest, swapped) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            metadata = {
                "format": FORMAT,
                "request_id": finished.request_id,
                "layer_ids": json.dumps(self._layer_ids, separators=(",", ":")),
                "prompt_tokens": str(finished.prompt_tokens),
            }
            if head_digest is not None:
                metadata["head_digest"] = head_digest
                metadata["head_swapped"] = str(swapped).lower()  # while the request ran, or just after
            if finished.drafting is not None:
                metadata.update({name: str(count) for name, count in asdict(finished.drafting).items()})
            token_ids = torch.tensor(finished.token_ids, dtype=torch.int64)
            length = write_states(self._directory, states, token_ids, metadata)
        except Exception:
            logger.exception("states of %s were not written to %s", finished.request_id, self._directory)
            with self._lock:
                TAP.failed += 1
                self._pending_bytes -= size
            return
        with self._lock:
            TAP.exported += 1
            TAP.bytes_written += length
            self._pending_bytes -= size

    def shutdown(self):
        self._executor.shutdown(wait=True)
