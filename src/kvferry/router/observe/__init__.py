"""What the router shows: metrics, the decode-only alarm, time lines, traces, and the dashboard in ui/."""
