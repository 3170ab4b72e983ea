"""The OpenAI-compatible router in front of prefill and decode workers.

To follow one request, read `app`, `dispatch`, `fleet.admission`, `upstream.worker_client` and `answer.relay`.
"""
