"""The state of an nsqd: topics, channels and messages, and its HTTP routes."""
