"""The KV connector over the store: what an engine computed, every engine on the same root finds again."""

CONNECTOR = "DeepInfer3FSConnector"


def register_connector() -> None:
    """Make the connector known to vLLM by its name, and let it settle an engine's configuration early. Re-entrant."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from deepinfer_vllm import compat

    if CONNECTOR in KVConnectorFactory._registry:
        return
    KVConnectorFactory.register_connector(CONNECTOR, "deepinfer_vllm.kv_connector.connector", CONNECTOR)
    compat.hook_connector_config(CONNECTOR, "deepinfer_vllm.kv_connector.settle")
