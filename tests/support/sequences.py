"""Random sequences of commands and requests for both dialects: the same seed is the same sequence, on every machine.

They are put together of what stands in ``data/steps.jsonl``. A line of it is what one connection sends, or what is
asked over HTTP beside connections: the kind of sequence, the name of the connection ("requests" for HTTP), the topic
that it is about, and the steps. Most do as clients do; in others names, numbers, sizes, bodies, arguments, methods or
the order of commands are wrong in some way that a server has an answer to.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

from .transcripts import Step

STEPS = Path(__file__).parents[1] / "data" / "steps.jsonl"
REQUESTS = "requests"
Scripts = dict[str, dict[str, list[list[Any]]]]  # of a connection, or requests -> topic -> those to choose from


@cache
def _scripts() -> dict[str, Scripts]:
    found: dict[str, Scripts] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for line in STEPS.read_text().splitlines():
        kind, name, topic, steps = json.loads(line)
        found[kind][name][topic].append(steps)
    return found


def kinds(dialect: str) -> list[str]:
    """The kinds of sequences for a dialect."""
    return [kind for kind in _scripts() if kind.startswith(dialect)]


def sequence(kind: str, seed: int) -> list[Step]:
    """Several connections, and requests of which they share the topic, their steps in a random order."""
    chance, scripts = random.Random(f"{kind} {seed}"), _scripts()[kind]
    names = sorted(scripts.keys() - {REQUESTS})
    names = names[: chance.randint(REQUESTS not in scripts, len(names))]
    shared = chance.choice(sorted(scripts[REQUESTS])) if REQUESTS in scripts else None
    chosen: dict[str, list[Step]] = {}
    topics = set()
    for name in [*names, REQUESTS] if shared is not None else names:
        topic = chance.choice(sorted(scripts[name])) if shared is None else shared
        # One only on the topic whose channel all would share: who of them gets a message is nobody's to say.
        if topic in scripts[name] and (topic not in topics or topic != "n{slot}" or name == REQUESTS):
            topics.add(topic)
            chosen[name] = _steps(name, _mixed(chance, scripts[name][topic]))
    steps = []
    while left := [script for script in chosen.values() if script]:
        steps.append(chance.choice(left).pop(0))
    return steps


def _mixed(chance: random.Random, found: list[list[Any]]) -> list[Any]:
    """The beginning of one script, and the end of another behind what opens it."""
    first, second = chance.choice(found), chance.choice(found)
    return first[: chance.randint(min(2, len(first)), len(first))] + second[chance.randint(2, max(2, len(second))) :]


def _steps(name: str, script: list[Any]) -> list[Step]:
    if name == REQUESTS:
        return [["http", *request, *([] if len(request) == 5 else [{}])] for request in script]
    role, *sent = script
    return [["connect", name, role], *(["close", name] if data is None else ["send", name, data] for data in sent)]
