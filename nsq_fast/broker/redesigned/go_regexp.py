"""Go's regular expressions as Python's, without what Python has and Go has not (Go: regexp/syntax/parse.go).

What both write in the same way and mean differently is written out: ``$`` is the end of the text and nothing else,
``\\d``, ``\\s``, ``\\w`` and ``\\b`` are about ASCII, flags inside a pattern hold from there to the end of their group.
Only whether a text matches is the same, not what groups hold. Names of scripts (``\\p{Greek}``) are refused,
because Python does not know them.
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata

_MAX_REPEAT = 1000
_REPEAT = re.compile(r"\{(\d+)(?:,(\d*))?\}", re.ASCII)
_GROUP_NAME = re.compile(r"\(\?P?<\w+>", re.ASCII)
_FLAGS = re.compile(r"\(\?([imsU]*)(?:-([imsU]+))?([:)])")
_CONTROLS = {"a": 7, "f": 12, "t": 9, "n": 10, "r": 13, "v": 11}
_PERL = {"d": "0-9", "s": r"\t\n\f\r ", "w": "0-9A-Za-z_"}
_BOUNDARY = r"(?a:\b)"
_POSIX = {
    "alnum": "0-9A-Za-z", "alpha": "A-Za-z", "ascii": r"\x00-\x7F", "blank": r"\t ", "cntrl": r"\x00-\x1F\x7F",
    "digit": "0-9", "graph": "!-~", "lower": "a-z", "print": " -~", "punct": r"!-/:-@\[-`{-~",
    "space": r"\t\n\v\f\r ", "upper": "A-Z", "word": "0-9A-Za-z_", "xdigit": "0-9A-Fa-f",
}  # fmt: skip
_POSIX_NAME = re.compile(r"\[:(\^?)(\w+):\]")
_PROPERTY = re.compile(r"(\^?)(\w)|\{(\^?)(\w+)\}")


def translate_regexp(pattern: str) -> str:
    """A regular expression of Python that finds the same texts; ValueError where Go refuses the pattern."""
    return _Translator(pattern).translate()


class _Translator:
    """Translates one pattern, from left to right. ``_flags`` are those that hold where it is."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._flags = frozenset[str]()

    def translate(self) -> str:
        translated = self._alternatives()
        if self._at < len(self._pattern):
            raise self._error("unexpected )")
        return translated

    def _error(self, reason: str) -> ValueError:
        return ValueError(f"regexp {self._pattern!r}: {reason} at {self._at}")

    def _next(self, length: int = 1) -> str:
        return self._pattern[self._at : self._at + length]

    def _matched(self, regexp: re.Pattern[str]) -> re.Match[str] | None:
        """What a regular expression finds right here, which is then behind us."""
        found = regexp.match(self._pattern, self._at)
        if found:
            self._at = found.end()
        return found

    def _alternatives(self) -> str:
        """Everything up to the end of the group, or of the pattern."""
        outside, parts = self._flags, []
        atoms: list[str] = []
        was_repeat = False
        while self._at < len(self._pattern) and self._next() != ")":
            is_repeat = self._is_repeat()
            if is_repeat:
                if not atoms or was_repeat:
                    raise self._error("nothing to repeat, or a repetition of a repetition,")
                atoms[-1] = self._repeated(atoms[-1])
            elif self._next() == "|":
                self._at += 1
                parts.append("".join(atoms))
                atoms = []
            else:
                atoms += self._atoms()
            was_repeat = is_repeat
        self._flags = outside
        parts.append("".join(atoms))
        return f"(?:{'|'.join(parts)})"

    def _repeated(self, atom: str) -> str:
        repeated = f"(?:{atom}){self._repeat()}"
        if self._next() == "?":
            self._at += 1  # which text is found first is the same question for Python, and not ours
        return repeated

    def _is_repeat(self) -> bool:
        return self._next() in ("*", "+", "?") or (_REPEAT.match(self._pattern, self._at) is not None)

    def _repeat(self) -> str:
        found = self._matched(_REPEAT)
        if found is None:
            self._at += 1
            return self._pattern[self._at - 1]
        low, high = int(found[1]), int(found[2] or 0) if found[2] is not None else int(found[1])
        if max(low, high) > _MAX_REPEAT or (found[2] and high < low):
            raise self._error("invalid repeat count")
        return found[0]

    def _atoms(self) -> list[str]:
        """What comes next and can be repeated; nothing for flags, and a list for a quotation."""
        char = self._next()
        if char == "(":
            return self._group()
        if self._next(2) == r"\Q":
            quoted, _, _ = self._pattern[self._at + 2 :].partition(r"\E")
            self._at += len(quoted) + 4
            return [self._fold(re.escape(each)) for each in quoted]
        if char == "[":
            return [self._class()]
        self._at += 1
        if char == "\\":
            return [self._escape()]
        if char == ".":
            return ["(?s:.)" if "s" in self._flags else "."]
        if char in "^$":
            multiline = {"^": "(?m:^)", "$": "(?m:$)"} if "m" in self._flags else {"^": r"\A", "$": r"\Z"}
            return [multiline[char]]
        return [self._fold(re.escape(char))]

    def _fold(self, atom: str) -> str:
        return f"(?i:{atom})" if "i" in self._flags else atom

    def _group(self) -> list[str]:
        outside = self._flags
        if self._next(2) != "(?":
            self._at += 1
        elif found := self._matched(_FLAGS):
            if found[3] == ")" and not found[1] and not found[2]:
                raise self._error("no flags")
            self._flags = outside.union(found[1]).difference(found[2] or "")
            if found[3] == ")":
                return []
        elif not self._matched(_GROUP_NAME):
            raise self._error("a group that Go has not")
        inside = self._alternatives()
        if self._next() != ")":
            raise self._error("missing )")
        self._at += 1
        self._flags = outside
        return [inside]

    # --- escapes and classes -----------------------------------------------------------------------------------------

    def _escape(self) -> str:
        """What stands behind a backslash outside of brackets."""
        char = self._next()
        fixed = {"A": r"\A", "z": r"\Z", "b": _BOUNDARY, "B": f"(?!{_BOUNDARY})"}.get(char)
        if fixed:
            self._at += 1
            return fixed
        group = self._perl_class()
        return self._fold(f"[{group}]" if group is not None else _code(self._character()))

    def _perl_class(self) -> str | None:
        """The inside of the class of an escape such as ``d`` or ``pL``; None when it is none."""
        char = self._next()
        if char and char in "dswDSW":
            self._at += 1
            return _PERL[char] if char.islower() else _inverse(_PERL[char.lower()])
        if char not in ("p", "P"):
            return None
        self._at += 1
        found = self._matched(_PROPERTY)
        name = (found[2] or found[4]) if found else ""
        members = _category(name)
        if found is None or members is None:
            raise self._error("a character class that is not known")
        is_inverse = (char == "P") != bool(found[1] or found[3])
        return _inverse(members) if is_inverse else members

    def _character(self) -> int:
        """The character of an escape."""
        char = self._next()
        self._at += 1
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char and char in "01234567":
            octal = self._matched(re.compile(r"[0-7]{0,2}"))
            if octal is not None and (char == "0" or octal[0]):
                return int(char + octal[0], 8)
        elif char == "x":
            found = self._matched(re.compile(r"\{([0-9a-fA-F]+)\}|([0-9a-fA-F]{2})"))
            if found and int(found[1] or found[2], 16) <= sys.maxunicode:
                return int(found[1] or found[2], 16)
        elif char and char.isascii() and not char.isalnum():
            return ord(char)
        raise self._error("an escape that Go has not")

    def _class(self) -> str:
        """A class in brackets."""
        self._at += 1
        negation = ""
        if self._next() == "^":
            negation = "^"
            self._at += 1
        members: list[str] = []
        while not members or self._next() != "]":
            members.append(self._member())
        self._at += 1
        return self._fold(f"[{negation}{''.join(members)}]")

    def _member(self) -> str:
        posix = self._matched(_POSIX_NAME)
        if posix is None and self._next(2) == "[:" and ":]" in self._pattern[self._at + 2 :]:
            raise self._error("a character class that is not known")
        if posix:
            if posix[2] not in _POSIX:
                raise self._error("a character class that is not known")
            return _inverse(_POSIX[posix[2]]) if posix[1] else _POSIX[posix[2]]
        if self._next() == "\\":
            self._at += 1
            group = self._perl_class()
            if group is not None:
                return group
            self._at -= 1
        low = self._class_character()
        if self._next() != "-" or self._next(2) in ("-", "-]"):
            return _code(low)
        self._at += 1
        high = self._class_character()
        if high < low:
            raise self._error("a range that ends before it begins")
        return f"{_code(low)}-{_code(high)}"

    def _class_character(self) -> int:
        char = self._next()
        if not char:
            raise self._error("missing ]")
        self._at += 1
        return self._character() if char == "\\" else ord(char)


def _code(character: int) -> str:
    return f"\\U{character:08x}"


def _inverse(members: str) -> str:
    """The inside of a class of all other characters."""
    return _members(re.compile(f"[^{members}]"))


@functools.lru_cache(maxsize=64)
def _members(one: re.Pattern[str]) -> str:
    return _ranges([code for code in range(sys.maxunicode + 1) if one.match(chr(code))])


@functools.lru_cache(maxsize=64)
def _category(name: str) -> str | None:
    """The inside of a class of all characters of a Unicode category, such as L or Lu; None when there is none."""
    if name == "Any":
        return _ranges(range(sys.maxunicode + 1))
    if not re.fullmatch("[A-Z][a-z]?", name):
        return None
    codes = [code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)).startswith(name)]
    return _ranges(codes) if codes else None


def _ranges(codes: list[int] | range) -> str:
    """Ascending numbers of characters as ranges."""
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"{_code(first)}-{_code(last)}" for first, last in ranges)
