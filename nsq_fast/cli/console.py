"""Where tables go: as wide as the terminal, and as wide as they need to be in a pipe or a file."""

from __future__ import annotations

from rich.console import Console

_PIPE_WIDTH = 240


def output() -> Console:
    """A console on standard output."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)
