"""Options that can be read as attributes of a consumer, under the names that its arguments have."""

from __future__ import annotations

from typing import Any

from nsq_fast.config import ConsumerConfig, LookupConfig


class OptionAttribute:
    """An option that stands in a config of its owner: ``consumer.max_tries`` for ``consumer.config.max_tries``."""

    def __init__(self, config: str) -> None:
        self._config = config
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object | None, owner: type) -> Any:
        return self if instance is None else getattr(getattr(instance, self._config), self._name)

    def __set__(self, instance: object, value: object) -> None:
        raise AttributeError(f"{self._name} cannot be changed: give it when making the {type(instance).__name__}")


class ConsumerOptions:
    """The options of a consumer that gnsq shows as attributes too. Only ``max_in_flight`` can be set."""

    config: ConsumerConfig
    lookup_config: LookupConfig

    max_tries = OptionAttribute("config")
    requeue_delay = OptionAttribute("config")
    low_ready_idle_timeout = OptionAttribute("config")
    max_backoff_duration = OptionAttribute("config")
    backoff_on_requeue = OptionAttribute("config")
    lookupd_poll_interval = OptionAttribute("lookup_config")
    lookupd_poll_jitter = OptionAttribute("lookup_config")
