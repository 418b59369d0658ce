"""What a caller gets back. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from layline.sampling import TokenLogprobs


@dataclass(frozen=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens

    def as_dict(self) -> dict[str, int]:
        """The JSON form."""
        return {**asdict(self), "total_tokens": self.total_tokens}


@dataclass(frozen=True)
class Timing:
    """Seconds from arrival to the first token, and from the first token to the last."""

    ttft_s: float
    decode_s: float


@dataclass(frozen=True)
class GenerationOutput:
    """A finished request. ``token_ids`` includes a generated end-of-sequence id; ``text`` not.

    ``logprobs`` has one entry a generated token when the request asked for them, and
    ``prompt_logprobs`` one a prompt token, None for the first, which follows nothing. ``error`` is
    why a request with the finish reason ``error`` failed.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    usage: Usage
    logprobs: list[TokenLogprobs] | None
    timing: Timing
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of ``layline generate --json``."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_token_ids": self.prompt_token_ids,
            "finish_reason": self.finish_reason,
            "usage": self.usage.as_dict(),
        }


@dataclass(frozen=True)
class EmbeddingOutput:
    """The embedding of a prompt, float32 [dimensions]."""

    embedding: npt.NDArray[np.float32]
    prompt_token_ids: list[int]


@dataclass(frozen=True)
class StreamChunk:
    """A piece of an answer. The last one carries the finish reason and the whole output."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    output: GenerationOutput | None = None
