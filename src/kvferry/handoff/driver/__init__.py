"""The thread between the state machines, the clock and the transport: the only part of the hand-off that does I/O."""
