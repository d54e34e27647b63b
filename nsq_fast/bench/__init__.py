"""The benchmarking harness: clients of NSQ compared on one server in one run.

``settings`` says what is measured, ``clients`` with which programs, ``servers`` on which server. ``runner`` runs the
clients in turns, each in a process of its own; ``results`` is the file that this makes. Everything that is shown is
computed from that file alone: ``figures`` (medians, spread, limits), ``goals``, ``compare``, ``charts``, ``report``.

Machines differ and are noisy: only ratios within one run mean anything.
"""
