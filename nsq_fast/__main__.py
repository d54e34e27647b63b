"""`python -m nsq_fast` is the `nsq-fast` command."""

from .cli import main

main(prog_name="nsq-fast")
