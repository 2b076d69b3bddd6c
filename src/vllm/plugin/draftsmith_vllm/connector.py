"""A KV connector that moves no KV: it tells the tap which request has which KV blocks, and at a request's end writes its
states to a file.

Rows of a prefix that an earlier file has are left out; a file of the collector's own, RESEND, has them come again. The file
also says how much was drafted for the request and accepted, as vLLM itself counts it, and for which head.

Nothing is put into the response, no block is kept from being freed, and a request fails for nothing that happens here: what
cannot be exported is counted and logged. config.py says what can be set.
"""

import hashlib
import json
import os
import threading
import urllib.parse
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from .config import check_modes, layer_ids, read_tap_config
from .intake import Intake
from .rows import Loan, RowStore
from .salt import other_inputs, prefix_salt
from .state import HEAD, TAP, Drafting, remember_first_head

try:
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
except ImportError:  # vLLM 0.26 counts for the whole server alone
    RequestSpecDecodeMetrics = None

logger = init_logger("vllm.draftsmith.connector")
FORMAT = "draftsmith-states-2"
# whoever collects files replaces this one in transfer_dir where it lacks rows that count as exported
RESEND = ".resend"
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
UNFINISHED = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_IGNORED, RequestStatus.FINISHED_ERROR)


@dataclass
class FinishedRequest:
    request_id: str
    token_ids: list[int]  # prompt and all output ids; the last one was sampled but never computed
    prompt_tokens: int
    block_ids: list[int]
    prefix_salt: str
    whole: bool  # nothing of it is left out, and nothing is left out for it
    drafting: Drafting | None  # None: this vLLM does not count per request


@dataclass
class DraftsmithMetadata(KVConnectorMetadata):
    tokens: int  # of this step; 0: the model does not run
    begun: list[str]  # ids of the requests that this step begins
    held: dict[str, list[int]]  # requests that are to be exported to the KV blocks that they got for this step
    finished: list[FinishedRequest]
    gone: list[str]  # requests that ended, or lost their blocks, and are not exported for now
    incomplete: int  # requests that vLLM took the blocks from just before they ended
    not_sampled: int
    ended: Drafting  # of all requests that ended since the last step, also of those that are not in `finished`


def file_name(request_id: str) -> str:
    """A client may choose its request id, so the name must not reach outside the directory."""
    name = urllib.parse.quote(request_id, safe="")
    if name.startswith(".") or len(name) > 200:
        name = "id-" + hashlib.sha256(request_id.encode()).hexdigest()
    return name + ".safetensors"


def is_sampled(request_id: str, rate: float) -> bool:
    """The same answer whenever it is asked; vLLM's ids end in random digits."""
    return zlib.crc32(request_id.encode()) < rate * 2**32


@dataclass
class States:
    """What a file holds."""

    rows: Loan
    dtype: str
    shape: list[int]  # rows, layers, hidden
    token_ids: list[int]  # all of the request, one more than its rows


def write_states(directory: str, states: States, metadata: dict[str, str]) -> int:
    """Writes one safetensors file, mode 0600, under a hidden name, then renames it. Returns its length in bytes.

    No fsync: after a power cut the states are gone or fail their sha256, and can be computed again.
    """
    ids = np.array(states.token_ids, dtype="<i8")
    raw_ids = memoryview(ids).cast("B")
    digest = hashlib.sha256()
    for piece in states.rows.pieces:
        digest.update(piece)
    digest.update(raw_ids)
    split = len(raw_ids)
    end = split + states.rows.bytes
    header = json.dumps({
        "__metadata__": {**metadata, "sha256": digest.hexdigest()},
        "token_ids": {"dtype": "I64", "shape": list(ids.shape), "data_offsets": [0, split]},
        "hidden_states": {"dtype": states.dtype, "shape": states.shape, "data_offsets": [split, end]},
    }).encode()
    header += b" " * (-len(header) % 8)
    final = os.path.join(directory, file_name(metadata["request_id"]))
    temporary = os.path.join(directory, "." + os.path.basename(final) + ".tmp")
    descriptor = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(len(header).to_bytes(8, "little"))
            file.write(header)
            file.write(raw_ids)
            for piece in states.rows.pieces:
                file.write(piece)
        os.rename(temporary, final)
    except BaseException:
        os.unlink(temporary)
        raise
    return 8 + len(header) + end


class DraftsmithConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_modes(vllm_config, kv_cache_config)
        self._config = read_tap_config(vllm_config)
        self._layer_ids = layer_ids(vllm_config.speculative_config.draft_model_config.hf_config)
        self._block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        # scheduler side
        # with the flag --per-request-spec-decode-metrics vLLM counts by itself, and tells clients
        self._ask_for_counts = (
            RequestSpecDecodeMetrics is not None
            and vllm_config.observability_config.per_request_spec_decode_metrics == "none"
        )
        self._next = self._empty_metadata()
        # worker side
        self._executor = ThreadPoolExecutor(int(self._config.writer_threads), thread_name_prefix="draftsmith-states")
        self._lock = threading.Lock()  # guards _pending_bytes
        self._pending_bytes = 0  # of files on their way to the disk
        self._swaps_at_begin: dict[str, int] = {}  # request id to HEAD.swaps when its first step ran
        self._resend_seen: tuple[int, int] | None = None  # what RESEND was when it was last looked at

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a request that is preempted as it ends is not computed again for the states' sake

    # scheduler side

    @staticmethod
    def _empty_metadata() -> DraftsmithMetadata:
        return DraftsmithMetadata(0, [], {}, [], [], 0, 0, Drafting())

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
        self._next.ended.add(drafting)
        return drafting

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        metadata, self._next = self._next, self._empty_metadata()
        metadata.tokens = scheduler_output.total_num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            metadata.begun.append(new.req_id)
            metadata.gone.append(new.req_id)  # it may have been preempted, and then has other blocks now
            metadata.held[new.req_id] = list(new.block_ids[0])
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids):
            if request_id in cached.resumed_req_ids:
                metadata.gone.append(request_id)
            if block_ids is not None:
                metadata.held[request_id] = list(block_ids[0])
        for request_id in list(metadata.held):
            if not is_sampled(request_id, self._config.sample_rate):
                del metadata.held[request_id]
        return metadata

    def request_finished(self, request, block_ids):
        """vLLM frees the blocks at once: the rows are on the host, and are read before the next step's are written."""
        drafting = self._take_drafting(request)
        token_ids = list(request.all_token_ids)
        usable = request.status not in UNFINISHED and request.prompt_token_ids is not None and len(token_ids) >= 2
        sampled = is_sampled(request.request_id, self._config.sample_rate)
        covered = len(token_ids) - 1 <= len(block_ids) * self._block_size
        if usable and sampled and covered:
            inputs = other_inputs(request)
            self._next.finished.append(
                FinishedRequest(
                    request.request_id,
                    token_ids,
                    request.num_prompt_tokens,
                    list(block_ids),
                    prefix_salt(request, inputs),
                    # vLLM shares the blocks before its first image with requests of another salt
                    whole=bool(inputs),
                    drafting=drafting,
                )
            )
        else:
            self._next.gone.append(request.request_id)
            self._next.not_sampled += usable and not sampled
            self._next.incomplete += usable and sampled
        return False, None

    # worker side

    def register_kv_caches(self, kv_caches):
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        if get_tensor_model_parallel_rank() != 0:
            return  # all ranks have the same states
        config = self._vllm_config
        dtype = config.model_config.dtype
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"draftsmith's tap does not support --dtype {dtype}")
        os.makedirs(self._config.transfer_dir, mode=0o700, exist_ok=True)
        row_bytes = len(self._layer_ids) * config.model_config.get_hidden_size() * dtype.itemsize
        store = RowStore(self._kv_cache_config.num_blocks, self._block_size, row_bytes, int(self._config.host_bytes))
        if TAP.step_buffers is None:
            raise ValueError("draftsmith's tap needs its own draft model class: is the plugin in VLLM_PLUGINS?")
        if next(iter(kv_caches.values())).is_cuda:
            store.touch_memory()
        TAP.step_tokens = config.scheduler_config.max_num_batched_tokens
        TAP.persistent_slots = bool(getattr(config, "use_v2_model_runner", False))
        fewer_rows = bool(getattr(config.speculative_config, "disable_padded_drafter_batch", False))
        TAP.intake = Intake(store, TAP.step_buffers, TAP.counters, fewer_rows)
        remember_first_head(config)
        logger.info(
            "tap: layers %s to %s, sample rate %s; %.3f GiB of host memory, rows of %d tokens (the KV cache holds %d); "
            "%.3f GiB on the GPU, in vLLM's accounting; V2 runner %s",
            self._layer_ids, self._config.transfer_dir, self._config.sample_rate, TAP.intake.host_bytes() / 2**30,
            store.capacity * self._block_size, self._kv_cache_config.num_blocks * self._block_size,
            TAP.step_buffers.device_bytes() / 2**30, TAP.persistent_slots,
        )

    def bind_connector_metadata(self, connector_metadata):
        """Comes before the step's forward pass, in each runner: so what ended is read before its blocks are overwritten."""
        super().bind_connector_metadata(connector_metadata)
        if TAP.intake is None:
            return
        TAP.intake.begin_step(connector_metadata.tokens)
        TAP.ended.add(connector_metadata.ended)
        TAP.counters.add(not_sampled=connector_metadata.not_sampled, incomplete=connector_metadata.incomplete)
        for request_id in connector_metadata.begun:
            # one that was preempted may begin again, and then keeps what it began with
            self._swaps_at_begin.setdefault(request_id, HEAD.swaps)
        for finished in connector_metadata.finished:
            swapped = self._swaps_at_begin.get(finished.request_id) != HEAD.swaps
            TAP.intake.submit(partial(self._export, finished, HEAD.digest, swapped))
        if connector_metadata.gone or connector_metadata.held:
            TAP.intake.submit(partial(self._change_holds, connector_metadata.gone, connector_metadata.held))

    def _change_holds(self, gone: list[str], held: dict[str, list[int]]) -> None:
        store = TAP.intake.store
        for request_id in gone:
            # one that was preempted is in `held`, too, and may have room now
            store.end(request_id)
        for request_id, blocks in held.items():
            store.hold(request_id, blocks)

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass

    def get_finished(self, finished_req_ids):
        for request_id in finished_req_ids:
            self._swaps_at_begin.pop(request_id, None)
        return None, None

    def _export(self, finished: FinishedRequest, head_digest: str | None, swapped: bool) -> None:
        """Finds the rows, and leaves the writing to another thread. Runs in the store's order of events."""
        store = TAP.intake.store
        if store.end(finished.request_id):
            TAP.counters.add(over_budget=1)
            return
        resend = self._look_at_resend()
        if resend != self._resend_seen:
            self._resend_seen = resend
            store.forget_exports()
        count = len(finished.token_ids) - 1
        loan = store.lend(finished.block_ids, count, finished.whole)
        if loan is None:
            TAP.counters.add(incomplete=1)
            return
        if not self._reserve(finished.request_id, loan.bytes):
            store.take_back(loan)
            return
        model = self._vllm_config.model_config
        shape = [count - loan.first_row, len(self._layer_ids), model.get_hidden_size()]
        states = States(loan, DTYPE_NAMES[model.dtype], shape, finished.token_ids)
        try:
            self._executor.submit(self._write, finished, states, head_digest, swapped)
        except BaseException:
            with self._lock:
                self._pending_bytes -= loan.bytes
            store.take_back(loan)  # or its rows could never be overwritten
            raise

    def _look_at_resend(self) -> tuple[int, int] | None:
        """Changes when the file is replaced; None: there is none."""
        try:
            found = os.lstat(os.path.join(self._config.transfer_dir, RESEND))
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _reserve(self, request_id: str, size: int) -> bool:
        """Room on disk for a file of so many bytes."""
        directory = self._config.transfer_dir
        try:
            space = os.statvfs(directory)
            free = space.f_bavail * space.f_frsize
        except OSError:  # the directory is being made anew, say
            free = -1
        with self._lock:
            pending = self._pending_bytes
            fits = free >= size + pending + self._config.min_free_bytes
            if fits:
                self._pending_bytes += size
        if fits:
            return True
        TAP.counters.add(dropped=1)
        if TAP.counters.dropped == 1:
            logger.warning(
                "tap: no room for the states of %s (%d bytes free in %s, %d bytes waiting); counted as dropped",
                request_id, free, directory, pending,
            )
        return False

    def _write(self, finished: FinishedRequest, states: States, head_digest: str | None, swapped: bool) -> None:
        published = False
        try:
            metadata = {
                "format": FORMAT,
                "request_id": finished.request_id,
                "layer_ids": json.dumps(self._layer_ids, separators=(",", ":")),
                "prompt_tokens": str(finished.prompt_tokens),
                "first_row": str(states.rows.first_row),
                "prefix_salt": finished.prefix_salt,
            }
            if head_digest is not None:
                metadata["head_digest"] = head_digest
                metadata["head_swapped"] = str(swapped).lower()  # while the request ran, or just after
            if finished.drafting is not None:
                metadata.update({name: str(count) for name, count in asdict(finished.drafting).items()})
            length = write_states(self._config.transfer_dir, states, metadata)
            published = True
            TAP.counters.add(exported=1, bytes_written=length, skipped_rows=states.rows.first_row)
        except Exception:
            logger.exception("states of %s were not written to %s", finished.request_id, self._config.transfer_dir)
            TAP.counters.add(failed=1)
        finally:
            with self._lock:
                self._pending_bytes -= states.rows.bytes
            exported = published and not finished.whole
            TAP.intake.submit(partial(TAP.intake.store.take_back, states.rows, exported))

    def shutdown(self):
        if TAP.intake is not None:
            TAP.intake.shutdown()
        self._executor.shutdown(wait=True)
