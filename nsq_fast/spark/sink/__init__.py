"""The sink: rows of a DataFrame become messages. Arrow batches go in, MPUB commands go out; no object for each row."""
