"""Fleets in virtual time: the client's own policies, among servers that are small models. Seeded; no clock, no I/O.

`events` runs what is due next. `delivery`, `lookups`, `reconnects` and `leaders` each model one side of a fleet and run
the policies of `protocol` in it: RDY, backoff, lookup schedules, reconnect delays, retries. `questions` asks what
docs/scale.md answers; `comparison` tells how far a curve of the simulation is from a measured one.
"""
