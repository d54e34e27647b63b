"""Publishes of threads that say nothing but a topic and a body, compiled: handed over, waited for, and taken together.

Each thread that publishes needs the interpreter's lock (GIL) before and after
it waits, and so does the thread that serves them all. While one has it the
others sleep. How long a call keeps it decides how much sixteen threads publish
(``nsq-fast bench publish --client "nsq_fast threads" --mode concurrent``).
"""

from collections import deque

from nsq_fast._latch cimport Latch


cdef class PlainPublish(Latch):
    """One such publish; its thread waits until it is opened. ``RequestQueue.publish`` makes it.

    Attributes:
        topic, content: where it goes, and its body.
        answer: called with it when it has ended, to open it at once or soon.
        result, error: what its caller gets, or what is raised there.
        is_cancelled: its caller was interrupted, and waits no longer.
        parts, job: see ``PublishRequest``, which it is treated as where it cannot be sent with others.
    """

    def __cinit__(self):
        self.parts = ()

    def set(self, value=None):
        """It went well."""
        self.result = value
        self.answer(self)

    def set_exception(self, error):
        """It did not."""
        self.error = error
        self.answer(self)


cdef class RequestQueue:
    """What threads ask of a producer in another thread.

    Args:
        new: makes a PlainPublish; a class of its own may say more of it.
        usual_result: what a plain publish returns unless ``set`` said otherwise.
        answer: that of each PlainPublish.
        thread: where the producer is: ``submit`` has a function called there; ``is_over`` says that it ended.
        take: called there, to take what there is.
        abandon: called there with a PlainPublish whose caller was interrupted.
        hub_of_thread: the hub of the calling thread, whose greenlets must not be blocked; None without one.

    Attributes:
        requests: those that are not taken: a deque of PlainPublish, and of others.
        is_taking: they will be taken soon: whoever adds one need not have that done.
    """

    def __init__(self, new, usual_result, answer, thread, take, abandon, hub_of_thread):
        self.requests = deque()
        self.is_taking = False
        self._new = new
        self._usual_result = usual_result
        self._answer = answer
        self._thread = thread
        self._take = take
        self._abandon = abandon
        self._hub_of_thread = hub_of_thread
        self._append = self.requests.append
        self._popleft = self.requests.popleft
        self._appendleft = self.requests.appendleft

    def publish(self, topic, body):
        """Publish and block the thread until that has ended; return the result, or raise the error.

        None: it is not for this to do, and nothing was done: there is more to check, or no thread to hand it over to.
        """
        cdef PlainPublish request
        if type(topic) is not str or type(body) is not bytes or self._thread.is_over:
            return None
        if self._hub_of_thread() is not None:
            return None
        request = self._new()
        request.topic = topic
        request.content = body
        request.answer = self._answer
        request.result = self._usual_result
        self._append(request)
        # That the thread has failed is looked at afterwards: it looks at the requests after it has said so.
        if not self.is_taking or self._thread.is_over:
            self.is_taking = True
            self._thread.submit(self._take)
        try:
            request.block(None)
        except BaseException:
            if not request.is_open:
                self._thread.submit(self._abandon, request)
            raise
        if request.error is not None:
            raise request.error
        return request.result

    def take_alike(self, Py_ssize_t most):
        """Take the plain publishes at the head of the queue that go to one topic, ``most`` at most, and their bodies.

        Both lists are empty where there is none at its head.
        """
        cdef list taken = [], bodies = []
        cdef PlainPublish request
        cdef str topic = None
        while self.requests and len(taken) < most:
            head = self._popleft()
            if not isinstance(head, PlainPublish):
                self._appendleft(head)
                break
            request = head
            if request.is_cancelled:
                continue
            if topic is None:
                topic = request.topic
            elif request.topic != topic:
                self._appendleft(head)
                break
            taken.append(request)
            bodies.append(request.content)
        return taken, bodies
