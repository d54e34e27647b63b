"""The framing format of snappy, compiled: chunks are cut out, checked, and put together.

nsqd flushes after each write, so a chunk is 16 KiB at most and every read brings a few of them. A decoder of whole
streams makes its tables and buffers for each of these reads, which takes longer than to decompress what came
(``nsq-fast bench consume --compression snappy``). Here a chunk is decompressed to where it is read from.

The format: google/snappy, framing_format.txt.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.buffer cimport PyBUF_READ, PyBUF_WRITE
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcmp, memcpy

from nsq_fast.errors import RemoteProtocolError

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    /* CRC-32C (Castagnoli), reflected. table[k][b]: of the byte b with k bytes of zeros behind it. */
    static uint32_t crc_table[8][256];

    static void crc_fill_table(void)
    {
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t crc = byte;
            for (int bit = 0; bit < 8; bit++)
                crc = crc & 1 ? (crc >> 1) ^ UINT32_C(0x82f63b78) : crc >> 1;
            crc_table[0][byte] = crc;
        }
        for (uint32_t byte = 0; byte < 256; byte++)
            for (int zeros = 1; zeros < 8; zeros++) {
                uint32_t crc = crc_table[zeros - 1][byte];
                crc_table[zeros][byte] = (crc >> 8) ^ crc_table[0][crc & 0xff];
            }
    }

    static uint32_t crc_by_table(const uint8_t *data, size_t size)
    {
        uint32_t crc = UINT32_C(0xffffffff);
        for (; size >= 8; data += 8, size -= 8) {
            crc ^= (uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 | (uint32_t)data[3] << 24;
            crc = crc_table[7][crc & 0xff] ^ crc_table[6][crc >> 8 & 0xff] ^ crc_table[5][crc >> 16 & 0xff]
                ^ crc_table[4][crc >> 24] ^ crc_table[3][data[4]] ^ crc_table[2][data[5]] ^ crc_table[1][data[6]]
                ^ crc_table[0][data[7]];
        }
        for (; size; data++, size--)
            crc = (crc >> 8) ^ crc_table[0][(crc ^ *data) & 0xff];
        return ~crc;
    }

    #if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
    /* By an instruction that most have: a fifth of the time. */
    __attribute__((target("sse4.2")))
    static uint32_t crc_by_machine(const uint8_t *data, size_t size)
    {
        uint64_t crc = UINT32_C(0xffffffff), word;
        for (; size >= 8; data += 8, size -= 8) {
            memcpy(&word, data, 8);
            crc = __builtin_ia32_crc32di(crc, word);
        }
        for (; size; data++, size--)
            crc = __builtin_ia32_crc32qi((uint32_t)crc, *data);
        return ~(uint32_t)crc;
    }

    static uint32_t crc_of(const uint8_t *data, size_t size)
    {
        return __builtin_cpu_supports("sse4.2") ? crc_by_machine(data, size) : crc_by_table(data, size);
    }
    #else
    #define crc_of crc_by_table
    #endif
    """
    void crc_fill_table()
    uint32_t crc_by_table(const uint8_t* data, size_t size)
    uint32_t crc_of(const uint8_t* data, size_t size)

# Most of what a chunk holds, by the format. What a read returns is not more either.
cdef enum:
    PIECE = 65536
    HEADER = 4
    CRC = 4
    CRC_OF_NOTHING = 0xa282ead8
    # Compressed it may be longer by a sixth.
    LONGEST_BODY = 76_494  # CRC + 32 + PIECE + PIECE // 6

cdef enum Kind:
    COMPRESSED = 0x00
    UNCOMPRESSED = 0x01
    SKIPPABLE = 0x80  # and all above it, of which the last one begins a stream
    IDENTIFIER = 0xff

crc_fill_table()


def crc32c(bytes data not None, bint by_table=False):
    """The CRC-32C of some bytes; ``by_table``: as on a machine that has no instruction for it."""
    cdef const uint8_t* start = <const uint8_t*>PyBytes_AS_STRING(data)
    cdef size_t size = PyBytes_GET_SIZE(data)
    return crc_by_table(start, size) if by_table else crc_of(start, size)


cdef inline uint32_t little(const uint8_t* data) noexcept nogil:
    return <uint32_t>data[0] | <uint32_t>data[1] << 8 | <uint32_t>data[2] << 16 | <uint32_t>data[3] << 24


