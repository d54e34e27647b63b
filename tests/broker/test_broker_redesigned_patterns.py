"""Filters are read as Go reads them: a corpus of patterns with the texts that Go's own libraries say they match."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from support.replay import DATA

from nsq_fast.broker.redesigned.go_glob import translate_glob
from nsq_fast.broker.redesigned.go_regexp import translate_regexp
from nsq_fast.header_patterns import PatternInvalid, check_glob, check_regexp

HEAD, *ROWS = map(json.loads, (DATA / "go_patterns.jsonl").read_text().splitlines())
TEXTS: list[str] = HEAD["texts"]


def matched(translate: Callable[[str], str], find: Callable[[re.Pattern[str], str], object], pattern: str) -> object:
    try:
        compiled = re.compile(translate(pattern))
    except ValueError:
        return None
    return [text for text in TEXTS if find(compiled, text)]


def test_the_corpus_has_patterns_that_go_refuses_and_takes() -> None:
    for kind in ("regexp", "glob"):
        wanted = [row[2] is None for row in ROWS if row[0] == kind]
        assert min(wanted.count(True), wanted.count(False)) > 4


@pytest.mark.parametrize(("kind", "pattern", "wanted"), ROWS, ids=[f"{row[0]}-{row[1]!a}" for row in ROWS])
def test_a_pattern_matches_what_it_matches_in_go(kind: str, pattern: str, wanted: list[str] | None) -> None:
    if kind == "regexp":
        assert matched(translate_regexp, lambda compiled, text: compiled.search(text), pattern) == wanted
    else:
        assert matched(translate_glob, lambda compiled, text: compiled.fullmatch(text), pattern) == wanted


def test_what_python_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="class that is not known"):
        translate_regexp(r"\p{Greek}")


def test_an_empty_brace_at_the_end_is_refused() -> None:
    # gobwas/glob panics when it matches a text with it, and the real nsqd dies of that.
    with pytest.raises(ValueError, match="panic"):
        translate_glob("a{")


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
