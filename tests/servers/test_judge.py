"""The judge: random sequences of commands and requests, on real servers of a dialect and on the embedded ones.

Any difference in the type, the code or the text of an answer, or in which error ends a connection, fails, with the
number of the sequence and both transcripts. ``--judge-sequences`` says how many there are of each kind on the original;
those on a redesigned cluster, which takes minutes to start, are 150.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.cluster import RealCluster
from support.differential import Stage, embedded_stage, open_stage, real_stage
from support.sequences import kinds, sequence
from support.servers import RealLookupd, RealNsqd
from support.transcripts import Place, judge

from nsq_fast.broker import RedesignedCluster

SLOT = "judge"
COUNT = 150


def differing(kind: str, count: int, ours: Any, theirs: Any) -> str:
    """The sequences that are answered in two ways, with both transcripts."""
    name = kind.split()[1]
    found = {seed: judge(sequence(kind, seed), ours, theirs, f"{name}{seed}") for seed in range(count)}
    return "\n".join(line for seed, lines in found.items() if lines for line in (f"{kind} {seed}:", *lines))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", kinds("original"))
def test_no_sequence_is_answered_in_two_ways(
    real_nsqd: Callable[..., RealNsqd],
    real_lookupd: Callable[..., RealLookupd],
    request: pytest.FixtureRequest,
    kind: str,
) -> None:
    count = request.config.getoption("--judge-sequences")
    theirs = real_stage(real_nsqd, real_lookupd)
    with embedded_stage() as ours:
        assert differing(kind, count, ours, theirs) == ""


def stage_of(cluster: Any, leader: Any, other: Any) -> Stage:
    first, second = (Place(nsqd.tcp_address, nsqd.http_address) for nsqd in cluster.nsqds)
    return open_stage(SLOT, (leader, other), (first, second))


@pytest.fixture(scope="module")
def theirs(wants_real: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    cluster = RealCluster(tmp_path_factory.mktemp("judged"), 2, 2)
    try:
        leader = cluster.leader()
        assert leader is not None
        other = next(address for address in cluster.lookupd_addresses if address != leader)
        yield stage_of(cluster, leader, other)
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def ours(theirs: Stage) -> Iterator[Stage]:
    with RedesignedCluster(2, 2, readiness=0.0) as cluster:
        yield stage_of(cluster, *(lookupd.http_address for lookupd in cluster.lookupds))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", kinds("redesigned"))
def test_no_sequence_is_answered_in_two_ways_by_a_redesigned_cluster(ours: Stage, theirs: Stage, kind: str) -> None:
    assert differing(kind, COUNT, ours, theirs) == ""
