"""Every error Layline raises on purpose.

    LaylineError
    ├── UsageError (ValueError)             a flag, argument or request is wrong           exit 2
    │   ├── ModelNotFoundError              no such name, directory or file
    │   ├── UnsupportedModelError           an architecture or option we do not have
    │   ├── SamplingError                   a sampling value outside its range
    │   ├── PromptError                     empty, too long, or no chat template for it
    │   ├── PlacementError                  devices that pipeline stages cannot use
    │   └── UnsplitError                    a loop that does not go with these pipeline stages
    ├── CheckpointError (ValueError)        a file does not hold what it should            exit 2
    │   ├── CorruptFileError                truncated, overlapping, absurd or unreadable
    │   ├── TensorError                     a tensor is missing, unexpected or mis-shaped
    │   └── UnsupportedFormatError          an encoding or file type we do not read
    ├── PullError                           a download failed or did not verify            exit 2
    ├── BoundaryError                       a line between stages was misused              exit 3
    │   ├── DeclarationError (ValueError)       declarations that do not fit together
    │   ├── StreamError (RuntimeError)          the residual stream's protocol was broken
    │   └── BoundaryUnsupportedError (NotImplementedError)  no path for this batch or update
    ├── KernelError (RuntimeError)          no native kernels; never leaves, torch's run   exit 3
    └── RunError (RuntimeError)             the run itself failed                          exit 3
        ├── CollectiveError                     ranks disagree, or a peer does not answer
        ├── CellNotReadyError                   a task's result was read before it was there
        ├── OverloadedError                     more requests wait than may
        ├── RequestError                        one request failed; all others go on
        ├── StoppingError                       the engine ends and takes nothing new
        └── TransferError                       a cut's protocol was broken, or a peer is gone

The command line prints the message as one line and exits with ``exit_status``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


class LaylineError(Exception):
    """Base of the tree. ``exit_status`` is what the command line exits with."""

    exit_status = 3


class UsageError(LaylineError, ValueError):
    """A flag, argument or request value is wrong."""

    exit_status = 2


class ModelNotFoundError(UsageError):
    """No model of that name, and nothing readable at that path."""


class UnsupportedModelError(UsageError):
    """The checkpoint is well-formed, but its architecture or an option in it is not supported."""


class SamplingError(UsageError):
    """A sampling parameter is outside its range."""


class PromptError(UsageError):
    """The prompt is empty, too long for the context, or cannot be formatted."""


class PlacementError(UsageError):
    """The devices named for pipeline stages are too few, missing or out of each other's reach."""


class UnsplitError(UsageError):
    """A loop does not go with this pipeline: it has no stage split and weights are remote, or its
    split needs what the placement does not give.
    """


class CheckpointError(LaylineError, ValueError):
    """A checkpoint file does not hold what it should."""

    exit_status = 2


class CorruptFileError(CheckpointError):
    """A file is truncated, or its offsets, sizes or names cannot be true."""


class TensorError(CheckpointError):
    """A tensor is missing, unexpected or has the wrong shape."""


class UnsupportedFormatError(CheckpointError):
    """A tensor encoding or file type that is not read."""


class PullError(LaylineError):
    """A download failed or did not match its checksum."""

    exit_status = 2


class BoundaryError(LaylineError):
    """A line between two stages was misused."""


class DeclarationError(BoundaryError, ValueError):
    """Stage declarations that do not fit together."""


class StreamError(BoundaryError, RuntimeError):
    """The residual stream's protocol was broken."""


class BoundaryUnsupportedError(BoundaryError, NotImplementedError):
    """There is no correct path for this batch, update or row movement."""


class KernelError(LaylineError, RuntimeError):
    """The native kernels cannot be compiled or loaded; the message is the reason in words."""


class RunError(LaylineError, RuntimeError):
    """The run failed for a reason outside the request."""


class CollectiveError(RunError):
    """A collective could not be carried out: ranks disagree, or a peer does not answer."""


class OverloadedError(RunError):
    """As many requests wait as may; a later attempt can succeed."""


class RequestError(RunError):
    """One request failed, and nothing else.

    Where several were asked for together, ``outputs`` has what all of them gave.
    """

    def __init__(self, message: str, outputs: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


class StoppingError(RunError):
    """The engine is ending: it takes no new requests, or had to end this one."""


class CellNotReadyError(RunError):
    """A stream task's result was read before the task had run."""


class TransferError(RunError):
    """What crosses a cut was issued out of order, does not fit, or did not come."""


def nearest(value: str, choices: Iterable[str]) -> str:
    """``"; did you mean X?"`` for the closest of ``choices``, or an empty string."""
    close = difflib.get_close_matches(value, list(choices), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def one_of(name: str, value: object, choices: Iterable[str]) -> str:
    """The standard message for a value outside a closed set."""
    known = list(choices)
    return f"{name} {value!r} is not one of {', '.join(known)}{nearest(str(value), known)}"
