"""Flask on threads: one producer for all of them.

NSQD=127.0.0.1:4150 gunicorn -k gthread --threads 8 flask_app:app
curl -X POST http://127.0.0.1:8000/orders -d 'a pair of shoes'
"""

import os

from flask import Flask, request

from nsq_fast.errors import PublishFailed
from nsq_fast.threads import Producer

app = Flask(__name__)
producer = Producer(os.environ.get("NSQD", "127.0.0.1:4150"))
producer.start()


@app.post("/orders")
def order():
    try:
        producer.publish("orders", request.get_data(), timeout=5)
    except PublishFailed as error:
        return {"error": str(error)}, 503
    return {"stored": True}, 202


@app.get("/health")
def health():
    return ({"ok": True}, 200) if producer.is_connected else ({"error": "no nsqd is connected"}, 503)
