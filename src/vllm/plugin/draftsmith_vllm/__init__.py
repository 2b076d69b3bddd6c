"""The vLLM side of draftsmith. vLLM calls register() in each of its processes (entry point vllm.general_plugins).

Official doors only, nothing patched: the model registry (tap.py), a KV connector (connector.py), a weight-transfer
engine (engine.py) and a worker extension (worker.py). For vLLM 0.26 to 0.32.
"""

from .config import ARCHITECTURES, CONNECTOR

ENGINE = "draftsmith"


def register() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.models.registry import ModelRegistry

    # vLLM may call this twice in one process; both factories refuse a second registration
    if ENGINE not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(ENGINE, "draftsmith_vllm.engine", "DraftsmithEngine")
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "draftsmith_vllm.connector", CONNECTOR)
    # always: the stock class cannot load a head whose config names a fourth layer id
    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, "draftsmith_vllm.tap:TappedEagle3LlamaForCausalLM")
