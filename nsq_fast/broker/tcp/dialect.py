"""What makes an nsqd's TCP face speak the original's dialect, or the redesigned one."""

from __future__ import annotations

from typing import NamedTuple

from .command_set import CommandSet
from .commands import COMMANDS
from .connection import Connection
from .identify import Negotiation


class Dialect(NamedTuple):
    """A way to speak: what clients may say, what IDENTIFY settles, and what serves each of them."""

    commands: CommandSet
    negotiation: Negotiation
    connection: type[Connection]


ORIGINAL = Dialect(COMMANDS, Negotiation(), Connection)
