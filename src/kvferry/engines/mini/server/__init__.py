"""The OpenAI-compatible server over the embedded engine. Read: app, generate, engine_thread."""
