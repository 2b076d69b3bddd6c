"""A safetensors file in memory, and whether it fits the live head. Nothing here touches the live head."""

import hashlib
import json
import math
from dataclasses import dataclass

import numpy as np
import torch

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "BOOL": torch.bool}


# in the file: in the model
FUSED = {
    "self_attn.q_proj": "self_attn.qkv_proj",
    "self_attn.k_proj": "self_attn.qkv_proj",
    "self_attn.v_proj": "self_attn.qkv_proj",
    "mlp.gate_proj": "mlp.gate_up_proj",
    "mlp.up_proj": "mlp.gate_up_proj",
}


def read_head_file(path: str, expected_digest: str | None) -> tuple[dict[str, torch.Tensor], str]:
    """Tensors that share one buffer, and the sha256 of the very bytes that they came from.

    Reading and hashing let other threads run, which safetensors' own reader does not.
    """
    with open(path, "rb", buffering=0) as file:
        size = file.seek(0, 2)
        file.seek(0)
        raw = np.empty(size, dtype=np.uint8)
        view, filled = memoryview(raw), 0
        while filled < size and (count := file.readinto(view[filled:])):
            filled += count
    if filled < size:
        raise ValueError(f"{path}: it was cut short while it was read")
    digest = hashlib.sha256(raw).hexdigest()
    if expected_digest is not None and expected_digest != digest:
        raise ValueError(f"{path}: sha256 is {digest}, the caller expects {expected_digest}")
    try:
        return parse_safetensors(raw), digest
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a whole safetensors file: {error}") from error


def parse_safetensors(raw: np.ndarray) -> dict[str, torch.Tensor]:
    """Tensors over the bytes of the file. Raises ValueError, KeyError, TypeError or AttributeError for bad files."""
    data = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    if len(raw) < 8 or data > len(raw):
        raise ValueError(f"its header ends at byte {data} of {len(raw)}")
    header = json.loads(raw[8:data].tobytes())
    header.pop("__metadata__", None)
    tensors, total = {}, 0
    for name, entry in header.items():
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not 0 <= begin <= end <= len(raw) - data or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name}: bytes {begin} to {end} of {len(raw) - data} for {entry['dtype']} {shape}")
        part = raw[data + begin : data + end]
        if (data + begin) % dtype.itemsize:
            part = part.copy()  # a tensor must begin at a multiple of its item size
        tensors[name] = torch.from_numpy(part).view(dtype).view(shape)
        total += end - begin
    if total != len(raw) - data:
        raise ValueError(f"its tensors have {total} bytes, the file has {len(raw) - data}")
    return tensors


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


@dataclass
class LiveHead:
    """What a head's file is checked against."""

    shapes: dict[str, list[int]]  # by name in the file
    shared: set[str]  # modules of the draft model that are the verifier's own (embed_tokens, sometimes lm_head)
    target_vocab: int

    @classmethod
    def of(cls, draft: torch.nn.Module, verifier: torch.nn.Module, target_vocab: int) -> "LiveHead":
        """Raises ValueError for a draft model of which not all parameters are known."""
        of_verifier = {id(module) for module in verifier.modules()}
        shared = {name for name, module in draft.named_modules() if name and id(module) in of_verifier}
        shapes = expected_shapes(draft.config, target_vocab)
        live = dict(draft.named_parameters())
        if "model.embed_tokens" not in shared:
            shapes["embed_tokens.weight"] = [draft.config.vocab_size, draft.config.hidden_size]
        wanted = {model_name(name) for name in shapes}
        for name in sorted(live):
            if name not in wanted and name.rpartition(".")[0] not in shared:
                raise ValueError(f"{name}: the live head has this parameter, which draftsmith does not know; swap refused")
        for name in sorted(shapes):
            if model_name(name).rpartition(".")[0] in shared:
                del shapes[name]  # belongs to the verifier
            elif model_name(name) not in live:
                raise ValueError(f"{name}: the live head lacks parameter {model_name(name)}; swap refused")
        return cls(shapes, shared, target_vocab)

    def check(self, loaded: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that are to be loaded, with `layers.0.` in their names. Raises ValueError where they do not fit."""
        tensors = {}
        for name, tensor in loaded.items():
            plain = name.replace("midlayer.", "layers.0.")
            if plain in tensors:
                raise ValueError(f"{name}: the file has this tensor under both of its names")
            if model_name(plain).rpartition(".")[0] in self.shared:
                continue  # loading it would overwrite the verifier's own
            tensors[plain] = tensor
        check_head(tensors, self.shapes, self.target_vocab)
        return tensors
