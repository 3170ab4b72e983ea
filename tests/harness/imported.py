"""Imports what workers and routers import, for the fork server of tests.harness.forked. It starts no thread."""

# ruff: noqa: F401

import gc

import kvferry.cli.main
import kvferry.cli.route
import kvferry.cli.serve
import kvferry.cli.support.loading_display
import kvferry.engines.mini.server.app
import kvferry.engines.mini.worker
import kvferry.router.app
import kvferry.testing.ends
import kvferry.transport.nixl.nixl
import tests.harness.handoff_engines
import tests.harness.loop_monitor

__all__: list[str] = []

gc.collect()
gc.freeze()  # what was imported stays shared between the forks
