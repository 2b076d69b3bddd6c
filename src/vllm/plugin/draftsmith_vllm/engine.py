"""A weight-transfer engine whose transport is a safetensors file that the worker can open.

POST /update_weights {"update_info": {"path": "/…/model.safetensors", "digest": "<sha256 of the file, optional>"}}

Read, check and load happen inside the one call, between two engine steps, so no /pause is needed. Every check comes
before the first weight is touched: a refused file (ValueError) leaves the live head as it was.
"""

import hashlib
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from safetensors.torch import load as load_safetensors
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from .state import HEAD, remember_first_head

try:
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
except ImportError:  # vLLM 0.26 has no such check
    disable_mtp_completeness_check = nullcontext

logger = init_logger("vllm.draftsmith.engine")
# in the file: in the model
FUSED = {
    "self_attn.q_proj": "self_attn.qkv_proj",
    "self_attn.k_proj": "self_attn.qkv_proj",
    "self_attn.v_proj": "self_attn.qkv_proj",
    "mlp.gate_proj": "mlp.gate_up_proj",
    "mlp.up_proj": "mlp.gate_up_proj",
}


@dataclass
class DraftsmithInitInfo(WeightTransferInitInfo):
    pass


@dataclass
class DraftsmithUpdateInfo(WeightTransferUpdateInfo):
    path: str
    digest: str | None = None


