"""Seeds for the fuzzers, from the conversations recorded with real servers: ``python fuzz/corpus.py FOLDER``.

One folder for each target. Those of the readers, of the session and of snappy begin with bytes that choose options.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import snappy  # type: ignore[import-untyped]

DATA = Path(__file__).parent.parent / "tests" / "data"
LONGEST = 4096

# Replies of nsqlookupd that no recorded conversation has: /lookup, /nodes and /listlookup, bare and in an envelope.
REPLIES = [
    b'{"channels":["c"],"producers":[{"remote_address":"127.0.0.1:1","hostname":"h","broadcast_address":"h",'
    b'"tcp_port":4150,"http_port":4151,"version":"1.3.0","tombstones":[false],"topics":["t"]}]}',
    b'{"status_code":200,"status_txt":"OK","data":{"channels":[],"producers":[],"partitions":{},"meta":{}}}',
    b'{"status_code":404,"status_txt":"TOPIC_NOT_FOUND","data":null}',
    b'{"lookupdnodes":[{"NodeIP":"127.0.0.1","TcpPort":"4160","HttpPort":"4161"}],"lookupdleader":{}}',
    b'{"message":"TOPIC_NOT_FOUND"}',
]


def conversations() -> Iterator[tuple[str, dict[str, object], bytes, bytes]]:
    """Dialect, record, and all that was sent and received, of each recorded conversation.

    Others of the files hold what two servers are compared with: patterns, sequences of steps.
    """
    for path in sorted(DATA.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if not isinstance(record, dict) or "dialect" not in record:
                continue
            steps = [step for step in record.get("steps", []) if step[0] in ("send", "recv")]
            sent = b"".join(bytes.fromhex(data) for kind, data in steps if kind == "send")
            received = b"".join(bytes.fromhex(data) for kind, data in steps if kind == "recv")
            yield str(record["dialect"]), record, sent, received


def main(folder: Path) -> None:
    """Write the seeds of all targets."""
    for target in ("readers", "session", "lookup", "http", "snappy"):
        (folder / target).mkdir(parents=True, exist_ok=True)
    for number, (dialect, record, sent, received) in enumerate(conversations()):
        detail = b"SUB_ADVANCED " in sent or b"SUB_ORDERED " in sent
        ext = b"extend_support" in sent
        for limit in range(4):
            choices = bytes([detail | ext << 1 | limit << 2, 3, 40])
            write(folder / "readers" / f"{number}-{limit}", choices + received[:LONGEST])
        for choices in (0, 4, 8, 28):
            first = bytes([(dialect == "redesigned") | ext << 1 | choices])
            write(folder / "session" / f"{number}-{choices}", first + received[:LONGEST])
        write(folder / "snappy" / f"{number}", bytes([3, 40]) + snapped(received[:LONGEST]))
        for name, text in texts(record):
            write_reply(folder, f"{number}-{name}", text)
    for number, text in enumerate(REPLIES):
        write_reply(folder, f"reply-{number}", text)


def snapped(data: bytes) -> bytes:
    """A stream of the framing format, as nsqd sends it: a chunk for each write."""
    compressor = snappy.StreamCompressor()
    return b"".join(bytes(compressor.compress(data[at : at + 200])) for at in range(0, max(len(data), 1), 200))


def write_reply(folder: Path, name: str, text: bytes) -> None:
    """A reply of an nsqlookupd, bare and as HTTP."""
    write(folder / "lookup" / name, text)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nContent-Type: application/json\r\n\r\n" % len(text)
    write(folder / "http" / name, head + text)
    chunked = b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)
    write(folder / "http" / f"{name}-chunked", chunked)


def texts(record: dict[str, object]) -> Iterator[tuple[str, bytes]]:
    """JSON documents of a record that is one of HTTP."""
    for name, value in record.items():
        if name == "http":
            yield name, json.dumps(value).encode()


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
