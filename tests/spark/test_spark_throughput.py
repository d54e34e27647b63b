"""Bytes a second of a query, with times that the test makes up."""

from __future__ import annotations

from nsq_fast.spark.pace import Throughput


def test_a_query_without_batches_reads_nothing() -> None:
    throughput = Throughput()
    assert throughput.rate(5.0) == 0.0
    throughput.begin(5.0)
    assert (throughput.rate(5.0), throughput.rate(9.0)) == (0.0, 0.0)


def test_the_rate_is_over_the_last_minute() -> None:
    throughput = Throughput()
    throughput.begin(0.0)
    for second in range(1, 301):
        throughput.add(100 if second <= 200 else 700, float(second))
        if second == 2:
            assert throughput.rate(2.0) == 100.0
    assert throughput.rate(300.0) == 700.0


def test_a_batch_of_an_hour_counts_over_its_hour() -> None:
    throughput = Throughput()
    throughput.begin(0.0)
    throughput.add(10, 10.0)
    throughput.add(3_600_000, 3610.0)
    assert throughput.rate(3610.0) == 1000.0


def test_a_query_without_news_slows_down() -> None:
    throughput = Throughput()
    throughput.begin(0.0)
    throughput.add(6000, 60.0)
    assert [throughput.rate(now) for now in (60.0, 120.0, 6000.0)] == [100.0, 50.0, 1.0]
