"""Options are checked when a config is made; nothing wrong gets further."""

import pytest

from nsq_fast.config import ConnectionConfig, ConsumerConfig, LookupConfig, ProducerConfig, split_options
from nsq_fast.errors import ConfigError, NsqError


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"heartbeat_interval": 0.5}, "heartbeat_interval=0.5: must be a number, 1.0 to 60.0 s"),
        ({"heartbeat_interval": float("nan")}, "heartbeat_interval=nan: must be a number"),
        ({"output_buffer_size": 63}, "64 to 65536 bytes, or -1, or 0"),
        ({"output_buffer_timeout": 5000}, "25 to 1000 ms"),
        ({"deflate_level": 10}, "deflate_level=10: must be a whole number, 1 to 9"),
        ({"sample_rate": 100}, "0 to 99 %"),
        ({"msg_timeout": 0.1}, "1.0 to 900.0 s, or None"),
        ({"snappy": "maybe"}, "snappy='maybe': must be true or false"),
        ({"snappy": 1}, "snappy=1: must be true or false"),
        ({"deflate_level": True}, "deflate_level=True: must be a whole number"),
        ({"client_id": 7}, "client_id=7: must be a string, or None"),
        ({"max_frame_size": "big"}, "max_frame_size='big': must be a whole number"),
        ({"snappy": True, "deflate": True}, "snappy=True with deflate=True"),
        ({"hostname": "box\ud800"}, "hostname='box\\ud800': must not hold lone surrogates"),
        ({"auth_secret": "\ud800"}, "auth_secret='***': must not hold lone surrogates"),
        ({"snapy": True}, "unknown option 'snapy'; did you mean 'snappy'?"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options, complaint):
    with pytest.raises(ConfigError) as caught:
        ConnectionConfig.of(options)
    assert complaint in str(caught.value)
    assert isinstance(caught.value, NsqError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("config", [ConnectionConfig, ConsumerConfig, ProducerConfig, LookupConfig])
def test_what_is_not_in_seconds_says_so_in_its_text_and_in_its_error(config):
    words = {"ms": "milliseconds", "%": "percent", "bytes": "bytes"}
    for name, option in config.OPTIONS.items():
        if option.unit in ("", "s"):
            continue
        word = words[option.unit]
        assert option.unit == "bytes" or word in option.doc, name
        for wrong in (0.5, "soon"):
            with pytest.raises(ConfigError, match=word):
                config(**{name: wrong})


def test_strings_are_read_as_the_option_wants_them():
    config = ConnectionConfig(heartbeat_interval="2.5", snappy="yes", output_buffer_size="-1", msg_timeout="60")
    assert (config.heartbeat_interval, config.snappy, config.output_buffer_size) == (2.5, True, -1)
    assert config.msg_timeout == 60.0


def test_secrets_stay_out_of_repr_and_errors():
    assert "hunter2" not in repr(ConnectionConfig(auth_secret="hunter2"))


def test_replace_checks_like_a_new_one():
    config = ConsumerConfig().replace(max_in_flight=7)
    assert config.max_in_flight == 7
    with pytest.raises(ConfigError, match="max_in_flight=-1"):
        config.replace(max_in_flight=-1)
    with pytest.raises(ConfigError, match="max_in_flght"):
        config.replace(max_in_flght=1)


def test_options_are_shared_out_by_name():
    consumer, connection = split_options({"max_tries": 9, "snappy": True}, ConsumerConfig, ConnectionConfig)
    assert consumer.max_tries == 9
    assert connection.snappy
    with pytest.raises(ConfigError, match="unknown option 'linger'"):
        list(split_options({"linger": 1.0}, ConsumerConfig, ConnectionConfig))


@pytest.mark.parametrize("options", [{"auth_secret": 5}, {"ext_filter": "x"}, {"ext_filter": [1]}])
def test_secret_and_filter_have_their_types(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ConnectionConfig(**options)


RULE = {"filter_ext_key": "k", "filter_data": "v"}


@pytest.mark.parametrize(
    "value",
    [
        {"type": 1, **RULE},
        {"type": 2, "inverse": True, **RULE},
        {"type": 3, **RULE},
        {"type": 4, "filter_ext_key": "any", "filter_data_list": [RULE, RULE]},
    ],
)
def test_the_four_kinds_of_ext_filters(value):
    assert ConnectionConfig(ext_filter=value).ext_filter == value


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"type": 5, **RULE},
        {"type": 1, "filter_ext_key": "k"},
        {"type": 1, "filter_ext_key": "", "filter_data": "v"},
        {"type": 1, "filter_ext_key": "k", "filter_data": 7},
        {"type": 1, "filter_ext_key": "k", "filter_data": ""},
        {"type": 2, "filter_ext_key": "k", "filter_data": "a(?!b)"},
        {"type": 3, "filter_ext_key": "k", "filter_data": "[v"},
        {"type": 1, "inverse": "yes", **RULE},
        {"type": 1, "filter": "x", **RULE},
        {"type": 4, "filter_ext_key": "some", "filter_data_list": [RULE]},
        {"type": 4, "filter_ext_key": "all", "filter_data_list": []},
        {"type": 4, "filter_ext_key": "all", "filter_data_list": ["k"]},
    ],
)
def test_an_ext_filter_that_servers_would_ignore_is_refused(value):
    with pytest.raises(ConfigError):
        ConnectionConfig(ext_filter=value)
