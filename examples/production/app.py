"""What the worker of this folder runs: nsq-fast run app --config worker.toml"""

import json
import logging

from nsq_fast.worker import subscribe

logger = logging.getLogger("shop")


@subscribe("orders", "billing", concurrency=8)
async def bill(consumer, message):
    order = json.loads(message.body)
    logger.info("billed order %s", order["id"])