cdef Py_ssize_t size_before(const uint8_t* data, Py_ssize_t size) noexcept nogil:
    """The size that a compressed block says it had: a varint before it. -1: it says none, or more than is allowed."""
    cdef Py_ssize_t found = 0
    cdef int index
    for index in range(3):  # 64 Ki takes three bytes
        if index >= size:
            return -1
        found |= <Py_ssize_t>(data[index] & 0x7f) << 7 * index
        if not data[index] & 0x80:
            return found if found <= PIECE else -1
    return -1


cdef class SnappyChunks:
    """Bytes that came, cut anywhere, and what they hold.

    Args:
        decompress_into: writes what a block of snappy holds to a buffer of that size, and returns the size.
    """

    def __init__(self, decompress_into):
        self._decompress_into = decompress_into
        self._input = b""

    cpdef feed(self, bytes data):
        """Take encoded bytes."""
        if self._at:
            self._input = self._input[self._at:]
            self._at = 0
        self._input = self._input + data if self._input else data

    cpdef bytes read(self):
        """What the next whole chunks hold, up to 64 KiB; ``b""`` when more must be fed first.

        Raises RemoteProtocolError, once what comes before the broken chunk was read.
        """
        cdef Py_ssize_t size = self._size_of_next(), done = 0
        cdef Chunk chunk
        cdef bytes piece
        if not size:
            return b""
        piece = PyBytes_FromStringAndSize(NULL, size)
        while done < size:
            self._look(&chunk)
            if chunk.size:
                if not self._decode(&chunk, PyBytes_AS_STRING(piece) + done):
                    return self._before_broken(piece[:done])
                done += chunk.size
            self._at = chunk.end
        return piece

    cdef bytes _before_broken(self, bytes piece):
        if not piece:
            raise RemoteProtocolError("broken snappy stream: a chunk cannot be decompressed, or is not what was sent")
        return piece

    cdef Py_ssize_t _size_of_next(self) except -1:
        """How much the next chunks hold that are whole and make one piece. Where that is nothing, they are left behind.
        """
        cdef Py_ssize_t start = self._at, size = 0
        cdef Chunk chunk
        cdef State state
        while True:
            state = self._look(&chunk)
            if state != WHOLE or size + chunk.size > PIECE:
                break
            size += chunk.size
            self._at = chunk.end
        if size:
            self._at = start
        elif state == BROKEN:
            header = self._input[self._at:self._at + HEADER]
            raise RemoteProtocolError(f"broken snappy stream: no chunk of the format begins with {header!r}")
        return size

    cdef State _look(self, Chunk* chunk) noexcept:
        """What comes next."""
        cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(self._input) + self._at
        cdef Py_ssize_t left = PyBytes_GET_SIZE(self._input) - self._at, length
        if left < HEADER:
            return PARTIAL
        length = little(data) >> 8
        chunk.kind = data[0]
        chunk.end = self._at + HEADER + length
        chunk.size = 0
        if length > LONGEST_BODY or (UNCOMPRESSED < chunk.kind < SKIPPABLE):
            return BROKEN
        if left < HEADER + length:
            return PARTIAL
        if chunk.kind == IDENTIFIER:
            return WHOLE if length == 6 and memcmp(data + HEADER, b"sNaPpY", 6) == 0 else BROKEN
        if chunk.kind >= SKIPPABLE:
            return WHOLE
        if length < CRC:
            return BROKEN
        chunk.crc = little(data + HEADER)
        chunk.body = data + HEADER + CRC
        chunk.body_size = length - CRC
        chunk.size = chunk.body_size if chunk.kind == UNCOMPRESSED else size_before(chunk.body, chunk.body_size)
        if not chunk.size:  # nothing to decode, so it is checked here: no chunk with a broken size is left out
            return WHOLE if chunk.body_size == (chunk.kind == COMPRESSED) and chunk.crc == CRC_OF_NOTHING else BROKEN
        return WHOLE if 0 < chunk.size <= PIECE else BROKEN

    cdef bint _decode(self, Chunk* chunk, char* target) except -1:
        """Write what a chunk holds; whether that could be done, and is what was sent."""
        cdef uint32_t crc
        if chunk.kind == UNCOMPRESSED:
            memcpy(target, chunk.body, chunk.size)
        else:
            block = PyMemoryView_FromMemory(<char*>chunk.body, chunk.body_size, PyBUF_READ)
            room = PyMemoryView_FromMemory(target, chunk.size, PyBUF_WRITE)
            try:
                if self._decompress_into(block, room) != chunk.size:
                    return False
            except Exception:  # whatever class the library has for it
                return False
        crc = crc_of(<const uint8_t*>target, chunk.size)
        return ((crc >> 15 | crc << 17) + <uint32_t>CRC_OF_NOTHING) & <uint32_t>0xffffffff == chunk.crc
