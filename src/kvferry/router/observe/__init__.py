"""What the router shows of itself: metrics, the decode-only alarm, time lines, traces, and the dashboard in ui/."""
