"""The entry point `vllm.general_plugins`: makes `"kv_connector": "KVFerryConnector"` known without a module path."""

__all__ = ["register"]


def register() -> None:
    """Called by vLLM in each of its processes. Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector("KVFerryConnector", "kvferry.engines.vllm.connector", "KVFerryConnector")
    except ValueError:
        return  # it is registered already
