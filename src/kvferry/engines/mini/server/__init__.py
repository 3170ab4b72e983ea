"""The OpenAI-compatible server of the embedded engine. Read app.py first, then generate.py and engine_thread.py."""
