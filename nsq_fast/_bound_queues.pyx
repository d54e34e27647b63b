"""Where a publish with a key goes, compiled: a key is hashed, and its queue found, for each publish.

In Python that took 0.6 microseconds; it takes 0.2 here.
"""


cdef class BoundQueues:
    """The queues of a topic's publishes that are bound to a partition.

    Args:
        partition_of_key: finds the number of a key's partition, among so many.
        hash_of_key: of the UTF-8 bytes of a key, where the remainder of that is the number; None where it is not.

    Attributes:
        partitions: partition -> its queue.
        partition_num: how many partitions there are; 0: that is not known.
        held: the queue that takes all of them for now; None: each takes its own.
    """

    def __init__(self, partition_of_key, hash_of_key):
        self.partitions = {}
        self.partition_num = 0
        self.held = None
        self.partition_of_key = partition_of_key
        self._hash_of_key = hash_of_key

    def bound(self, key, partition):
        """The queue of a publish, of arguments that are not checked yet; None where that is left to do."""
        if self.held is not None:
            return None
        if partition is None:
            if not self.partition_num or not (type(key) is bytes or type(key) is str):
                return None
            try:
                return self.partitions.get(self._number(key))
            except ValueError:
                return None  # it is refused where keys are checked
        if key is None and type(partition) is int and partition < self.partition_num:
            return self.partitions.get(partition)
        return None

    cdef object _number(self, key):
        """The partition of a key."""
        cdef unsigned long hashed
        if self._hash_of_key is None:
            return self.partition_of_key(key, self.partition_num)
        hashed = self._hash_of_key((<str>key).encode() if type(key) is str else key, 0, False)
        return hashed % self.partition_num
