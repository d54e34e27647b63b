"""What a Consumer is made of: subscriptions, flow, workers, and what follows a handler."""
