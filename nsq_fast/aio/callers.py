"""The tasks of a loop that wait for publishes: what came back for many of them crosses as one call."""

from __future__ import annotations

from collections.abc import Sequence

from nsq_fast.runtime import PlainRequest

from .gate import LoopGate


class WaitingTasks:
    """Tasks, each of which awaits the future of its request. See ``runtime.crossing.requests.Callers``."""

    def __init__(self, gate: LoopGate) -> None:
        self._gate = gate

    def taken(self, requests: Sequence[PlainRequest]) -> None:
        """They need nothing more."""

    def answer(self, request: PlainRequest) -> None:
        """It has ended: its task goes on soon."""
        self._gate.post(request.settle)

    def answer_all(self, requests: list[PlainRequest]) -> None:
        """As ``answer``, for several."""
        self._gate.post(self._settle_all, requests)

    def _settle_all(self, requests: list[PlainRequest]) -> None:
        try:
            PlainRequest.settle_all(requests)
        except BaseException:  # the program was interrupted
            self._gate.loop.call_soon(PlainRequest.settle_all, requests)
            raise
