"""Which patterns of header filters are sent to servers: only such as Go compiles."""

from __future__ import annotations

import pytest

from nsq_fast.header_patterns import PatternInvalid, check_glob, check_regexp


@pytest.mark.parametrize(
    "pattern",
    [
        "", "v", "^v[0-9]+$", "a|b|", "(a|(?:b)c)*", "(?P<name>x)", "(?i)x", "(?i:x)", r"\d{2,3}?", "[a-]",
        r"[\w.-]+@[a-z]+\.(?:com|org)", "[[:alpha:]_]", r"\x41\.", "(a{10}){100}", "x{0}", "é", "[é-ü]", "a{2,}b??",
    ],
)  # fmt: skip
def test_a_regexp_that_go_compiles(pattern: str) -> None:
    check_regexp(pattern)


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("a(?=b)", "lookaheads"),
        ("a(?!b)", "lookaheads"),
        ("(?<=a)b", "lookbehinds"),
        ("(?#comment)", "no lookaheads"),
        ("(?P=name)", "references"),
        (r"(a)\1", "not an escape in Go"),
        (r"a\Z", "not an escape in Go"),
        (r"\u0041", "not an escape in Go"),
        ("a\\", "not an escape in Go"),
        ("*a", "repeats nothing"),
        ("a**", "repeated already"),
        ("a|+", "repeats nothing"),
        ("a{1001}", "more than 1000"),
        ("(a{100}){11}", "more than 1000"),
        ("a{3,2}", "exchanged"),
        ("a{,5}", "write"),
        ("a{b", "write"),
        ("(a", "'\\(' at 0 is not closed"),
        ("a)", "without"),
        ("[a", "'\\[' at 0 is not closed"),
        ("[", "not closed"),
        ("[c-a]", "a range that is none"),
        (r"[\d-z]", "a range that is none"),
        ("[a[b]", "in a class"),
        ("a]", "write"),
        ("[]a]", "empty"),
        ("[^]a]", "empty"),
        ("(" * 300 + ")" * 300, "nested too deep"),
    ],
)
def test_a_regexp_that_go_may_refuse(pattern: str, complaint: str) -> None:
    with pytest.raises(PatternInvalid, match=complaint):
        check_regexp(pattern)


@pytest.mark.parametrize(
    "pattern", ["", "v", "v*", "a?c", "[abc]x", "[!a-c]", "{a,b*}", r"\[", "a,b", "**", "{a,{b,c}}"]
)
def test_a_glob_that_go_compiles(pattern: str) -> None:
    check_glob(pattern)


@pytest.mark.parametrize("pattern", ["[v", "v]", "[]", "[!]", "[c-a]", "[a-cx]", "{a", "a}", "\\", "[a,b]"])
def test_a_glob_that_go_may_refuse(pattern: str) -> None:
    with pytest.raises(PatternInvalid):
        check_glob(pattern)
