"""Where tables go: as wide as the terminal, and as wide as they need to be in a pipe or a file.

Nothing is cut off: where a table is wider than the terminal, each row becomes a paragraph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import HEAVY_HEAD, Box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nsq_fast.errors import printable

_PIPE_WIDTH = 240


class _Output(Console):
    def on_broken_pipe(self) -> None:
        raise  # what rich was handling: it would exit with 1; the group of all commands decides


def output() -> Console:
    console = _Output(highlight=False)
    return console if console.is_terminal else _Output(highlight=False, width=_PIPE_WIDTH)


def grid(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    title: str = "",
    names: int = 1,
    numbers: bool = True,
    box: Box = HEAVY_HEAD,
) -> RenderableType:
    """Rows under a head, as a table where it fits into ``width``, else as a paragraph for each row.

    Cells may hold what servers said: nothing in them steers the terminal, or is taken as markup.

    Args:
        names: how many columns at the left name the row.
        numbers: whether the others are figures, set to the right.
    """
    table = Table(title=title or None, title_justify="left", box=box, pad_edge=box is HEAVY_HEAD)
    for place, column in enumerate(head):
        table.add_column(column, justify="right" if numbers and place >= names else "left", overflow="fold")
    rows = [[printable(cell) for cell in row] for row in rows]
    for row in rows:
        table.add_row(*map(Text, row))
    widest = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    if sum(widest) + 3 * len(widest) + 1 <= width:
        return table
    parts: list[RenderableType] = [Text(title, style="italic")] if title else []
    for row in rows:
        cells = zip(head[names:], row[names:], strict=True)
        shown = [Text(f"{name} {cell}", overflow="fold") for name, cell in cells if cell]
        parts += [Text(" ".join(filter(None, row[:names])), overflow="fold"), Padding(Columns(shown), (0, 0, 0, 2))]
    return Group(*parts)


def show(head: Sequence[str], rows: Sequence[Sequence[str]], **how: Any) -> None:
    """Print a grid."""
    console = output()
    console.print(grid(head, rows, console.width, **how))


def notes(title: str, rows: Sequence[tuple[str, str, str]]) -> Table:
    """Rows of a name, a value and a remark; the remarks are folded where there is no room."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", overflow="fold", no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
