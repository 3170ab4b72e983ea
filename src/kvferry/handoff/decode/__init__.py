"""The decode side of hand-offs: the state machine, its receives, and the messages it sends."""
