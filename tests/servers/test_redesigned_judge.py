"""The judge: random sequences of commands and requests, on the real redesigned cluster and on the embedded one.

Any difference in the type, the code or the text of an answer, or in which error ends a connection, fails, with the
number of the sequence and both transcripts.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cluster import RedesignedCluster as RealRedesignedCluster
from support.differential import Stage, open_stage
from support.sequences import http_sequence, tcp_sequence
from support.transcripts import Place, judge

from nsq_fast.broker import RedesignedCluster

SLOT = "judge"
COUNT = 150
SEQUENCES = {"tcp": tcp_sequence, "http": http_sequence}


@pytest.fixture(scope="module")
def theirs(wants_real: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    cluster = RealRedesignedCluster(tmp_path_factory.mktemp("judged"), 2, 2)
    try:
        leader = cluster.leader()
        assert leader is not None
        other = next(address for address in cluster.lookupd_addresses if address != leader)
        first, second = (Place(nsqd.tcp_address, nsqd.http_address) for nsqd in cluster.nsqds)
        yield open_stage(SLOT, (leader, other), (first, second))
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def ours(theirs: Stage) -> Iterator[Stage]:
    with RedesignedCluster(2, 2, readiness=0.0) as cluster:
        leader, other = (lookupd.http_address for lookupd in cluster.lookupds)
        first, second = (Place(nsqd.tcp_address, nsqd.http_address) for nsqd in cluster.nsqds)
        yield open_stage(SLOT, (leader, other), (first, second))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", SEQUENCES)
def test_no_sequence_is_answered_in_two_ways(ours: Stage, theirs: Stage, kind: str) -> None:
    found = {}
    for seed in range(COUNT):
        if differing := judge(SEQUENCES[kind](seed), ours, theirs, f"{kind}{seed}"):
            found[seed] = differing
    assert found == {}, "\n".join(line for seed, lines in found.items() for line in (f"{kind} {seed}:", *lines))
