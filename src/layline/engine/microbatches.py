"""Which requests decode in the next step over pipeline stages. Pure Python, no torch."""

from __future__ import annotations

from collections.abc import Sequence

from layline.engine.request import Request


class Microbatches:
    """Counts the steps under way over ``num_stages`` stages, and divides those that decode."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self._begun = self._ended = 0

    def begin(self) -> int:
        """Another step is under way; its number."""
        self._begun += 1
        return self._begun

    def complete(self) -> None:
        """The oldest step is done."""
        self._ended += 1

    def cancel(self) -> None:
        """The latest step has not begun after all."""
        self._begun -= 1

    def forget(self) -> None:
        """No step is under way."""
        self._ended = self._begun

    def next_of(self, ready: Sequence[Request]) -> Sequence[Request]:
        """Those of ``ready`` that decode in the next step: a stage's share.

        While stages have no step those go first whose tokens are all known. Else, and without any,
        those do whose only unknown one is in the oldest step, which the last stage is done with
        first: others fill their step up, so that there are not more microbatches than stages. On
        one stage all decode.
        """
        if self.num_stages == 1:
            return ready
        share = -(-len(ready) // self.num_stages)
        known = [request for request in ready if not request.num_pending]
        if known and self._begun - self._ended < self.num_stages:
            return known[:share]
        oldest = self._ended + 1
        found = [
            request
            for request in ready
            if request.num_pending == 1 and request.pending_step == oldest
        ]
        return [*found, *known][:share] if found else []
