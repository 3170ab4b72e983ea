"""The prefill side of hand-offs: the state machine, its grants, and the messages it sends."""
