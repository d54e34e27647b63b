"""The messages of the main job: a sequence number, the time of the publish, padding."""

from __future__ import annotations

import struct

HEAD = struct.Struct(">QQ")  # sequence number; perf_counter_ns when published, 0: latency is not measured
