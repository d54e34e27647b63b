"""The soak: producers and consumers at work while servers die, freeze and come back and links misbehave.

``schedule`` says, from a seed, what happens when; ``ledger``, ``order`` and ``health`` hold what must be true. These
are pure. ``servers`` runs nsqds and nsqlookupds as processes, ``links`` the proxies in front of them. ``publishers``
and ``consumers`` are what both dialects need for their work, which is in ``original`` and ``ordered``. ``run`` puts one
run together, ``report`` shows what came of it.

What is promised, and where each promise is checked, stands in docs/guarantees.md.
"""
