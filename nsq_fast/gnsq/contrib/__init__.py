"""Handlers for common needs: batches, queues, giving up, reporting to Sentry."""
