"""What a discovery filter leaves of a topology, and what is said of the rest."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
from msgspec.structs import replace

from nsq_fast.config import LookupConfig
from nsq_fast.errors import ConfigError
from nsq_fast.names import Address
from nsq_fast.protocol.targets import is_complete
from nsq_fast.protocol.topology import Meta, Nsqd, Topology, keep_of, only, parse_lookup


def nsqd(number: int, **fields: str) -> Nsqd:
    return Nsqd(Address(f"10.0.0.{number}", 4150), **fields)


A, B = nsqd(1, topology_zone="a", hostname="dc1-n1"), nsqd(2, topology_zone="b", hostname="dc2-n1")


@pytest.mark.parametrize(
    ("option", "kept"),
    [
        (None, [A, B]),
        ({"topology_zone": "a"}, [A]),
        ({"topology_zone": ["a", "b"]}, [A, B]),
        ({"hostname": "dc?-*"}, [A, B]),
        ({"hostname": "dc1-*", "topology_zone": "b"}, []),
        ({"version": "1*"}, []),
        (lambda each: each.tcp.host.endswith("2"), [B]),
    ],
    ids=["none", "one", "several", "pattern", "all-must-match", "absent-field", "function"],
)
def test_a_filter_keeps_the_nsqds_that_match(option: Any, kept: list[Nsqd]) -> None:
    keep = keep_of(LookupConfig(discovery_filter=option).discovery_filter)
    topology = Topology(producers=(A, B))
    found = topology if keep is None else only(topology, keep)
    assert list(found.producers) == kept
    assert list(found.excluded) == [each for each in (A, B) if each not in kept]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({}, "must be a function, a mapping"),
        ("zone=a", "must be a function, a mapping"),
        ({"zone": "a"}, "lookup lists no 'zone': use hostname, "),
        ({"hostname": []}, "hostname=[]: must be a pattern"),
        ({"hostname": [1]}, "hostname=[1]: must be a pattern"),
    ],
    ids=["empty", "text", "unknown-field", "no-pattern", "no-text"],
)
def test_a_filter_that_cannot_be_used_is_refused(option: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LookupConfig(discovery_filter=option)
    assert said in str(caught.value)


def test_partitions_that_are_left_out_are_not_taken_for_leaderless_ones() -> None:
    topology = Topology(partitions=MappingProxyType({0: A, 1: B}), meta=Meta(partition_num=2))
    found = only(topology, lambda each: each is A)
    assert dict(found.partitions) == {0: A}
    assert found.excluded_partitions == (1,)
    assert found.is_complete
    assert is_complete(found, [0, 1])
    leaderless = only(replace(topology, partitions=MappingProxyType({1: B})), lambda each: each is A)
    assert not leaderless.is_complete


def test_a_topology_without_nsqds_says_whom_the_filter_left_out() -> None:
    found = only(Topology(producers=(A, B)), lambda each: False)
    assert found.is_empty
    assert not found.is_unknown
    assert "none of the 2 nsqds" in found.problem
    assert "10.0.0.1:4150 (hostname dc1-n1, zone a)" in found.problem


def test_lookup_tells_zone_and_region() -> None:
    body = b'{"producers":[{"broadcast_address":"h","tcp_port":1,"topology_zone":"z","topology_region":"r"}]}'
    (found,) = parse_lookup(body).producers
    assert (found.topology_zone, found.topology_region) == ("z", "r")
