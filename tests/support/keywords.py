"""Writes nsq_fast/keywords.pyi, the options as type checkers see them, from where they are declared."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path

import nsq_fast
from nsq_fast.config import Config, ConnectionConfig, ConsumerConfig, LookupConfig, ProducerConfig
from nsq_fast.worker.settings import CONSUMER_OPTIONS

STUB = Path(nsq_fast.__file__).parent / "keywords.pyi"
HEAD = '''\
"""The options of Consumer and Producer as type checkers see them: the fields of the classes in ``config``.

A misspelt option, or one of the wrong type, is an error of mypy and pyright before the program runs. Nothing here is
there at run time. Options that have a parameter of their own are left out, as typing demands. Written by
tests/support/keywords.py: do not edit.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from .client.dynamic import ConfigSource
from .client.publishes import Headers
from .protocol.publishing import Key
'''


def stub() -> str:
    """The text of the stub."""
    of_consumer = _own(nsq_fast.Consumer)
    connection, lookup, consumer = map(_fields, (ConnectionConfig, LookupConfig, ConsumerConfig))
    known = {**connection, **lookup, **consumer}
    both = {name: kind for name, kind in lookup.items() if name not in of_consumer}
    taken = {*connection, *both}
    own = {name: kind for name, kind in consumer.items() if name not in of_consumer}
    declared = {name: known.get(name, "Any") for name in sorted(CONSUMER_OPTIONS - {*taken, *own})}
    of_producer = {**lookup, **_fields(ProducerConfig)}
    published = {name: kind for name, kind in of_producer.items() if name not in {*taken, *_own(nsq_fast.Producer)}}
    base = "ConnectionKeywords, LookupKeywords"
    return HEAD + "".join(
        (
            _class("ConnectionKeywords", "TypedDict", "The options of ConnectionConfig.", connection),
            _class("LookupKeywords", "TypedDict", "The options of LookupConfig but the parameters of Consumer.", both),
            _class("ConsumerKeywords", base, "The options of a Consumer.", own),
            _class(
                "SubscriptionKeywords",
                "ConsumerKeywords",
                "What the handler of a worker may be declared with: options and parameters of a Consumer.",
                declared,
            ),
            _class("ProducerKeywords", base, "The options of a Producer.", published),
            *(
                _class(f"{name.title()}Keywords", "TypedDict", f"The keywords of ``{name}``.", _keywords_of(name))
                for name in ("publish", "multipublish")
            ),
        )
    )


def _own(client: type) -> frozenset[str]:
    return frozenset(inspect.signature(client).parameters)


def _keywords_of(method: str) -> dict[str, str]:
    parameters = inspect.signature(getattr(nsq_fast.Producer, method)).parameters.values()
    return {each.name: each.annotation for each in parameters if each.kind is each.KEYWORD_ONLY}


def _fields(config: type[Config]) -> dict[str, str]:
    kinds = {field.name: str(field.type) for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    if "config_source" in kinds:  # Any there: its class is imported only by who uses it, and help() asks for all names
        kinds["config_source"] = "ConfigSource | None"
    return kinds


def _class(name: str, base: str, doc: str, fields: Mapping[str, str]) -> str:
    lines = [f"class {name}({base}, total=False):", f'    """{doc}"""', ""]
    lines += [f"    {field}: {kind}" for field, kind in fields.items()]
    return "\n".join(["", *lines, ""])


if __name__ == "__main__":
    STUB.write_text(stub())
