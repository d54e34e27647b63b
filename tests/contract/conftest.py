"""The faces, and an nsqd that has messages."""

from __future__ import annotations

from typing import Any

import pytest
from support.contract import FACES, Face

from nsq_fast.threads import Producer


@pytest.fixture(params=FACES, ids=lambda face: str(face.name))
def face(request: pytest.FixtureRequest) -> Face:
    """Each in turn."""
    found: Face = request.param
    return found


@pytest.fixture
def filled(nsqd_process: Any) -> str:
    """An nsqd with the messages 0 to 99 in the topic t."""
    with Producer(nsqd_process.address) as producer:
        producer.multipublish("t", [b"%d" % number for number in range(100)])
    return str(nsqd_process.address)
