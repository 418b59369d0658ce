"""How many drafts a request is worth: more while they are accepted, none for a while where not.

Pure Python; depends on the request's own past alone, so that a run can be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_REST = 32
"""Tokens that a request without accepted drafts generates before it is given one more."""


@dataclass(slots=True)
class Pace:
    """The drafts of one request. ``most`` is what the configuration allows for a step."""

    most: int
    count: int
    misses: int = 0
    rests_until: int = 0

    @classmethod
    def of(cls, most: int) -> Pace:
        """The pace of a new request: it begins with all that is allowed."""
        return cls(most, most)

    def wants(self, produced: int) -> int:
        """Drafts to ask for when the request has generated ``produced`` tokens."""
        return self.count if produced >= self.rests_until else 0

    def observe(self, drafted: int, accepted: int, produced: int) -> None:
        """Go by a step that verified ``drafted`` drafts, after which ``produced`` tokens exist."""
        if accepted == drafted:
            self.count = min(self.most, self.count + 2)
        else:
            self.count = min(self.most, max(1, accepted + 1, self.count - 1))
        if accepted:
            self.misses = 0
            return
        self.misses += 1
        if self.count == 1:
            # The first misses cost a row each; only who goes on missing is left alone.
            self.rests_until = produced + min(LONGEST_REST, 2 ** (self.misses // 2) - 1)
