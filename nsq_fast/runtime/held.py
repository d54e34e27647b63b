"""Which messages were received and not yet answered, for whoever sees them as columns of ids.

Nothing is done per message while answers keep pace: counts tell when all is
answered, and then there is nothing to remember. Only when they do not, the
ids are compared, now and then.
"""

from __future__ import annotations

from nsq_fast.errors import ConfigError

ID_SIZE = 16
# Ids kept before received and answered ones are compared.
COMPARE_AT = 50_000


class HeldIds:
    """The ids received and not answered. Ids come and go side by side, 16 bytes each.

    Attributes:
        count: how many there are. An id that is answered twice counts twice.
    """

    def __init__(self) -> None:
        self.count = 0
        self._received: list[bytes] = []
        self._answered: list[bytes] = []
        self._known = 0

    def add(self, ids: bytes) -> None:
        """These were received."""
        self._received.append(ids)
        self._known += len(ids) // ID_SIZE
        self.count += len(ids) // ID_SIZE
        if self._known > COMPARE_AT:
            self._compare()

    def remove(self, ids: bytes | memoryview) -> None:
        """These are answered. Raises ConfigError when they are not whole ids."""
        if len(ids) % ID_SIZE:
            raise ConfigError(f"ids must have a length that is a multiple of {ID_SIZE}, not {len(ids)}")
        self.count = max(0, self.count - len(ids) // ID_SIZE)
        if self.count:
            self._answered.append(bytes(ids))
        else:
            self._forget()

    def take(self) -> bytes:
        """All of them, in the order in which they came; none is held any more."""
        held = b"".join(self._compare())
        self._forget()
        return held

    def _compare(self) -> list[bytes]:
        answered = {each for ids in self._answered for each in _split(ids)}
        held = [each for ids in self._received for each in _split(ids) if each not in answered]
        self._forget()
        if held:
            self._received = [b"".join(held)]
        # Those that stay are not known again, or they would be compared at every read.
        self.count = len(held)
        return held

    def _forget(self) -> None:
        self._received.clear()
        self._answered.clear()
        self._known = self.count = 0


def _split(ids: bytes) -> list[bytes]:
    return [ids[at : at + ID_SIZE] for at in range(0, len(ids), ID_SIZE)]
