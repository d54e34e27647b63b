"""The benchmarking harness: clients of NSQ compared on one server in one run.

``settings`` says what is measured, ``clients`` with which programs, ``servers`` against what; ``runner`` lets the
clients take turns, each in a process of its own, and ``results`` is the file that comes of it. What is shown is
computed from that file alone: ``figures`` (medians, spread, limits), ``goals``, ``compare``, ``charts``, ``report``.

Machines differ and are noisy: only ratios within one run mean anything.
"""
