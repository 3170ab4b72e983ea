"""Shipped for users' tests too: suites that every transport and every engine must pass, a fake clock, a simulator."""
