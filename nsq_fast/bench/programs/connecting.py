"""How the clients of nsq_fast connect to the servers of a job."""

import json
import os


def client_options():
    """What the servers ask for, TLS and AUTH; from the environment, since everybody on a machine can read the arguments
    of its processes."""
    return json.loads(os.environ.get("NSQ_FAST_BENCH_CLIENT_OPTIONS", "{}"))


def connection_options(job):
    """The same, with the compression and the buffering that the job asks for."""
    options = client_options()
    if job["compression"]:
        options[job["compression"]] = True
    if job["unbuffered"]:
        options["output_buffer_size"] = -1
    return options
