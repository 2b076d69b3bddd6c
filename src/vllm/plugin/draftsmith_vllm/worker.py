"""--worker-extension-cls draftsmith_vllm.worker.DraftsmithWorker: POST /collective_rpc {"method":"draftsmith_status"}."""

from .state import HEAD, TAP


class DraftsmithWorker:
    def draftsmith_status(self) -> dict:
        return {
            "digest": HEAD.digest,
            "loaded_at": HEAD.loaded_at,
            "swaps": HEAD.swaps,
            "refusals": HEAD.refusals,
            "tap": TAP.counters(),
        }
