"""Simulates a million hand-offs with faults, all from one seed: the machines of kvferry.handoff in virtual time.

scenario            what a world is made of and what goes wrong in it, all from one seed
world               the event loop, the network, the transfers, crashes and restarts
rank                one rank: the real machines, its clock, and the driver's part of the work
simulated_engine    the engine around its ranks: blocks, requests, and checks of every report
simulated_memory    blocks that know their content
simulated_transfer  transfers that take simulated time
mutants             the protocol with one fault each, to prove that the simulator finds faults
shrink              reduces a scenario that fails to the smallest one that still fails
run                 runs many worlds in several processes
"""
