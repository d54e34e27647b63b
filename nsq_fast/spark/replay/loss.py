"""Offsets that are gone before a query has read them: an error, or a warning where ``failOnDataLoss`` is false."""

from __future__ import annotations

from nsq_fast.errors import DataLost
from nsq_fast.spark.options import SourceOptions


def checked_loss(options: SourceOptions, partition: int, offsets: tuple[int, int], reason: str) -> DataLost:
    """The loss, for a warning, where the query may go on behind it; raises it where ``failOnDataLoss`` is true.

    Args:
        offsets: the first that is lost, and the first behind them.
        reason: what the log is like now.
    """
    if options.fail_on_data_loss:
        raise DataLost(options.topic, partition, offsets, reason, "failOnDataLoss=false goes on behind them")
    return DataLost(options.topic, partition, offsets, reason)
