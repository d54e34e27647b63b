"""What native threads need, whatever a program has patched; found without gevent, where a program does not use it."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def get_original(module: str, name: str) -> Any:
    """The attribute of a module as it was before ``gevent.monkey`` patched it, if it did."""
    monkey = sys.modules.get("gevent.monkey")
    return getattr(importlib.import_module(module), name) if monkey is None else monkey.get_original(module, name)
