"""What tests share. A module stands here when tests of two folders use it.

Servers:
    servers         processes of nsqd and nsqlookupd, real and embedded, back on their ports, which are held; processes
    cluster         a real redesigned cluster with etcd, on hosts of its own if need be, or one nsqd alone
    fleet           one face over the embedded cluster and the real one, for clients
    peers           the other end of one connection, played by a function
    scripted_nsqd   an nsqd that does what a test says, and what signals tell; partitions: of the redesigned NSQ;
                    publishing: for producers
    held_publishes  the same for producers in threads of their own
    http_server     a server of HTTP that answers as a test says, and servers in threads of their own
Talking to servers:
    wire, redesigned, http      commands, frames and requests by hand
    transcripts                 the same steps on two servers: differential says how answers are compared, sequences
                                puts steps together at random, replay has recorded ones
Clients:
    contract        one scenario on every face; loops
    ledger          what clients did with messages, and what it means
    scenarios       proofs on a cluster that is well; on one that has every fault: tests/bad_days
    worker, spans, browser      what programs and pages show
Waiting, kinds of tests, the compiled core and its oracle:
    waiting, kinds, compiled, oracle, properties
"""
