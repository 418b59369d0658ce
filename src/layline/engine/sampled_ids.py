"""Ids on their way from the last process of a pipeline to the first, past the driver.

On one machine the last process posts what every step drew, and a step of the first reads what it
goes on from. Between machines they are sent for the steps that go on from them: both ends know
these from the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from layline.engine.stage_program import SAMPLED, sampled_ids
from layline.pipeline.cells import Inlet
from layline.pipeline.link_choice import LinkPlan
from layline.pipeline.payload import Payload, room_for
from layline.pipeline.process_link import LinkReceiver, LinkSender
from layline.pipeline.readback import PendingResult
from layline.pipeline.runtime import Entry
from layline.pipeline.shared_memory import SharedBoard
from layline.pipeline.stages import StageHome
from layline.pipeline.streams import Stream, Streams


class IdsOut:
    """The end of a rank that draws, on the last stage."""

    def __init__(
        self, link: LinkPlan, last: StageHome, streams: Streams, *, depth: int, most_ids: int
    ) -> None:
        """At most ``depth`` steps are under way, and each draws at most ``most_ids``."""
        self._board = link.posting(last.stream, depth, most_ids)
        self._room = room_for((most_ids,), torch.int64, 1)
        self._messages: tuple[LinkSender, Stream] | None = None
        if self._board is None:
            # The last stage's own stream has later steps to run by the time they are wanted.
            stream = streams.stream("sampled ids", last.device.ordinal)
            self._messages = link.messages_from(stream, streams), stream

    def poster(self, number: int) -> Callable[[torch.Tensor], None] | None:
        """What step ``number`` does with its ids once it has drawn them."""
        return None if self._board is None else partial(self._board.post, number)

    def wanted(self, before: PendingResult) -> None:
        """A step that is issued now goes on from ``before``."""
        if self._messages is not None:
            sender, stream = self._messages
            sender.send(before.on(stream, sampled_ids, SAMPLED), self._room, overlap=True)

    def close(self) -> None:
        """Let a wait for the other end fail."""
        if self._board is not None:
            self._board.close()


class IdsIn:
    """The end of a rank that is given them, on the first stage."""

    def __init__(self, link: LinkPlan, first: StageHome, streams: Streams) -> None:
        self._board = link.reading(first.stream)
        self._link = link
        self._messages: LinkReceiver | None = None
        if self._board is None:
            self._messages = link.messages_to(first.stream, streams)

    @property
    def waited_s(self) -> float:
        """Seconds that the first stage has waited for ids."""
        return 0.0 if self._board is None else self._board.waited_s

    def entering(self, number: int) -> Entry:
        """What a step that is issued now goes on from: the ids of step ``number``."""
        if self._messages is not None:
            return self._messages.receive()
        assert self._board is not None, "there is one of both"
        return Inlet(partial(self._read, self._board, number))

    def close(self) -> None:
        """Let a wait for the other end fail."""
        if self._board is not None:
            self._board.close()

    def _read(self, board: SharedBoard, number: int) -> Payload:
        what = self._link.ends.receiving(number)
        return {SAMPLED: board.read(number, what, self._link.timeout_s)}
