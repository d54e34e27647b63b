"""The proof of the redesigned NSQ's bad days: messages published and consumed while a cluster has every fault.

programs    what publishes and consumes, in processes that may be killed, and keeps rows of it (``support.ledger``)
watch       which leaders lookup names, what plain connections to them can do, and how long clients took to follow
faults      what is done to the cluster
run         the whole, and what it finds
"""
