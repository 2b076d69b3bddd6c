"""A weight-transfer engine whose transport is a safetensors file that the worker can open.

POST /update_weights {"update_info": {"path": "/…/model.safetensors", "digest": "<sha256 of the file, optional>"}}

The head is loaded inside the one call, between two engine steps, so no /pause is needed. Every check comes before the first
weight is touched: a refused file (ValueError) leaves the live head as it was. A file that was staged before (staging.py,
worker.py) is read, checked and on the GPU by then, so the engine stands still for the load alone.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from .head_file import LiveHead, read_head_file
from .staging import Staging, refuse_without_memory
from .state import HEAD, remember_first_head

try:
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
except ImportError:  # vLLM 0.26 has no such check
    disable_mtp_completeness_check = nullcontext

logger = init_logger("vllm.draftsmith.engine")


@dataclass
class DraftsmithInitInfo(WeightTransferInitInfo):
    pass


@dataclass
class DraftsmithUpdateInfo(WeightTransferUpdateInfo):
    path: str
    digest: str | None = None


class DraftsmithEngine(WeightTransferEngine[DraftsmithInitInfo, DraftsmithUpdateInfo]):
    init_info_cls = DraftsmithInitInfo
    update_info_cls = DraftsmithUpdateInfo
    supports_draft_weight_update = True

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.staging = Staging(self.device)
        remember_first_head(self.vllm_config)

    def init_transfer_engine(self, init_info) -> None:
        pass

    def start_weight_update(self) -> None:
        if self.model is self._default_model:
            raise ValueError("draftsmith swaps draft heads alone: call /start_draft_weight_update")

    def stage(self, draft: torch.nn.Module, path: str, digest: str) -> None:
        """Begins to read, check and copy a head to the device in a thread; staging.status() tells how it goes."""
        self.staging.start(path, digest, self._live_head(draft))

    def receive_weights(self, update_info: DraftsmithUpdateInfo) -> None:
        begun = time.perf_counter()
        staged = self.staging.take(update_info.path, update_info.digest)
        try:
            if staged is None:
                live = self._live_head(self.model)
                loaded, digest = read_head_file(update_info.path, update_info.digest)
                tensors = live.check(loaded)
                refuse_without_memory(self.device, sum(tensor.nbytes for tensor in tensors.values()))
            else:
                tensors, digest = staged
        except BaseException:
            HEAD.refusals += 1
            raise
        read = time.perf_counter()
        # until the load is through, nobody can say which head is live
        HEAD.digest, HEAD.file = None, None
        initialize_layerwise_reload(self.model)
        try:
            with disable_mtp_completeness_check():
                self.model.load_weights(iter(tensors.items()))
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        self.staging.loaded()
        HEAD.digest, HEAD.file, HEAD.loaded_at = digest, update_info.path, time.time()
        HEAD.swaps += 1
        logger.info("head %s live: %s in %.3f s, loaded in %.3f s", digest[:12],
                    "read and checked" if staged is None else "taken as staged", read - begun,
                    time.perf_counter() - read)

    def _live_head(self, draft: torch.nn.Module) -> LiveHead:
        return LiveHead.of(draft, self._default_model, self.vllm_config.model_config.get_vocab_size())

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator, trainer_args):  # abstract in vLLM 0.26
        raise NotImplementedError("draftsmith writes a file and posts its path")
