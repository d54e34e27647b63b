"""Dynamic configuration: documents from outside, followed while a client runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsq_fast.config_source import ConfigSource
    from nsq_fast.runtime.supervised import Supervisor

    from .keeper import Apply, ConfigKeeper


def keeper_of(source: ConfigSource | None, apply: Apply, supervisor: Supervisor, name: str) -> ConfigKeeper | None:
    """The keeper of a client with the option ``config_source``; None without."""
    if source is None:
        return None
    from .keeper import ConfigKeeper  # most clients have none

    return ConfigKeeper(source, apply, supervisor, name)
