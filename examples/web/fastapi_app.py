"""FastAPI: a producer and a consumer that live as long as the application.

NSQD=127.0.0.1:4150 uvicorn fastapi_app:app
curl -X POST http://127.0.0.1:8000/orders -d 'a pair of shoes'
"""

import os
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, Request

from nsq_fast.aio import Consumer, Producer
from nsq_fast.errors import PublishFailed

NSQD = os.environ.get("NSQD", "127.0.0.1:4150")
handled: list[str] = []


async def handle(consumer, message):
    handled.append(message.body.decode())


@asynccontextmanager
async def lifespan(app):
    async with Producer(NSQD) as producer, Consumer("orders", "web", NSQD, message_handler=handle, max_in_flight=10):
        app.state.producer = producer
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/health")
async def health():
    if not app.state.producer.is_connected:
        raise HTTPException(503, "no nsqd is connected")
    return {"handled": len(handled)}


@app.post("/orders", status_code=202)
async def order(request: Request):
    try:
        await app.state.producer.publish("orders", await request.body(), timeout=5)
    except PublishFailed as error:
        raise HTTPException(503, f"not stored: {error}") from error
    return {"stored": True}
