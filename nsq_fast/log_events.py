"""The names of what is logged: one for each kind of event, on each log record as its attribute ``event``.

The text of a record may change from one version to the next; its event does not. A log call hands its event over as
``extra``: ``logger.info("%s: connected", address, extra=CONNECTED)``. ``docs/logs.md`` says what each means.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def _event(name: str) -> Mapping[str, object]:
    """What a log call takes as ``extra``."""
    return MappingProxyType({"event": name})


# Connections and subscriptions

CONNECTED = _event("connected")
DISCONNECTED = _event("disconnected")
CONNECT_FAILED = _event("connect_failed")
CONNECTION_LOST = _event("connection_lost")
CONNECTION_STALLED = _event("connection_stalled")
CONNECTION_RECOVERED = _event("connection_recovered")
HEARTBEAT_LATE = _event("heartbeat_late")
SERVER_ERROR = _event("server_error")
SUBSCRIBED = _event("subscribed")
SUBSCRIPTION_FAILED = _event("subscription_failed")
SUBSCRIPTION_LOST = _event("subscription_lost")
SUBSCRIPTION_RENEWED = _event("subscription_renewed")
SUBSCRIPTION_MODE = _event("subscription_mode")
OPTION_IDLE = _event("option_idle")

# Lookup

LOOKUPD_FAILED = _event("lookupd_failed")
LOOKUPD_RECOVERED = _event("lookupd_recovered")
LOOKUPDS_LEARNT = _event("lookupds_learnt")
LOOKUP_UNANSWERED = _event("lookup_unanswered")
TOPIC_UNKNOWN = _event("topic_unknown")
TOPIC_FOUND = _event("topic_found")
TOPIC_MATCHED = _event("topic_matched")
TOPIC_LEFT = _event("topic_left")
NSQD_LEFT = _event("nsqd_left")
TOPICS_UNKNOWN = _event("topics_unknown")
PARTITIONS_MISSING = _event("partitions_missing")
DISCOVERY_EXCLUDED = _event("discovery_excluded")
DISCOVERY_FAILED = _event("discovery_failed")
LEADER_MOVED = _event("leader_moved")

# Dynamic configuration

CONFIG_CHANGED = _event("config_changed")
CONFIG_REFUSED = _event("config_refused")
CONFIG_AWAY = _event("config_away")
CONFIG_BACK = _event("config_back")


# Messages and their handlers

HANDLER_FAILED = _event("handler_failed")
HANDLER_DEFERRED = _event("handler_deferred")
HANDLER_KILLED = _event("handler_killed")
HANDLER_SLOW = _event("handler_slow")
EXIT_IGNORED = _event("exit_ignored")
RECEIVER_FAILED = _event("receiver_failed")
MESSAGE_FAILS_AGAIN = _event("message_fails_again")
MESSAGE_GIVEN_UP = _event("message_given_up")
GIVE_UP_CIRCULAR = _event("give_up_circular")
MESSAGE_OUTDATED = _event("message_outdated")
MESSAGE_UNREADABLE = _event("message_unreadable")
MESSAGES_EXPIRED = _event("messages_expired")
RESPONSE_FAILED = _event("response_failed")
RESPONSE_REPEATED = _event("response_repeated")
RESPONSE_LOST = _event("response_lost")
ORDER_VIOLATED = _event("order_violated")
PARTITION_BLOCKED = _event("partition_blocked")
START_POSITION_SET = _event("start_position_set")
START_POSITION_BEYOND = _event("start_position_beyond")
START_POSITION_KEPT = _event("start_position_kept")

# Flow

BACKOFF_BEGAN = _event("backoff_began")
BACKOFF_ENDED = _event("backoff_ended")
MAX_IN_FLIGHT_LOW = _event("max_in_flight_low")
MAX_IN_FLIGHT_HIGH = _event("max_in_flight_high")
PUBLISHES_WAIT = _event("publishes_wait")
KEYS_UNORDERED = _event("keys_unordered")
COMPRESSION_OFF = _event("compression_off")

# Beginning and end

STARTED_ALREADY = _event("started_already")
CONSUMER_FAILED = _event("consumer_failed")
CLOSE_WAITS = _event("close_waits")
CLOSE_TIMED_OUT = _event("close_timed_out")
CLOSE_FAILED = _event("close_failed")
MESSAGES_REQUEUED = _event("messages_requeued")
PRIORITY_IGNORED = _event("priority_ignored")
HUB_THREAD_FAILED = _event("hub_thread_failed")
PUBLISHES_UNCONFIRMED = _event("publishes_unconfirmed")
INTERNAL_ERROR = _event("internal_error")
METRICS_FAILED = _event("metrics_failed")

# The worker

WORKER_LISTENING = _event("worker_listening")
WORKER_PROCESS_STARTED = _event("worker_process_started")
WORKER_PROCESS_ENDED = _event("worker_process_ended")
WORKER_PROCESS_DIED = _event("worker_process_died")
WORKER_PROCESS_DELAYED = _event("worker_process_delayed")
WORKER_PROCESS_LATE = _event("worker_process_late")
WORKER_PROGRAM_FAILED = _event("worker_program_failed")
WORKER_OPTIONS_UNUSED = _event("worker_options_unused")
WORKER_CONSUMER_CLOSED = _event("worker_consumer_closed")
WORKER_RESTART_BEGAN = _event("worker_restart_began")
WORKER_RESTART_ENDED = _event("worker_restart_ended")
WORKER_DRAINING = _event("worker_draining")
WORKER_KILLED = _event("worker_killed")
WORKER_LOGS_LEFT_OUT = _event("worker_logs_left_out")

# The exporter

EXPORTER_NSQD_FAILED = _event("exporter_nsqd_failed")
EXPORTER_NSQD_RECOVERED = _event("exporter_nsqd_recovered")

# Traced messages

TRACE_PUBLISHED = _event("trace_published")
TRACE_RECEIVED = _event("trace_received")
TRACE_CONSUMED = _event("trace_consumed")

# Spark

SPARK_BATCH_WRITTEN = _event("spark_batch_written")
SPARK_WRITE_ABORTED = _event("spark_write_aborted")
SPARK_REPORT_FAILED = _event("spark_report_failed")
SPARK_DATA_LOST = _event("spark_data_lost")
SPARK_READ_AGAIN = _event("spark_read_again")
SPARK_READ_PARTIAL = _event("spark_read_partial")
SPARK_MESSAGES_LATE = _event("spark_messages_late")
SPARK_SLOT_EMPTY = _event("spark_slot_empty")
SPARK_CONNECTION_LOST = _event("spark_connection_lost")
SPARK_LOOKUP_FAILED = _event("spark_lookup_failed")
SPARK_WAITS = _event("spark_waits")
SPARK_WAIT_OVER = _event("spark_wait_over")
SPARK_POSITION_LATER = _event("spark_position_later")
SPARK_ORPHANS = _event("spark_orphans")
SPARK_JOURNAL_CLEANED = _event("spark_journal_cleaned")
SPARK_JOURNAL_CLEAN_FAILED = _event("spark_journal_clean_failed")
SPARK_ERROR = _event("spark_error")

# The embedded broker

BROKER_LISTENING = _event("broker_listening")
BROKER_START_FAILED = _event("broker_start_failed")
BROKER_AUTH_FAILED = _event("broker_auth_failed")
BROKER_CLIENT_REFUSED = _event("broker_client_refused")
BROKER_CLIENT_DISCONNECTED = _event("broker_client_disconnected")
BROKER_NSQD_JOINED = _event("broker_nsqd_joined")
BROKER_NSQD_LEFT = _event("broker_nsqd_left")
BROKER_LOOKUPD_REGISTERED = _event("broker_lookupd_registered")
BROKER_LOOKUPD_FAILED = _event("broker_lookupd_failed")
BROKER_STATSD_FAILED = _event("broker_statsd_failed")
BROKER_WRITE_FAILED = _event("broker_write_failed")
BROKER_OPTION_IGNORED = _event("broker_option_ignored")
BROKER_READ_FAILED = _event("broker_read_failed")
BROKER_READ_RECOVERED = _event("broker_read_recovered")
BROKER_WRITE_RECOVERED = _event("broker_write_recovered")
BROKER_REPLICA_FAILED = _event("broker_replica_failed")
BROKER_REPLICA_RECOVERED = _event("broker_replica_recovered")
BROKER_DATA_DAMAGED = _event("broker_data_damaged")
BROKER_METADATA_INVALID = _event("broker_metadata_invalid")
BROKER_FILE_IGNORED = _event("broker_file_ignored")
BROKER_NODE_STAYS = _event("broker_node_stays")
BROKER_MESSAGE_TRACED = _event("broker_message_traced")
BROKER_INTERNAL_ERROR = _event("broker_internal_error")
