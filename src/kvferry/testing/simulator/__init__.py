"""A million hand-offs with faults, each from a seed: the machines of kvferry.handoff in a world of virtual time.

scenario   what a world is made of and what goes wrong in it, all from one seed
world      the event loop, the network, the transfers, crashes and restarts
engines    what an engine does around its worker halves: blocks, requests, and what it expects of reports
memory     blocks that know their content; what may be in flight where
mutants    the protocol with one fault each, to prove that faults are found
shrink     the smallest scenario that still fails
run        many worlds, over processes
"""
