"""What the plugin reads from vLLM's configuration, and the modes that it refuses at start."""

from dataclasses import dataclass

CONNECTOR = "DraftsmithConnector"
# of heads, as vLLM names them; tap.py takes the place of vLLM's own class for them
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
# steps of the largest size whose rows may wait in pinned memory for the row store; two were too few at full load
WAITING_STEPS = 6


@dataclass
class TapConfig:
    """kv_connector_extra_config."""

    transfer_dir: str
    sample_rate: float = 1.0  # of the requests, so many are exported
    host_bytes: int = 8 << 30  # rows kept by KV slot; no more is taken than twice the KV cache has slots
    writer_threads: int = 4
    min_free_bytes: int = 256 << 20  # of transfer_dir's file system


def is_tapped(vllm_config) -> bool:
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR


def layer_ids(hf_config) -> list[int]:
    """The captured layers in vLLM's order: sorted, without doubles."""
    ids = getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None)
    if not ids:
        ids = (getattr(hf_config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
    return sorted(set(ids or []))


def read_tap_config(vllm_config) -> TapConfig:
    given = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
    known = TapConfig.__dataclass_fields__
    for name in given:
        if name not in known:
            raise ValueError(f"kv_connector_extra_config: {name} is unknown; draftsmith's tap takes {', '.join(known)}")
    if not given.get("transfer_dir"):
        raise ValueError("kv_connector_extra_config lacks transfer_dir, the directory that states are written to")
    config = TapConfig(**given)
    for name in ("host_bytes", "writer_threads"):
        if int(getattr(config, name)) < 1:
            raise ValueError(f"kv_connector_extra_config: {name} is {getattr(config, name)}, it must be at least 1")
    if not 0 <= float(config.sample_rate) <= 1:
        raise ValueError(f"kv_connector_extra_config: sample_rate is {config.sample_rate}, not between 0 and 1")
    return config


def check_modes(vllm_config, kv_cache_config) -> None:
    """Raises ValueError naming the flag of a mode in which the tap could not work."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "eagle3" or speculative.draft_model_config is None:
        raise ValueError('draftsmith\'s tap needs an EAGLE-3 head: give --speculative-config with "method": "eagle3"')
    architecture = speculative.draft_model_config.hf_config.architectures[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(f"the head's architecture is {architecture}; draftsmith's tap knows {', '.join(ARCHITECTURES)}")
    if getattr(speculative, "parallel_drafting", False):
        raise ValueError("draftsmith's tap does not support parallel drafting: leave parallel_drafting out of "
                         "--speculative-config")
    for flag in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(vllm_config.parallel_config, flag, 1)
        if size > 1:
            raise ValueError(f"draftsmith's tap does not support --{flag.replace('_', '-')} {size}: set it to 1")
    if len(kv_cache_config.kv_cache_groups) != 1:
        raise ValueError("draftsmith's tap needs one KV cache group for all layers: give --disable-hybrid-kv-cache-manager")
    ids = layer_ids(speculative.draft_model_config.hf_config)
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    if not ids or ids[-1] != layers:
        raise ValueError(
            f"the head's config.json names layer ids {ids}; the trainer also needs {layers}, the last layer: add it to "
            "eagle_aux_hidden_state_layer_ids and set num_aux_hidden_states to what the head uses"
        )
    if getattr(vllm_config, "use_v2_model_runner", False):
        top_level = getattr(speculative.draft_model_config.hf_config, "eagle_aux_hidden_state_layer_ids", None)
        if not top_level:
            raise ValueError(
                "vLLM's V2 model runner may read eagle_aux_hidden_state_layer_ids from the top level of the head's "
                "config.json alone, where it is missing: add it there, or set VLLM_USE_V2_MODEL_RUNNER=0"
            )
