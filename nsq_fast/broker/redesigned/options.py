"""Options of the redesigned cluster: those of its nodes with the redesigned server's defaults, and its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nsq_fast.broker.options import LookupdOptions
from nsq_fast.config import Config, option

VERSION = "0.3.7-HA.1.13.0"
"""What the cluster reports as its version; clients know the dialect by the ``-HA.`` in it."""

NODE_DEFAULTS: Mapping[str, Any] = {
    "version": VERSION,
    "output_buffer_timeout": 0.05,
    "min_output_buffer_timeout": 0.001,
    "max_output_buffer_timeout": 1.0,
    "max_req_timeout": 3 * 24 * 3600.0,
}


class ClusterOptions(Config, frozen=True):
    """How the cluster as a whole behaves."""

    move_step: float = option(0.012, "what each of the three stages of a move of a leader takes", unit="s", minimum=0.0)
    takeover_delay: float = option(0.5, "how long after its death others lead what a node led", unit="s", minimum=0.0)
    migrate_delay: float = option(
        2.0, "how long after its death another node gets the replicas that a node had", unit="s", minimum=0.0
    )
    balance_interval: float = option(
        0.0, "time between two looks at whether the nodes have the same to do; 0: only on demand", unit="s", minimum=0.0
    )
    readiness: float = option(
        0.2, "longest time until a new partition has a leader, and until the cluster is stable", unit="s", minimum=0.0
    )
    kind: bool = option(
        False,
        "be ready at once, take publishes while one replica is in sync, and let messages pass those with other tags",
    )
    allow_write_with_nochannels: bool = option(False, "let lookups for writing show partitions without a channel")

    @property
    def ready_after(self) -> float:
        """``readiness``, or nothing where the cluster is kind."""
        return 0.0 if self.kind else self.readiness


def lookupd_options(options: Mapping[str, Any]) -> LookupdOptions:
    """Options of an nsqlookupd. Raises ConfigError for one that does not exist."""
    return LookupdOptions.of({"version": VERSION, "inactive_producer_timeout": 60.0, **options})
