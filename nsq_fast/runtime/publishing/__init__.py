"""What a Producer is made of: routes to links, batches, retries, deadlines."""
