"""What tests of asyncio's clients begin with."""

from __future__ import annotations

from typing import Any

import pytest

from nsq_fast.threads import Producer


@pytest.fixture
def filled(nsqd_process: Any, request: pytest.FixtureRequest) -> str:
    """An nsqd with as many messages in the topic t as the module says with ``FILLED``: 0, 1, and so on."""
    with Producer(nsqd_process.address) as producer:
        producer.multipublish("t", [b"%d" % number for number in range(request.module.FILLED)])
    return str(nsqd_process.address)
