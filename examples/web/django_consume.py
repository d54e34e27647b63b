"""A Django management command that consumes: ``shop/management/commands/consume.py``.

python manage.py consume orders --channel billing --nsqd 127.0.0.1:4150
"""

import signal

from django.core.management.base import BaseCommand
from django.db import close_old_connections

from nsq_fast.threads import Consumer


class Command(BaseCommand):
    help = "Handle the messages of a topic until SIGTERM or SIGINT."

    def add_arguments(self, parser):
        parser.add_argument("topic")
        parser.add_argument("--channel", default="django")
        parser.add_argument("--nsqd", default="127.0.0.1:4150")
        parser.add_argument("--threads", type=int, default=4)

    def handle(self, *, topic, channel, nsqd, threads, **options):
        consumer = Consumer(
            topic,
            channel,
            nsqd,
            message_handler=self.handle_message,
            handler_threads=threads,
            max_in_flight=2 * threads,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: consumer.close())
        consumer.start()  # until it is closed

    def handle_message(self, consumer, message):
        close_old_connections()  # each thread has its own, and the database may have closed it
        self.stdout.write(message.body.decode())
