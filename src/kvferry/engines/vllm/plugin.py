"""The entry point `vllm.general_plugins`, which makes `"kv_connector": "KVFerryConnector"` work without a module
path.
"""

__all__ = ["register"]


def register() -> None:
    """Registers the connector. vLLM calls this in each of its processes; it is idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector("KVFerryConnector", "kvferry.engines.vllm.connector", "KVFerryConnector")
    except ValueError:
        return  # it is registered already
