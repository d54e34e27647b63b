"""Where the documents of dynamic configuration come from: the contract of a source, which programs may implement."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable


class ConfigDocument(NamedTuple):
    """One version of a document.

    Attributes:
        content: JSON or TOML as ``form`` says, or a mapping.
        mark: differs from version to version: a time, an ETag, an index.
    """

    content: bytes | str | Mapping[str, Any]
    mark: Hashable
    form: str = "json"


@runtime_checkable
class ConfigSource(Protocol):
    """Something that a document is read from, for the option ``config_source`` of Consumer and Producer.

    ``str(source)`` is what logs and errors call it. Several clients may share one.
    """

    def next(self, last: ConfigDocument | None) -> ConfigDocument:
        """Return the document, once there is one that is not ``last``: None stands for any.

        Called in a greenlet of the client, which it may block, and nothing else; killed when the client closes. For a
        client that runs on asyncio it may be ``async def``; if it is not, it is called in a thread of its own, and
        left alone when the client closes. What it raises says why there is no document now: it is called again after a
        pause.
        """
