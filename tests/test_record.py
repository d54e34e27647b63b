"""Records are structs, and `dataclasses` takes them all the same."""

import dataclasses
import pickle

import pytest
from rich.pretty import pretty_repr

from nsq_fast.client.histogram import BOUNDS, HistogramStats
from nsq_fast.client.subscription import ConnectionStats, Counters
from nsq_fast.config import Config, ConnectionConfig, ConsumerConfig, option
from nsq_fast.errors import ConfigError
from nsq_fast.protocol import ExponentialBackoff

STATS = ConnectionStats(("host", 1), True, 1, 0, 0, Counters(received=3))


def test_dataclasses_names_the_fields_with_their_types_and_defaults() -> None:
    counts, total, bounds = dataclasses.fields(HistogramStats)
    assert (counts.name, total.name, bounds.name) == ("counts", "sum", "bounds")
    assert (counts.type, counts.default) == ("tuple[int, ...]", dataclasses.MISSING)
    assert bounds.default == BOUNDS


def test_dataclasses_makes_dicts_of_records_in_records() -> None:
    made = dataclasses.asdict(STATS)
    assert made["is_connected"] is True
    assert made["counters"]["received"] == 3


def test_dataclasses_replaces_fields_and_a_config_checks_them() -> None:
    assert dataclasses.replace(ExponentialBackoff(), base=2.0) == ExponentialBackoff(base=2.0)
    with pytest.raises(ConfigError, match="max_tries=-1"):
        dataclasses.replace(ConsumerConfig(), max_tries=-1)


@pytest.mark.parametrize("record", [STATS, ConsumerConfig(), ExponentialBackoff(), HistogramStats((1,), 0.5)])
def test_records_that_do_not_change_refuse_it_and_can_be_pickled(record) -> None:
    name = dataclasses.fields(record)[0].name
    with pytest.raises(AttributeError):
        setattr(record, name, getattr(record, name))
    assert pickle.loads(pickle.dumps(record)) == record


def test_secrets_stay_out_of_what_rich_prints() -> None:
    assert "hunter2" not in pretty_repr(ConnectionConfig(auth_secret="hunter2"))


def test_a_config_has_the_options_of_its_base_and_its_own() -> None:
    class More(ExtraConfig, frozen=True):
        second: int = option(2, "another", minimum=0, maximum=5)

    assert [*More.OPTIONS] == ["first", "second"]
    assert More(first="7", second="3") == More(7, 3)
    with pytest.raises(ConfigError, match="second=6"):
        More(second=6)


class ExtraConfig(Config, frozen=True):
    first: int = option(1, "one", minimum=0)
