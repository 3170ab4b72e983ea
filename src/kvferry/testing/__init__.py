"""What tests need, for users too: a fake clock, a transport with faults, conformance suites, a simulator."""
