"""What driver and ranks say to each other: typed msgpack messages, each after its length.

A frame is four bytes, the length of the payload as a big-endian integer, then the payload. What
does not decode to a message of the expected direction is refused; nothing is ever executed or
unpickled.
"""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any, Generic, TypeVar

import msgspec

from layline.engine.step_times import PassTimes
from layline.errors import RunError

_LENGTH = struct.Struct(">I")
MAX_FRAME = 1 << 28
_CHUNK = 1 << 16


class WireError(RunError):
    """What arrived on a control connection is not a message."""


class Pipeline(msgspec.Struct, array_like=True, frozen=True):
    """How the layers are cut into stages, and by stage the process and its device that run it."""

    fence: list[int]
    processes: list[int]
    devices: list[int]


class Start(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """First word to a rank: what to load, and where the ranks meet.

    ``engine`` are the fields of EngineConfig, ``meeting`` the file through which ranks find each
    other, or empty under torchrun; ``host`` is an address on the network that they share.
    ``device`` is the ordinal of the rank's device. ``pipeline`` is None where all layers are one
    stage; ``cores`` are those that the rank keeps to, or none.
    """

    engine: dict[str, Any]
    rank: int
    host: str
    meeting: str
    threads: int
    device: int
    local_ranks: int
    pipeline: Pipeline | None = None
    cores: list[int] = []


class Bind(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Allocate a cache of this many blocks."""

    num_blocks: int


class Admit(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A request whose rows this rank will sample; ``params`` are fields of SamplingParams."""

    request_id: int
    params: dict[str, Any]
    seed: int
    valid_vocab: int
    prompt_ids: list[int]
    eos_ids: list[int]
    banned_ids: list[int]


class Release(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A request that will not be sampled again."""

    request_id: int


class Part(msgspec.Struct, array_like=True, frozen=True):
    """A RankStep. Spans are (start, count, table number, rope length).

    ``reads`` are the fields of its RowReads.
    """

    num_decode: int
    spans: list[tuple[int, int, int, int]]
    token_ids: list[int]
    samples: list[bool]
    reads: list[tuple[int, int, int, list[int], int, int]] = []


class Step(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A MeshStep and, by DP rank, (request, index, ahead) of its sampled rows.

    ``before`` is the number of the oldest step under way, 0 for none: its tokens are those that
    stand in this one as ids below zero.
    ``tables`` are the block tables that were not sent before, by number; numbers in ``dropped`` may
    be given again. ``draft`` steps are run by the draft model.
    """

    number: int
    before: int
    parts: list[Part]
    variant: str
    counts: list[list[int]]
    padding: str
    rows: list[list[tuple[int, int, int]]]
    tables: dict[int, list[int]]
    dropped: list[int]
    draft: bool = False


class Ask(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Tell what memory is used."""


class AskCollectives(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Tell which collectives ran since this was last asked."""


class Stop(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """End with this exit status."""

    status: int = 0


class Hello(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """First word of a rank: its heavy imports are done; ``pid`` is its process where that helps."""

    rank: int
    pid: int = 0


class Beat(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The rank's process is alive, whatever its step does."""


class Loaded(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The rank's weights are read; ``fitting_blocks`` is the largest cache it can bind."""

    fitting_blocks: int
    weight_bytes: int


class Bound(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The cache is allocated."""

    cache_bytes: int


class Read(msgspec.Struct, array_like=True, frozen=True):
    """What one of a step's reads gave: (logprob, [(id, logprob)]) a row, or a vector.

    ``failed`` is a FailedRow's message and places.
    """

    logprobs: list[tuple[float, list[tuple[int, float]]]] = []
    values: list[float] = []
    failed: tuple[str, str] | None = None


class Tokens(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A step is done; ids and, where asked for, (logprob, [(id, logprob)]) of its sampled rows.

    ``failed`` has row, message and places of those that have no token, whose ids mean nothing;
    ``reads`` one entry for each read. A rank that has not the last pipeline stage has none of
    these, only times. ``spans`` has (pipeline stage, begin, end) by the machine's monotonic clock,
    ``waits`` (pipeline stage, what it has waited for others so far), in seconds. ``handovers`` are
    those that ended since the last reply.
    """

    number: int
    ids: list[int]
    logprobs: list[tuple[float, list[tuple[int, float]]] | None]
    times: PassTimes = PassTimes()
    failed: list[tuple[int, str, str]] = []
    reads: list[Read] = []
    spans: list[tuple[int, float, float]] = []
    waits: list[tuple[int, float]] = []
    handovers: list[tuple[int, str, float, float]] = []


class Memory(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Peak resident bytes of the rank's process."""

    peak_bytes: int


class Collectives(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The rank's collectives in order: the fields of CollectiveRecord, enums by their values."""

    records: list[tuple[str, str, int, int, int, bool, float | None]]


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The rank cannot go on: class name and message of its error, and the traceback."""

    error: str
    message: str
    traceback: str


ToRank = Start | Bind | Admit | Release | Step | Ask | AskCollectives | Stop
FromRank = Hello | Beat | Loaded | Bound | Tokens | Memory | Collectives | Failed
Message = TypeVar("Message")
_ENCODER = msgspec.msgpack.Encoder()


def frame(message: ToRank | FromRank) -> bytes:
    """``message`` as it travels."""
    payload = _ENCODER.encode(message)
    return _LENGTH.pack(len(payload)) + payload


class FrameReader(Generic[Message]):
    """Turns a stream of bytes into messages of one direction."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that ``data`` completes. Raises WireError for anything else."""
        self._pending += data
        messages = []
        while len(self._pending) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending)
            if not 0 < length <= MAX_FRAME:
                raise WireError(f"a frame of {length} bytes; expected 1 to {MAX_FRAME}")
            end = _LENGTH.size + length
            if len(self._pending) < end:
                break
            payload = bytes(self._pending[_LENGTH.size : end])
            del self._pending[:end]
            try:
                messages.append(self._decoder.decode(payload))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise WireError(f"a frame that is no message: {error}") from None
        return messages


def to_rank_reader() -> FrameReader[ToRank]:
    """A reader of what the driver says."""
    return FrameReader(ToRank)


def from_rank_reader() -> FrameReader[FromRank]:
    """A reader of what a rank says."""
    return FrameReader(FromRank)


class Connection:
    """A rank's end of its control connection; one thread receives, any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._reader = to_rank_reader()
        self._arrived: list[ToRank] = []
        self._lock = threading.Lock()

    def send(self, message: FromRank) -> None:
        """Send a whole message. Raises OSError when the driver is gone."""
        data = frame(message)
        with self._lock:
            self.socket.sendall(data)

    def receive(self) -> ToRank | None:
        """The next message, or None when the driver is gone. Raises WireError."""
        while not self._arrived:
            try:
                data = self.socket.recv(_CHUNK)
            except OSError:
                return None
            if not data:
                return None
            self._arrived.extend(self._reader.feed(data))
        return self._arrived.pop(0)
