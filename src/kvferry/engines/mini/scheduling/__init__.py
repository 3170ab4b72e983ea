"""Which requests run in the next step, and with which blocks. It decides and counts; it computes nothing."""
