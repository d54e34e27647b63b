"""The redesigned dialect of the embedded broker: partitions, leaders, replicas, ordered channels, tracing, ext."""
