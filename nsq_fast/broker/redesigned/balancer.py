"""Carries out what balancing wants: one move after the other, whenever the cluster is stable."""

from __future__ import annotations

import logging
import time

from gevent import Greenlet, sleep, spawn
from gevent.event import Event

from nsq_fast.log_events import BROKER_MOVE_FAILED, BROKER_NODE_STAYS

from .balancing import Move, Placement, next_move
from .coordinator import Coordinator
from .moves import ClusterError
from .options import ClusterOptions
from .state import ClusterState

logger = logging.getLogger("nsq_fast.broker.redesigned.balancer")

_POLL = 0.005
_PAUSE = 0.1
"""Seconds after a move that failed, and between two looks at a node that cannot be emptied: others may be possible."""


class Balancer:
    """Moves partitions. Nodes that leave are emptied at once, the others balanced every ``balance_interval``, if any.

    Args:
        state: what the cluster knows.
        options: how often it looks.
        coordinator: carries out the moves.
    """

    def __init__(self, state: ClusterState, options: ClusterOptions, coordinator: Coordinator) -> None:
        self._state = state
        self._options = options
        self._coordinator = coordinator
        self._is_wanted = Event()
        self._told: set[str] = set()  # nodes of which it was said what they wait for
        self._loop: Greenlet[..., None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._loop = spawn(self._run)
        self._loop.name = "cluster-balancer"

    def stop(self) -> None:
        """End."""
        if self._loop is not None:
            self._loop.kill()
            self._loop = None

    def empty(self, node: str) -> None:
        """A node is to have nothing in the end: it gets no more partitions, and others get those that it has."""
        self._state.leaving.add(node)
        self._is_wanted.set()

    def is_empty(self, node: str) -> bool:
        """Whether a node has no partition."""
        return not any(node in partition.replicas for partition in self._state.all_partitions())

    def balance(self) -> int:
        """Move until no move helps; how many there were. Raises ClusterError when one is refused."""
        count = 0
        while (move := self._next()) is not None:
            self._carry_out(move)
            count += 1
        return count

    # --- by itself ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        interval = self._options.balance_interval
        pause = interval or None
        while True:
            is_wanted = self._is_wanted.wait(pause)
            self._is_wanted.clear()
            try:
                if is_wanted or not interval:
                    self._empty_leaving()
                else:
                    self.balance()
            except ClusterError as error:
                logger.warning("a partition was not moved: %s; it is tried again", error, extra=BROKER_MOVE_FAILED)
                sleep(_PAUSE)
                self._is_wanted.set()
            else:
                pause = interval or (_PAUSE if self._tell_what_waits() else None)

    def _empty_leaving(self) -> None:
        while (move := self._next()) is not None and move.origin in self._state.leaving:
            self._carry_out(move)

    def _tell_what_waits(self) -> bool:
        """Whether a node is to leave and cannot yet; that is said once."""
        waiting = {node for node in self._state.leaving if not self.is_empty(node)}
        for node in waiting - self._told:
            logger.warning(
                "node %s is to leave, and stays for now: no other node can take %s; it is emptied as soon as one can:"
                " add a node, start one that is down, or let the topic have fewer replicas",
                node,
                ", ".join(each.name for each in self._state.all_partitions() if node in each.replicas),
                extra=BROKER_NODE_STAYS,
            )
        self._told = waiting
        return bool(waiting)

    # --- moves -------------------------------------------------------------------------------------------------------

    def _next(self) -> Move | None:
        while not self._coordinator.is_stable:
            sleep(_POLL)
        reachable, hour = self._state.reachable, time.localtime().tm_hour
        placements = [
            Placement(
                partition.topic,
                partition.number,
                (partition.leader, *(node for node in partition.replicas if node != partition.leader)),
                partition.load(hour),
                partition.meta.may_share_nodes,
            )
            for partition in self._state.all_partitions()
            if partition.leader is not None
        ]
        nodes = [node for node in self._state.node_ids if node in reachable]
        return next_move(placements, nodes, self._state.leaving & reachable)

    def _carry_out(self, move: Move) -> None:
        self._coordinator.moves.move(move.topic, move.number, move.origin, move.target, is_leader=move.is_leader)
