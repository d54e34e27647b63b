"""The benchmarking harness: clients of NSQ compared on one server in one run.

``suite`` is the table of scenarios, shares and goals; ``clients`` are the programs that are measured, ``servers`` what
they run on. ``runner`` runs the clients in turns, each in a process of its own, or many processes of one client at
once, and counts what a message costs; ``results`` is the file that this makes, and its figures: medians, spread,
limits, what changed between two runs. Everything that is shown is computed from that file alone, by ``report``, charts
as well. The compiled core alone is measured by ``bench/bench_core.py``.

Machines differ and are noisy: only ratios within one run mean anything.
"""