def expected_shapes(config, target_vocab: int) -> dict[str, list[int]]:
    """Names (with `layers.0.`) and shapes of a whole head of this configuration, without embed_tokens."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_rows = (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    eagle = getattr(config, "eagle_config", None) or {}
    states = getattr(config, "num_aux_hidden_states", None)
    if states is None:
        states = len(eagle.get("eagle_aux_hidden_state_layer_ids") or []) or 3
    target_hidden = getattr(config, "target_hidden_size", None) or hidden
    draft_vocab = getattr(config, "draft_vocab_size", None) or target_vocab
    shapes = {
        "fc.weight": [hidden, states * target_hidden],
        "layers.0.hidden_norm.weight": [hidden],
        "layers.0.input_layernorm.weight": [hidden],
        "layers.0.post_attention_layernorm.weight": [hidden],
        "layers.0.self_attn.q_proj.weight": [heads * head_dim, 2 * hidden],
        "layers.0.self_attn.k_proj.weight": [kv_rows, 2 * hidden],
        "layers.0.self_attn.v_proj.weight": [kv_rows, 2 * hidden],
        "layers.0.self_attn.o_proj.weight": [hidden, heads * head_dim],
        "layers.0.mlp.gate_proj.weight": [inner, hidden],
        "layers.0.mlp.up_proj.weight": [inner, hidden],
        "layers.0.mlp.down_proj.weight": [hidden, inner],
        "norm.weight": [hidden],
        "lm_head.weight": [draft_vocab, hidden],
    }
    if getattr(config, "fc_norm", False):
        for state in range(states):
            shapes[f"fc_norm.{state}.weight"] = [target_hidden]
    if eagle.get("norm_before_fc", getattr(config, "norm_before_fc", False)):
        shapes["input_norm.weight"] = [states * target_hidden]
    if draft_vocab != target_vocab:
        shapes["d2t"] = [draft_vocab]
    return shapes


def model_name(name: str) -> str:
    """The live parameter that a tensor of the file is loaded into."""
    if name == "d2t":
        return "draft_id_to_target_id"
    for part, fused in FUSED.items():
        name = name.replace(part, fused)
    return name if name.startswith("lm_head.") else "model." + name


def check_head(tensors: dict[str, torch.Tensor], shapes: dict[str, list[int]], target_vocab: int) -> None:
    """Raises ValueError naming the first tensor that does not fit, and the difference."""
    for name in sorted(shapes.keys() - tensors.keys()):
        raise ValueError(f"{name}: missing from the file; the live head needs it with shape {shapes[name]}")
    for name, tensor in tensors.items():
        if name == "t2d":
            if tensor.dtype != torch.bool or list(tensor.shape) != [target_vocab]:
                raise ValueError(
                    f"t2d: the file has {tensor.dtype} {list(tensor.shape)}, the verifier needs torch.bool [{target_vocab}]"
                )
            continue
        if name not in shapes:
            raise ValueError(f"{name}: the live head has no such tensor; train the head with the live head's config.json")
        if list(tensor.shape) != shapes[name]:
            raise ValueError(f"{name}: the file has shape {list(tensor.shape)}, the live head needs {shapes[name]}")
        allowed = (torch.int64,) if name == "d2t" else (torch.float32, torch.bfloat16)
        if tensor.dtype not in allowed:
            wanted = " or ".join(str(dtype) for dtype in allowed)
            raise ValueError(f"{name}: the file has {tensor.dtype}, the live head takes {wanted}")
    if "d2t" in shapes:
        targets = torch.arange(tensors["d2t"].shape[0]) + tensors["d2t"]
        if int(targets.min()) < 0 or int(targets.max()) >= target_vocab or targets.unique().numel() != targets.numel():
            raise ValueError(f"d2t: target ids must be distinct and in 0..{target_vocab}")


class DraftsmithEngine(WeightTransferEngine[DraftsmithInitInfo, DraftsmithUpdateInfo]):
    init_info_cls = DraftsmithInitInfo
    update_info_cls = DraftsmithUpdateInfo
    supports_draft_weight_update = True

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        remember_first_head(self.vllm_config)

    def init_transfer_engine(self, init_info) -> None:
        pass

    def start_weight_update(self) -> None:
        if self.model is self._default_model:
            raise ValueError("draftsmith swaps draft heads alone: call /start_draft_weight_update")

    def receive_weights(self, update_info: DraftsmithUpdateInfo) -> None:
        begun = time.perf_counter()
        try:
            tensors, digest = self._read(update_info)
        except BaseException:
            HEAD.refusals += 1
            raise
        read = time.perf_counter()
        # until the load is through, nobody can say which head is live
        HEAD.digest = None
        initialize_layerwise_reload(self.model)
        try:
            with disable_mtp_completeness_check():
                self.model.load_weights(iter(tensors.items()))
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        HEAD.digest, HEAD.loaded_at = digest, time.time()
        HEAD.swaps += 1
        logger.info("head %s live: read and checked in %.3f s, loaded in %.3f s", digest[:12], read - begun,
                    time.perf_counter() - read)

    def _read(self, update_info: DraftsmithUpdateInfo) -> tuple[dict[str, torch.Tensor], str]:
        """The checked tensors, and the digest of the very bytes that they came from."""
        with open(update_info.path, "rb") as file:
            raw = file.read()
        digest = hashlib.sha256(raw).hexdigest()
        if update_info.digest is not None and update_info.digest != digest:
            raise ValueError(f"{update_info.path}: sha256 is {digest}, the caller expects {update_info.digest}")
        try:
            loaded = load_safetensors(raw)
        except Exception as error:
            raise ValueError(f"{update_info.path}: not a whole safetensors file: {error}") from error
        target_vocab = self.vllm_config.model_config.get_vocab_size()
        shapes = expected_shapes(self.model.config, target_vocab)
        live = dict(self.model.named_parameters())
        shared = self._shared_modules()
        if "model.embed_tokens" not in shared:
            shapes["embed_tokens.weight"] = [self.model.config.vocab_size, self.model.config.hidden_size]
        wanted = {model_name(name) for name in shapes}
        for name in sorted(live):
            if name not in wanted and name.rpartition(".")[0] not in shared:
                raise ValueError(f"{name}: the live head has this parameter, which draftsmith does not know; swap refused")
        for name in sorted(shapes):
            if model_name(name).rpartition(".")[0] in shared:
                del shapes[name]  # belongs to the verifier
            elif model_name(name) not in live:
                raise ValueError(f"{name}: the live head lacks parameter {model_name(name)}; swap refused")
        tensors = {}
        for name, tensor in loaded.items():
            plain = name.replace("midlayer.", "layers.0.")
            if plain in tensors:
                raise ValueError(f"{name}: the file has this tensor under both of its names")
            owner = model_name(plain).rpartition(".")[0]
            if owner in shared:
                continue  # loading it would overwrite the verifier's own
            tensors[plain] = tensor
        check_head(tensors, shapes, target_vocab)
        return tensors, digest

    def _shared_modules(self) -> set[str]:
        """Modules of the draft model that are the verifier's own (embed_tokens, sometimes lm_head)."""
        of_verifier = {id(module) for module in self._default_model.modules()}
        return {name for name, module in self.model.named_modules() if name and id(module) in of_verifier}

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator, trainer_args):  # abstract in vLLM 0.26
        raise NotImplementedError("draftsmith writes a file and posts its path")
