"""One kind of server: what clients of threads do beside each kind stands in tests/contract."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "nsqd_process" in metafunc.fixturenames:
        metafunc.definition.add_marker(pytest.mark.parametrize("nsqd_process", ["embedded"], indirect=True))
