"""The log of a partition: ids, offsets, sizes, finding, forgetting."""

from __future__ import annotations

from nsq_fast.broker.redesigned.log import Draft, PartitionLog


def test_offsets_are_sums_of_sizes() -> None:
    log = PartitionLog(partition=2, is_ext=False)
    records = log.append([Draft(b"a" * n, trace_id=n) for n in range(1, 6)])
    assert [record.size for record in records] == [31, 32, 33, 34, 35]
    assert [record.offset for record in records] == [0, 31, 63, 96, 130]
    assert [record.internal_id for record in records] == [(2 << 50) + 2 + n for n in range(5)]
    assert [record.trace_id for record in records] == [1, 2, 3, 4, 5]
    assert log.end_offset == 165


def test_sizes_with_ext() -> None:
    log = PartitionLog(partition=0, is_ext=True)
    plain, headed = log.append([Draft(b"12345678"), Draft(b"EB", header=b"x" * 27)])
    assert (plain.size, plain.ext, plain.header) == (39, b"\0", b"")
    assert (headed.size, headed.ext[:3], headed.header) == (62, b"\x04\0\x1b", b"x" * 27)


def test_records_are_found() -> None:
    log = PartitionLog(partition=1, is_ext=False)
    records = log.append([Draft(b"x")] * 10)
    assert [log.at_offset(offset) for offset in (0, 1, 31, 309, 310)] == [0, 1, 1, 10, 10]
    assert log.at_time(records[0].timestamp) == 0
    assert log.at_time(records[0].timestamp + 1) == 10
    assert [log.at_id((1 << 50) + n) for n in (0, 2, 4, 99)] == [0, 0, 2, 9]
    assert [record.sequence for record in log.read(8, 5)] == [8, 9]
    assert (log.offset_of(3), log.offset_of(10)) == (93, 310)


def test_records_before_an_offset_are_forgotten() -> None:
    log = PartitionLog(partition=0, is_ext=False)
    log.append([Draft(b"x")] * 10)
    log.drop_before(log.at_offset(32))
    assert (log.first, log.end, log.start_offset, log.end_offset) == (2, 10, 62, 310)
    log.drop_before(log.at_offset(310))
    assert (log.first, log.end, log.start_offset) == (10, 10, 310)
    assert log.append([Draft(b"x")])[0].sequence == 10


def test_old_records_are_forgotten() -> None:
    log = PartitionLog(partition=0, is_ext=False)
    log.append([Draft(b"x")] * 30_000)
    log.trim(30_000, keep=25_000)
    assert log.first == 0  # not worth it yet
    log.trim(28_000, keep=1_000)
    assert (log.first, log.end, log.start_offset) == (27_000, 30_000, 27_000 * 31)
    assert log.read(0, 1)[0].sequence == 27_000
    assert log.append([Draft(b"x")])[0].offset == 30_000 * 31
    assert log.at_offset(0) == 27_000
