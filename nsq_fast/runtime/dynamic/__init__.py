"""Dynamic configuration: documents from outside, followed while a client runs."""
