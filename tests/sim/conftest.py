"""A test that is ``async def`` and takes ``loop`` runs in virtual time; its name is the seed of what chance does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from .clock import SimLoop
from .runner import in_virtual_time


@pytest.fixture
def loop(request: pytest.FixtureRequest) -> Callable[[Callable[[SimLoop], Any]], Any]:
    return partial(in_virtual_time, request.node.name)
