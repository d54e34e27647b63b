"""Filters are read as Go reads them: a corpus of patterns with the texts that Go's own libraries say they match."""

from __future__ import annotations

import json
import sys

import pytest
from support.redesigned import headed, identify
from support.replay import DATA
from support.waiting import promptly
from support.wire import WireClient

from nsq_fast.broker import RedesignedCluster
from nsq_fast.broker.redesigned.channel import GLOB, REGEXP, FilterRequest, make_filter
from nsq_fast.broker.redesigned.log import Record
from nsq_fast.header_patterns import PatternInvalid, check_glob, check_regexp

HEAD, *ROWS = map(json.loads, (DATA / "go_patterns.jsonl").read_text().splitlines())
TEXTS: list[str] = HEAD["texts"]


def matched(kind: int, pattern: str) -> list[str] | None:
    """The texts that a filter lets through; None when it is ignored, as no pattern."""
    matches = make_filter(FilterRequest(kind, filter_ext_key="k", filter_data=pattern))
    if matches is None:
        return None
    return [text for text in TEXTS if matches(record(text))]


def record(text: str) -> Record:
    return Record(1, bytes(16), 0, 0, 0, b"\x04" + headed({"k": text}, b""), b"")


def test_the_corpus_has_patterns_that_go_refuses_and_takes() -> None:
    for kind in ("regexp", "glob"):
        wanted = [row[2] is None for row in ROWS if row[0] == kind]
        assert min(wanted.count(True), wanted.count(False)) > 4


@pytest.mark.parametrize(("kind", "pattern", "wanted"), ROWS, ids=[f"{row[0]}-{row[1]!a}" for row in ROWS])
def test_a_pattern_matches_what_it_matches_in_go(kind: str, pattern: str, wanted: list[str] | None) -> None:
    # An empty pattern is none: the filter is ignored.
    assert matched({"regexp": REGEXP, "glob": GLOB}[kind], pattern) == (wanted if pattern else None)


def test_a_text_that_is_no_unicode_is_searched() -> None:
    matches = make_filter(FilterRequest(REGEXP, filter_ext_key="k", filter_data="^a.b$"))
    assert matches is not None
    bad = Record(1, bytes(16), 0, 0, 0, b"\x04" + headed(b'{"k":"a\xffb"}', b""), b"")
    assert matches(bad)


def test_no_glob_keeps_a_server_busy() -> None:
    # It does keep the real one busy: with gobwas/glob this takes longer than anybody waits.
    with promptly():
        assert matched(GLOB, "*a" * 40 + "b") == []
        matches = make_filter(FilterRequest(GLOB, filter_ext_key="k", filter_data="*a" * 40 + "b"))
        assert matches is not None
        assert not matches(record("a" * 100))
        assert matches(record("a" * 100 + "b"))


def test_a_server_without_the_package_refuses_a_filter_that_needs_it(
    cluster: RedesignedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    client = WireClient(cluster.nsqds[0].tcp_address)
    exact = {"type": 1, "filter_ext_key": "k", "filter_data": "v"}
    assert client.command(identify(extend_support=True, ext_filter=exact, heartbeat_interval=5000)) == b"OK"
    client.close()
    for kind in (REGEXP, GLOB):
        client = WireClient(cluster.nsqds[0].tcp_address)
        asked = {"type": kind, "filter_ext_key": "k", "filter_data": "v"}
        answer = client.command(identify(extend_support=True, ext_filter=asked))
        assert b"pip install 'nsq-fast[filters]'" in answer
        client.close()


def is_let_through(kind: str, pattern: str) -> bool:
    try:
        (check_regexp if kind == "regexp" else check_glob)(pattern)
    except PatternInvalid:
        return False
    return True


def test_consumers_let_no_pattern_through_that_go_refuses() -> None:
    # An empty filter is refused elsewhere: it is no pattern.
    let_through = [
        (kind, pattern, wanted) for kind, pattern, wanted in ROWS if pattern and is_let_through(kind, pattern)
    ]
    assert len(let_through) > 50
    assert [row for row in let_through if row[2] is None] == []
