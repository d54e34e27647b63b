"""HTTP for nsqd and nsqlookupd: routes, requests, and how replies look."""
