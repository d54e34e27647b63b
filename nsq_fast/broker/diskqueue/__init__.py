"""What an nsqd keeps on disk: the log of each topic."""
