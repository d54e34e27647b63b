"""Publishes that say nothing but a topic and a body, compiled: handed over, waited for, and taken together.

Each thread that publishes needs the interpreter's lock (GIL) before and after
it waits, as an event loop does for each of its tasks, and so does the thread
that serves them all. While one has it the others sleep. How long a call keeps
it decides how much sixteen threads or a hundred tasks publish (``nsq-fast bench
publish --client "nsq_fast threads" --client "nsq_fast aio" --mode concurrent``).
"""

from collections import deque

from nsq_fast._latch cimport Latch


cdef class PlainPublish:
    """One such publish. ``ThreadPublisher`` and ``TaskPublisher`` make it.

    Attributes:
        topic, content: where it goes, and its body.
        awaited: what its caller waits for: a Latch, or a future of an event loop.
        callers: told when it has ended, to wake its caller at once or soon; see ``runtime.crossing.requests.Callers``.
        result, error: what its caller gets, or what is raised there.
        is_cancelled: its caller was interrupted or cancelled, and waits no longer.
        parts, job: see ``PublishRequest``, which it is treated as where it cannot be sent with others.
    """

    def __cinit__(self):
        self.parts = ()

    def set(self, value=None):
        """It went well."""
        self.result = value
        self.callers.answer(self)

    def set_exception(self, error):
        """It did not."""
        self.error = error
        self.callers.answer(self)

    def set_here(self, value):
        """It went well. In the loop of the future that its caller awaits."""
        self.result = value
        self.settle()

    def settle(self):
        """Give the future what it has ended with, unless its task was cancelled. In the loop of the future."""
        future = self.awaited
        if future.done():
            return
        if self.error is None:
            future.set_result(self.result)
        else:
            future.set_exception(self.error)

    @staticmethod
    def settle_all(list requests):
        """``settle`` each. Once more is no harm."""
        cdef PlainPublish request
        for request in requests:
            request.settle()


cdef class RequestQueue:
    """What other threads ask of a producer.

    Args:
        new: makes a PlainPublish; a class of its own may say more of it.
        usual_result: what a plain publish returns unless ``set`` said otherwise.
        thread: where the producer is: ``submit`` has a function called there; ``is_over`` says that it ended.
        take: called there, to take what there is.

    Attributes:
        requests: those that are not taken: a deque of PlainPublish, and of others.
        is_taking: they will be taken soon: whoever adds one need not have that done.
    """

    def __init__(self, new, usual_result, thread, take):
        self.requests = deque()
        self.is_taking = False
        self.thread = thread
        self._new = new
        self._usual_result = usual_result
        self._take = take
        self._append = self.requests.append
        self._popleft = self.requests.popleft
        self._appendleft = self.requests.appendleft

    cpdef hand_over(self, request):
        """Have it taken soon, with all others of the moment. In any thread. Raises NotRunning."""
        self._append(request)
        # That the thread has failed is looked at afterwards: it looks at the requests after it has said so.
        if not self.is_taking or self.thread.is_over:
            self.is_taking = True
            self.thread.submit(self._take)

    cdef PlainPublish plain(self, topic, body, awaited, callers):
        """A publish that is not handed over yet."""
        cdef PlainPublish request = self._new()
        request.topic = topic
        request.content = body
        request.awaited = awaited
        request.callers = callers
        request.result = self._usual_result
        return request

    def take_alike(self, Py_ssize_t most):
        """Take the plain publishes at the head of the queue that go to one topic, ``most`` at most, and their bodies.

        Both lists are empty where there is none at its head. What tells their callers is the same for all.
        """
        cdef list taken = [], bodies = []
        cdef PlainPublish request
        cdef str topic = None
        callers = None
        while self.requests and len(taken) < most:
            head = self._popleft()
            if not isinstance(head, PlainPublish):
                self._appendleft(head)
                break
            request = head
            if request.is_cancelled:
                continue
            if topic is None:
                topic, callers = request.topic, request.callers
            elif request.topic != topic or request.callers is not callers:
                self._appendleft(head)
                break
            taken.append(request)
            bodies.append(request.content)
        return taken, bodies


cdef class ThreadPublisher:
    """Publishes for threads, each of which waits.

    Args:
        queue: where the publishes are handed over.
        callers: that of each PlainPublish, which waits for a Latch.
        abandon: called in the producer's thread with a PlainPublish whose caller was interrupted.
        hub_of_thread: the hub of the calling thread, whose greenlets must not be blocked; None without one.
    """

    def __init__(self, RequestQueue queue not None, callers, abandon, hub_of_thread):
        self._queue = queue
        self._callers = callers
        self._abandon = abandon
        self._hub_of_thread = hub_of_thread

    def publish(self, topic, body):
        """Publish and block the thread until that has ended; return the result, or raise the error.

        None: it is not for this to do, and nothing was done: there is more to check, or no thread to hand it over to.
        """
        cdef RequestQueue queue = self._queue
        cdef PlainPublish request
        cdef Latch latch
        if type(topic) is not str or type(body) is not bytes or queue.thread.is_over:
            return None
        if self._hub_of_thread() is not None:
            return None
        latch = Latch()
        request = queue.plain(topic, body, latch, self._callers)
        queue.hand_over(request)
        try:
            latch.block(None)
        except BaseException:
            if not latch.is_open:
                queue.thread.submit(self._abandon, request)
            raise
        if request.error is not None:
            raise request.error
        return request.result


cdef class TaskPublisher:
    """Publishes for the tasks of one event loop.

    Args:
        queue: where the publishes are handed over.
        callers: that of each PlainPublish, which waits for a future of the loop.
        loop: the loop.
        running_loop: ``asyncio.get_running_loop``.
        direct: sends while the producer's thread sleeps, see ``runtime.crossing.direct``.
    """

    def __init__(self, RequestQueue queue not None, callers, loop, running_loop, direct):
        self._queue = queue
        self._callers = callers
        self._loop = loop
        self._running_loop = running_loop
        self._create_future = loop.create_future
        self._permit = direct.permit
        self._try_send = direct.try_send

    def publish(self, topic, body, bint is_handed_over):
        """Publish, and return the PlainPublish whose future the task has to await.

        None: it is not for this to do, and nothing was done: there is more to check, this is another loop, there is no
        thread to hand it over to, or that would have to be done and ``is_handed_over`` says no.
        """
        cdef RequestQueue queue = self._queue
        cdef PlainPublish request
        if type(topic) is not str or type(body) is not bytes or queue.thread.is_over:
            return None
        if self._running_loop() is not self._loop or not (is_handed_over or self._permit.number):
            return None
        request = queue.plain(topic, body, self._create_future(), self._callers)
        if self._permit.number:
            publish = self._try_send(topic, body, request)
            if publish is not None:
                request.parts = (publish,)
                return request
            if not is_handed_over:
                return None
        queue.hand_over(request)
        return request
