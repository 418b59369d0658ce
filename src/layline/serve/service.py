"""What every endpoint is given: the engine, the model's text and facts, the settings."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from layline import __version__
from layline.engine.answers import AnswerStream, Submission
from layline.engine.async_engine import AsyncEngine
from layline.errors import LaylineError, SamplingError
from layline.serve.problems import ApiError, as_api_error, invalid
from layline.serve.settings import MAX_CHOICES, ServeSettings
from layline.serve.structure import grammar_problem
from layline.serve.unsupported import refuse_text
from layline.text.tokenizer import Tokenizer
from layline.weights.pooling import Pooling


@dataclass(frozen=True, kw_only=True)
class Service:
    """One served model.

    ``about`` is what the status page says and draws of it and its mesh (see page.description),
    ``kv_bytes`` are those of the whole cache over all ranks. ``pooling`` is how a model makes
    embeddings, of ``hidden_size`` numbers; others generate text.
    """

    engine: AsyncEngine
    tokenizer: Tokenizer
    max_model_len: int
    settings: ServeSettings
    about: dict[str, Any] = field(default_factory=dict)
    kv_bytes: int = 0
    pooling: Pooling | None = None
    hidden_size: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def block_bytes(self) -> int:
        """Bytes of one cache block over all ranks that hold a part of it."""
        return self.kv_bytes // max(self.engine.load.cache.blocks, 1)

    def require_model(self, name: str | None) -> None:
        """Raise ApiError (404) for a model that is not this one."""
        if name is not None and name != self.settings.model_name:
            raise ApiError(
                404,
                f"The model '{name[:200]}' does not exist; this server has "
                f"'{self.settings.model_name}'",
                param="model",
                code="model_not_found",
            )

    @cached_property
    def fingerprint(self) -> str:
        """Changes when the same seed may give another answer: with the model, version or mesh."""
        told = json.dumps([__version__, self.settings.model_name, self.about], sort_keys=True)
        return f"fp_{hashlib.blake2b(told.encode(), digest_size=6).hexdigest()}"

    def require_text(self) -> None:
        """Raise ApiError when the model generates none."""
        if self.pooling is not None:
            raise refuse_text(self.settings.model_name)

    async def encode_placed(self, text: str, param: str) -> tuple[list[int], list[int]]:
        """Token ids of a text, and where in it each begins. Raises ApiError."""
        try:
            return await asyncio.to_thread(self.tokenizer.encode_placed, text)
        except LaylineError as error:
            raise as_api_error(error, param) from None

    async def encode(self, text: str, param: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text, found in another thread: a long one takes a while."""
        try:
            return await asyncio.to_thread(self.tokenizer.encode, text, add_special=add_special)
        except LaylineError as error:
            raise as_api_error(error, param) from None

    async def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        variables: dict[str, Any],
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation. Raises ApiError when the template refuses it."""
        if self.tokenizer.chat_template is None:
            raise invalid(
                f"The model '{self.settings.model_name}' has no chat template; use /v1/completions",
                "messages",
                "chat_not_supported",
            )
        for name in ("messages", "tools", "add_generation_prompt"):
            if name in variables:
                raise invalid(f"'{name}' cannot be set here", "chat_template_kwargs")
        try:
            return await asyncio.to_thread(
                self.tokenizer.apply_chat, messages, tools=tools, **variables
            )
        except LaylineError as error:
            raise as_api_error(error, "messages") from None

    def check_length(self, prompt_ids: Sequence[int], param: str, *, answer: int = 1) -> None:
        """Raise ApiError for a prompt that leaves no room for an answer of so many tokens."""
        if not prompt_ids:
            raise invalid("the prompt is empty; expected at least one token", param)
        if len(prompt_ids) + answer > self.max_model_len:
            raise invalid(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"the prompt has {len(prompt_ids)} tokens"
                + (", which leaves no room for an answer." if answer else "."),
                param,
                "context_length_exceeded",
            )

    def check_choices(self, count: int, param: str) -> None:
        """Raise ApiError for more answers than one request may ask for."""
        most = min(MAX_CHOICES, self.settings.max_waiting)
        if count > most:
            raise invalid(f"{count} answers in one request; expected at most {most}", param)

    async def submit(
        self, submissions: Sequence[Submission], param: str, grammar_param: str = "grammar"
    ) -> AnswerStream:
        """Start answering. Raises ApiError about the field at fault."""
        try:
            return await self.engine.submit(submissions)
        except LaylineError as error:
            if isinstance(error, SamplingError) and str(error).startswith("grammar "):
                raise grammar_problem(error, grammar_param) from None
            raise as_api_error(error, param) from None
