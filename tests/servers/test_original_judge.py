"""The judge: random sequences of commands and requests, on a real nsqd and nsqlookupd and on the embedded ones.

Any difference in the type, the code or the text of an answer, or in which error ends a connection, fails, with the
number of the sequence and both transcripts. ``--judge-sequences`` says how many there are of each kind.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.original_sequences import KINDS
from support.original_stage import embedded_stage, real_stage
from support.servers import RealLookupd, RealNsqd
from support.transcripts import judge


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_no_sequence_is_answered_in_two_ways(
    real_nsqd: Callable[..., RealNsqd],
    real_lookupd: Callable[..., RealLookupd],
    request: pytest.FixtureRequest,
    kind: str,
) -> None:
    found = {}
    theirs = real_stage(real_nsqd, real_lookupd)
    with embedded_stage() as ours:
        for seed in range(request.config.getoption("--judge-sequences")):
            if differing := judge(KINDS[kind](seed), ours, theirs, f"{kind}{seed}"):
                found[seed] = differing
    assert found == {}, "\n".join(line for seed, lines in found.items() for line in (f"{kind} {seed}:", *lines))
