"""What the servers of a cluster say of themselves, for Prometheus: `nsq-fast exporter`. Needs the extra ``metrics``."""
