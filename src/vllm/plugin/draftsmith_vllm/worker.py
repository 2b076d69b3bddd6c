"""--worker-extension-cls draftsmith_vllm.worker.DraftsmithWorker, for POST /collective_rpc:

{"method": "draftsmith_status"}
{"method": "draftsmith_stage", "args": ["/…/model.safetensors", "<sha256 of the file>"]}
"""

from .state import HEAD, TAP


class DraftsmithWorker:
    def draftsmith_status(self) -> dict:
        staging = getattr(self.weight_transfer_engine, "staging", None)
        return {
            "digest": HEAD.digest,
            "file": HEAD.file,
            "config": HEAD.config,
            "loaded_at": HEAD.loaded_at,
            "swaps": HEAD.swaps,
            "refusals": HEAD.refusals,
            "tap": TAP.status(),
            "staging": None if staging is None else staging.status(),
        }

    def draftsmith_stage(self, path: str, digest: str) -> None:
        """Returns at once; draftsmith_status says when the head is ready to be swapped in."""
        stage = getattr(self.weight_transfer_engine, "stage", None)
        if stage is None:
            raise ValueError('start vLLM with --weight-transfer-config \'{"backend": "draftsmith"}\'')
        stage(self.get_draft_model(), path, digest)
