"""The names of what is logged: one for each kind of event, on each log record as its attribute ``event``.

The text of a record may change from one version to the next; its event does not. A log call hands its event over as
``extra``: ``logger.info("%s: connected", address, extra=CONNECTED)``. ``docs/logs.md`` has the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MEANINGS: dict[str, str] = {}
"""The name of each event -> what has happened."""


def _event(name: str, meaning: str) -> Mapping[str, object]:
    """What a log call takes as ``extra``. Raises ValueError for a name that exists."""
    if name in MEANINGS:
        raise ValueError(f"event {name!r} exists")
    MEANINGS[name] = meaning
    return MappingProxyType({"event": name})


# Connections and subscriptions

CONNECTED = _event("connected", "a connection to an nsqd is made")
DISCONNECTED = _event("disconnected", "a connection has ended, and why")
CONNECT_FAILED = _event("connect_failed", "a producer cannot connect to an nsqd and keeps trying")
CONNECTION_LOST = _event("connection_lost", "a producer's connection has ended without its wish")
CONNECTION_STALLED = _event("connection_stalled", "an nsqd owes replies: it gets no publishes until they come")
CONNECTION_RECOVERED = _event("connection_recovered", "a stalled connection has replied and gets publishes again")
HEARTBEAT_LATE = _event("heartbeat_late", "an nsqd has been silent for longer than its heartbeat interval")
SERVER_ERROR = _event("server_error", "an nsqd sent an error that belongs to no command")
SUBSCRIBED = _event("subscribed", "a connection is subscribed to its channel")
SUBSCRIPTION_FAILED = _event("subscription_failed", "a consumer cannot connect, or subscribe; an ERROR is final")
SUBSCRIPTION_LOST = _event("subscription_lost", "a consumer's connection has ended without its wish")
SUBSCRIPTION_RENEWED = _event(
    "subscription_renewed", "an nsqd says that messages wait and sends none: it is subscribed to anew"
)
SUBSCRIPTION_MODE = _event("subscription_mode", "how a topic of a redesigned cluster is subscribed to")
OPTION_IDLE = _event("option_idle", "an option of a consumer has no effect on a topic, whose messages have no headers")

# Lookup

LOOKUPD_FAILED = _event("lookupd_failed", "an nsqlookupd gives no good answer")
LOOKUPD_RECOVERED = _event("lookupd_recovered", "an nsqlookupd that failed gives good answers again")
LOOKUPDS_LEARNT = _event("lookupds_learnt", "an nsqlookupd named others of its cluster")
LOOKUP_UNANSWERED = _event("lookup_unanswered", "no nsqlookupd gives a good answer: what was known stays in use")
TOPIC_UNKNOWN = _event("topic_unknown", "no nsqlookupd knows the topic yet")
TOPIC_FOUND = _event("topic_found", "an nsqlookupd knows the topic now")
TOPIC_MATCHED = _event("topic_matched", "a topic that a consumer's pattern matches is listed: it is consumed")
TOPIC_LEFT = _event("topic_left", "a topic that a consumer's pattern matches is listed no longer")
NSQD_LEFT = _event("nsqd_left", "lookup no longer names an nsqd whose connection has ended: it is left")
TOPICS_UNKNOWN = _event("topics_unknown", "nothing that lookup lists matches a consumer's pattern, or nobody answers")
PARTITIONS_MISSING = _event("partitions_missing", "the topic lacks partitions that partitions or start_position names")
DISCOVERY_EXCLUDED = _event(
    "discovery_excluded", "discovery_filter leaves out all nsqds of a topic, or a partition's leader"
)
DISCOVERY_FAILED = _event("discovery_failed", "discovery_filter raised: what was known stays in use")
LEADER_MOVED = _event("leader_moved", "a partition has another leader")

# Dynamic configuration

CONFIG_CHANGED = _event("config_changed", "a document of the config source is applied: what it changes")
CONFIG_REFUSED = _event("config_refused", "a document of the config source is not valid: what was before stays")
CONFIG_AWAY = _event("config_away", "the config source cannot be read: what it said last stays")
CONFIG_BACK = _event("config_back", "a config source that could not be read can be read again")


# Messages and their handlers

HANDLER_FAILED = _event("handler_failed", "a handler or a give-up policy raised; the message is requeued")
HANDLER_DEFERRED = _event("handler_deferred", "a handler returned work that nobody runs; its message is requeued")
HANDLER_KILLED = _event("handler_killed", "the greenlet of a handler was killed; its message is requeued")
HANDLER_SLOW = _event("handler_slow", "a message is still being handled, and nsqd takes it back soon")
EXIT_IGNORED = _event("exit_ignored", "a handler or a callback called sys.exit() in the hub thread, which goes on")
RECEIVER_FAILED = _event("receiver_failed", "a receiver of a signal raised")
MESSAGE_FAILS_AGAIN = _event("message_fails_again", "a message has more attempts than attempts_threshold")
MESSAGE_GIVEN_UP = _event("message_given_up", "a message has too many attempts and is finished unhandled")
MESSAGE_OUTDATED = _event("message_outdated", "a message is older than max_age, and goes to max_age_policy")
MESSAGE_UNREADABLE = _event("message_unreadable", "a body is too large, or cannot be decompressed")
MESSAGES_EXPIRED = _event("messages_expired", "messages were not responded to in time; nsqd delivers them again")
RESPONSE_FAILED = _event("response_failed", "an nsqd refused a FIN, REQ or TOUCH: it had taken the message back")
RESPONSE_LOST = _event("response_lost", "a connection ended before a FIN or REQ; nsqd delivers the message again")
ORDER_VIOLATED = _event("order_violated", "a message of an ordered partition lies before one delivered earlier")
PARTITION_BLOCKED = _event("partition_blocked", "an ordered message has more attempts than attempts_threshold")
START_POSITION_SET = _event("start_position_set", "a channel begins where start_position says")
START_POSITION_BEYOND = _event(
    "start_position_beyond", "a channel was to begin beyond the end of the log, and stands at the end"
)
START_POSITION_KEPT = _event("start_position_kept", "a channel has begun before: start_position changes nothing")

# Flow

BACKOFF_BEGAN = _event("backoff_began", "a consumer pauses after failures")
BACKOFF_ENDED = _event("backoff_ended", "a consumer asks for messages as before the backoff")
MAX_IN_FLIGHT_LOW = _event("max_in_flight_low", "max_in_flight is less than the number of connections")
MAX_IN_FLIGHT_HIGH = _event("max_in_flight_high", "handlers are too slow for max_in_flight: fewer are asked for")
PUBLISHES_WAIT = _event("publishes_wait", "publishes to a topic wait for an nsqd")
KEYS_UNORDERED = _event("keys_unordered", "keys give no order in a topic of the original NSQ")
COMPRESSION_OFF = _event("compression_off", "a topic carries no extended headers: bodies are not compressed")

# Beginning and end

STARTED_ALREADY = _event("started_already", "start was called again and does nothing")
CONSUMER_FAILED = _event("consumer_failed", "a consumer closes because of an error that no new attempt cures")
CLOSE_WAITS = _event("close_waits", "close waits, and for what")
CLOSE_TIMED_OUT = _event("close_timed_out", "the time for closing was over before all was responded to")
CLOSE_FAILED = _event("close_failed", "something failed while it was being closed")
MESSAGES_REQUEUED = _event("messages_requeued", "what handlers had not finished at the end was requeued")
PRIORITY_IGNORED = _event("priority_ignored", "a task of Celery has a priority, which NSQ has not")
HUB_THREAD_FAILED = _event("hub_thread_failed", "the hub thread of nsq_fast.threads has ended; another one is made")
PUBLISHES_UNCONFIRMED = _event("publishes_unconfirmed", "the program ended before publishes were confirmed")
INTERNAL_ERROR = _event("internal_error", "a defect of nsq_fast; what was at work begins again")
METRICS_FAILED = _event("metrics_failed", "the figures of a client, or of a program, cannot be read")

# The worker

WORKER_LISTENING = _event("worker_listening", "the supervisor answers probes and scrapes")
WORKER_PROCESS_STARTED = _event("worker_process_started", "a process of a worker is started")
WORKER_PROCESS_ENDED = _event("worker_process_ended", "a process has ended that was asked to")
WORKER_PROCESS_DIED = _event("worker_process_died", "a process has ended by itself, and why")
WORKER_PROCESS_DELAYED = _event("worker_process_delayed", "a process is started again after a pause")
WORKER_PROCESS_LATE = _event("worker_process_late", "a process is not ready, or has not ended, in time")
WORKER_PROGRAM_FAILED = _event("worker_program_failed", "the program of a worker cannot be run")
WORKER_OPTIONS_UNUSED = _event("worker_options_unused", "the file has options of a subscription that is not declared")
WORKER_CONSUMER_CLOSED = _event("worker_consumer_closed", "a consumer of a worker is closed, and what it has done")
WORKER_RESTART_BEGAN = _event("worker_restart_began", "the processes are replaced one by one")
WORKER_RESTART_ENDED = _event("worker_restart_ended", "the processes are replaced; an ERROR says that not all are")
WORKER_DRAINING = _event("worker_draining", "processes finish what they have begun, and end")
WORKER_KILLED = _event("worker_killed", "a second signal ended the processes at once")

# The exporter

EXPORTER_NSQD_FAILED = _event("exporter_nsqd_failed", "an nsqd does not answer the exporter")
EXPORTER_NSQD_RECOVERED = _event("exporter_nsqd_recovered", "an nsqd that failed answers the exporter again")

# Traced messages

TRACE_PUBLISHED = _event("trace_published", "a traced message was published")
TRACE_RECEIVED = _event("trace_received", "a traced message was received")
TRACE_CONSUMED = _event("trace_consumed", "a traced message was responded to")

# Spark

SPARK_BATCH_WRITTEN = _event("spark_batch_written", "a batch of rows is published")
SPARK_WRITE_ABORTED = _event("spark_write_aborted", "a write broke off; some of its rows may be stored")
SPARK_REPORT_FAILED = _event("spark_report_failed", "the report of a write cannot be kept; what it wrote stays")
SPARK_DATA_LOST = _event("spark_data_lost", "rows that were to be read are not there any more")
SPARK_READ_AGAIN = _event("spark_read_again", "the connection of a read has ended; it goes on from where it was")
SPARK_READ_PARTIAL = _event("spark_read_partial", "a batch read saw fewer messages than the channel has")
SPARK_MESSAGES_LATE = _event("spark_messages_late", "messages came too late to be kept; nsqd delivers them again")
SPARK_SLOT_EMPTY = _event("spark_slot_empty", "a slot of a batch gets no messages, and why")
SPARK_CONNECTION_LOST = _event("spark_connection_lost", "a slot has lost its connection")
SPARK_LOOKUP_FAILED = _event("spark_lookup_failed", "a server does not say what the source asks of it")
SPARK_WAITS = _event("spark_waits", "the source waits, and for what")
SPARK_WAIT_OVER = _event("spark_wait_over", "what the source waited for is there")
SPARK_POSITION_LATER = _event("spark_position_later", "the channel of a partition is moved at a later commit")
SPARK_ORPHANS = _event("spark_orphans", "rows that a query with another checkpoint has not committed")
SPARK_JOURNAL_CLEANED = _event("spark_journal_cleaned", "a batch of the journal was gone before")
SPARK_JOURNAL_CLEAN_FAILED = _event("spark_journal_clean_failed", "files of the journal cannot be deleted yet")
SPARK_ERROR = _event("spark_error", "the stack of an error that Spark shows without it")

# The embedded broker

BROKER_LISTENING = _event("broker_listening", "a server accepts connections")
BROKER_START_FAILED = _event("broker_start_failed", "a server cannot start")
BROKER_AUTH_FAILED = _event("broker_auth_failed", "the auth server cannot be asked, or refused a client")
BROKER_CLIENT_REFUSED = _event("broker_client_refused", "a command of a client was answered with an error")
BROKER_CLIENT_DISCONNECTED = _event("broker_client_disconnected", "the connection of a client has ended")
BROKER_NSQD_JOINED = _event("broker_nsqd_joined", "an nsqd registered at the nsqlookupd")
BROKER_NSQD_LEFT = _event("broker_nsqd_left", "an nsqd has left the nsqlookupd")
BROKER_LOOKUPD_REGISTERED = _event("broker_lookupd_registered", "the nsqd is registered at an nsqlookupd")
BROKER_LOOKUPD_FAILED = _event("broker_lookupd_failed", "an nsqlookupd does not answer the nsqd")
BROKER_STATSD_FAILED = _event("broker_statsd_failed", "figures cannot be sent to statsd")
BROKER_WRITE_FAILED = _event("broker_write_failed", "the data folder cannot be written; it is tried again")
BROKER_OPTION_IGNORED = _event("broker_option_ignored", "a flag or a line of the configuration file has no effect")
BROKER_READ_FAILED = _event("broker_read_failed", "messages of the data folder cannot be read; it is tried again")
BROKER_READ_RECOVERED = _event("broker_read_recovered", "messages of the data folder can be read again")
BROKER_WRITE_RECOVERED = _event("broker_write_recovered", "the data folder can be written again")
BROKER_REPLICA_FAILED = _event("broker_replica_failed", "a replica cannot be written: it is out of sync until it can")
BROKER_REPLICA_RECOVERED = _event("broker_replica_recovered", "a replica that was not in sync has caught up")
BROKER_DATA_DAMAGED = _event("broker_data_damaged", "a file of messages is damaged, or lacks messages")
BROKER_METADATA_INVALID = _event("broker_metadata_invalid", "a file of metadata is missing, damaged or incomplete")
BROKER_FILE_IGNORED = _event("broker_file_ignored", "a file in the data folder is none of the broker's")
BROKER_NODE_STAYS = _event("broker_node_stays", "a node that is to leave has what no other node can take")
BROKER_MESSAGE_TRACED = _event(
    "broker_message_traced", "what became of a traced message, in the words of a redesigned nsqd"
)
BROKER_INTERNAL_ERROR = _event("broker_internal_error", "a defect of the broker, while it answered an HTTP request")
