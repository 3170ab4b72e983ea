"""Shipped for users' tests too: a fake clock, a transport with faults, conformance suites, a simulator."""
