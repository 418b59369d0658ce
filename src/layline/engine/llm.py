"""The offline interface: load a model once, then generate, chat or stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from layline.config import EngineConfig, parse_size
from layline.engine.blocks import BlockPool
from layline.engine.core import Engine
from layline.engine.kv import BLOCK_SIZE
from layline.engine.model import load_model
from layline.engine.output import GenerationOutput, StreamChunk, Timing, Usage
from layline.engine.request import Request
from layline.engine.scheduler import Scheduler
from layline.errors import PromptError, UsageError, one_of
from layline.sampling import SamplingParams
from layline.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class LLM:
    """A loaded model that answers.

    Keywords are the command line's flags with underscores: ``model``, ``device``, ``dtype``,
    ``threads``, ``max_model_len``, ``kv_memory`` (bytes, or text such as ``"512M"``),
    ``max_running``. Raises UsageError or CheckpointError with a one-line message.
    """

    def __init__(self, model: str | None = None, **flags: Any) -> None:
        known = EngineConfig.__dataclass_fields__
        for name in flags:
            if name not in known:
                raise UsageError(one_of("keyword", name, sorted(known)))
        if model is not None:
            flags["model"] = str(model)
        if "kv_memory" in flags:
            flags["kv_memory"] = parse_size(flags["kv_memory"])
        self.engine_config = EngineConfig(**{k: v for k, v in flags.items() if v is not None})
        self._loaded = load_model(self.engine_config)
        scheduler = Scheduler(
            BlockPool(self._loaded.num_blocks),
            block_size=BLOCK_SIZE,
            max_running=self.engine_config.max_running,
            prefill_tokens=self.engine_config.prefill_tokens,
        )
        self._engine = Engine(self._loaded, scheduler)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._loaded.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens a sequence may have, prompt and answer together."""
        return self._loaded.max_model_len

    def memory_report(self) -> dict[str, int]:
        """Bytes of weights (all copies) and of the whole key-value cache."""
        return {"weights": self._loaded.weight_bytes, "kv_cache": self._loaded.cache_bytes}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerationOutput]:
        """Continue one prompt or many together; outputs come in the order of the prompts.

        A prompt is text or token ids. ``params`` is one for all, or one for each prompt. Raises
        PromptError for an empty or overlong prompt, before anything runs.
        """
        listed = _as_prompts(prompts)
        each = _as_params(params, len(listed))
        requests: list[Request] = []
        try:
            for prompt, one in zip(listed, each, strict=True):
                requests.append(self._engine.submit(self._encode(prompt), one))
            while self._engine.has_work:
                self._engine.step()
        except BaseException:
            for request in requests:
                self._engine.abort(request)
            raise
        return [_output(request) for request in requests]

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> GenerationOutput:
        """Answer a conversation. Raises PromptError when the model has no chat template."""
        return self.generate([self.tokenizer.apply_chat(messages)], params)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Continue a prompt piece by piece; closing the iterator ends the request.

        The prompt is checked when this is called, not when the first piece is asked for.
        """
        request = self._engine.submit(self._encode(prompt), params or SamplingParams())
        return self._chunks(request)

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> Iterator[StreamChunk]:
        """Answer a conversation piece by piece."""
        return self.stream(self.tokenizer.apply_chat(messages), params)

    def _chunks(self, request: Request) -> Iterator[StreamChunk]:
        try:
            while request.finish_reason is None:
                for event in self._engine.step():
                    if event.request is not request:
                        continue
                    reason = request.finish_reason
                    yield StreamChunk(
                        event.text,
                        [event.token_id],
                        None if reason is None else reason.value,
                        None if reason is None else _output(request),
                    )
        finally:
            self._engine.abort(request)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        for token_id in prompt:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise PromptError(f"a prompt of token ids holds {token_id!r}; expected integers")
        return list(prompt)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if not listed:
        return []
    if all(isinstance(item, int) for item in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise UsageError(f"{len(params)} sampling parameters for {count} prompts; expected as many")
    return list(params)


def _output(request: Request) -> GenerationOutput:
    assert request.finish_reason is not None
    return GenerationOutput(
        text=request.text,
        token_ids=list(request.output_ids),
        prompt_token_ids=list(request.prompt_ids),
        finish_reason=request.finish_reason.value,
        usage=Usage(len(request.prompt_ids), len(request.output_ids)),
        logprobs=request.logprobs if request.params.logprobs is not None else None,
        timing=Timing(
            ttft_s=request.first_token - request.arrived,
            decode_s=request.last_token - request.first_token,
        ),
    )
