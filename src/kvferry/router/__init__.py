"""The OpenAI-compatible front door that pairs prefill with decode. Read: app, dispatch, workers, relay."""
