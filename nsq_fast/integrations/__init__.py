"""Task queues on NSQ. Each module needs its own extra, and is imported by nothing else."""
