"""What comes of each row of a step: a token, or why this one has none. No torch here.

A row that fails takes nothing from the others: their tokens are in the cache already.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from layline.engine.reading import Reading
from layline.errors import LaylineError, RequestError
from layline.sampling import TokenLogprobs

Token = tuple[int, TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class FailedRow:
    """Why a row has no token. ``places`` are lines of code, without anything a client sent."""

    message: str
    places: str = ""

    @classmethod
    def of(cls, error: BaseException) -> FailedRow:
        """What to tell of an exception; the text of one that is not ours may hold a prompt."""
        if isinstance(error, LaylineError):
            return cls(str(error))
        places = "".join(traceback.format_tb(error.__traceback__))
        return cls(f"an internal error ({type(error).__name__})", places)

    def error(self) -> RequestError:
        """The error that the request ends with."""
        error = RequestError(f"the request failed: {self.message}")
        if self.places:
            error.add_note(self.places)
        return error


Outcome = Token | FailedRow


@dataclass(frozen=True, slots=True)
class StepResult:
    """By DP rank, what came of the step's sampled rows and of its reads, in their order."""

    tokens: list[list[Outcome]]
    readings: list[list[Reading | FailedRow]]
