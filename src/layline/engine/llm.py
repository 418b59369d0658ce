"""The offline interface: load a model once, then generate, chat or stream."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from layline.config import EngineConfig, parse_size
from layline.engine.balance import MeshScheduler
from layline.engine.core import Engine
from layline.engine.embedding import check_dimensions, embedding_of
from layline.engine.facts import ModelFacts
from layline.engine.launch import launch
from layline.engine.output import (
    EmbeddingOutput,
    GenerationOutput,
    StreamChunk,
    Timing,
    Usage,
)
from layline.engine.progress import progress_bar
from layline.engine.request import Request
from layline.engine.speculation.make import make_speculation
from layline.engine.statistics import SchedulerStats
from layline.engine.step_times import StepTimes
from layline.errors import LaylineError, PromptError, RequestError, UsageError, one_of
from layline.pipeline.fence import Fence
from layline.sampling import SamplingParams, TokenLogprobs
from layline.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class LLM:
    """A loaded model that answers. Several threads may use it; their requests run together.

    Keywords are the command line's flags with underscores: ``model``, ``device``, ``dtype``,
    ``threads`` (of torch in the whole run), ``max_model_len``, ``kv_memory`` (bytes of a rank, or
    text such as ``"512M"``), ``kv_dtype``, ``prefix_cache``, ``batch_invariant``, ``max_running``,
    and the mesh's: ``tp``, ``attn_dp``, ``attn_cp``, ``ep``, ``dense_tp``, ``boundary_reduction``,
    ``sequence_parallel``, ``input_scattered``, ``quantised_all_reduce``, ``dp_padding``,
    ``cp_layout``; the pipeline's: ``pp_stages``, ``pp_splits``, ``pp_devices``, ``pp_processes``;
    and speculation's: ``speculative``, ``speculative_model``, ``speculative_tokens`` and
    ``speculative_boundary_reduction``. Also ``prefill_tokens``, the most prompt tokens of one
    step, and ``seed``, that of the random weights of ``config:DIR``. With ``tp`` above 1 workers
    are started, and end with :meth:`close`; under torchrun only rank 0 comes back from here, and
    the others leave with SystemExit when it is done. Raises UsageError or CheckpointError with a
    one-line message, and RunError when a worker fails; every later call then raises it too.
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
        times = StepTimes()
        self._model, executor = launch(self.engine_config, times)
        scheduler = MeshScheduler.of(
            self.engine_config,
            executor.num_blocks,
            shares=self._model.facts.shares_prefixes,
            num_stages=self._model.microbatches(self.engine_config),
            divide=self._model.divide(self.engine_config),
        )
        speculation = make_speculation(self.engine_config, self._model, scheduler, executor)
        self._engine = Engine(
            self._model,
            scheduler,
            executor,
            times,
            speculation,
            in_flight=self._model.in_flight(self.engine_config),
        )
        self._executor = executor
        # With the engine, not with this object: streams may outlive it.
        self._close = weakref.finalize(self._engine, executor.close)

    def close(self, status: int = 0) -> None:
        """End the workers, which exit with ``status``; a second call does nothing.

        Whatever is asked afterwards, of streams too, raises RunError. Without it they end with
        this object or with the process.
        """
        if self._close.detach() is not None:
            self._engine.close(status)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        failed = 3 if error is not None else 0
        self.close(getattr(error, "exit_status", failed))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._model.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens a sequence may have, prompt and answer together."""
        return self._model.facts.max_model_len

    @property
    def engine(self) -> Engine:
        """What runs this model's requests, for an AsyncEngine."""
        return self._engine

    @property
    def facts(self) -> ModelFacts:
        """What is settled about the model and its mesh."""
        return self._model.facts

    @property
    def fence(self) -> Fence | None:
        """The layers at which pipeline stages begin, and how many there are; None for one stage."""
        return self._model.fence

    def failure(self) -> LaylineError | None:
        """Why the ranks are gone, or None while they run; never waits."""
        return self._executor.failure()

    def memory_report(self) -> dict[str, int]:
        """Bytes of the weight matrices (all copies) and of the key-value cache, over all ranks."""
        used = self._engine.memory()
        return {"weights": used.weights, "kv_cache": used.kv_cache}

    def stats(self) -> SchedulerStats:
        """What waits and runs, the cache, and how many drafts were accepted."""
        return self._engine.stats()

    def worker_peaks(self) -> list[int]:
        """Peak resident bytes of each worker process; none where this process is the only one."""
        return list(self._engine.memory().worker_peaks)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[GenerationOutput]:
        """Continue one prompt or many together; outputs come in the order of the prompts.

        A prompt is text or token ids. ``params`` is one for all, or one for each prompt. Many
        prompts show a progress bar where stderr is a terminal, unless ``progress`` is False. Raises
        PromptError for an empty or overlong prompt, before anything runs, and RequestError when a
        request failed; the others finish first, and its ``outputs`` are those of all.
        """
        listed = _as_prompts(prompts)
        each = _as_params(params, len(listed))
        requests = self._run(listed, each, progress=progress)
        outputs = [_output(request) for request in requests]
        for number, request in enumerate(requests):
            if request.error is not None:
                where = f"prompt {number}: " if len(requests) > 1 else ""
                raise RequestError(f"{where}{request.error}", outputs) from request.error
        return outputs

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        progress: bool = True,
    ) -> list[EmbeddingOutput]:
        """The embedding of one prompt or of many, in their order.

        With ``dimensions`` the first so many numbers of each, at length one again where the model's
        vectors have it. Raises UnsupportedModelError when the model makes no embeddings, and as
        :meth:`generate` does.
        """
        check_dimensions(dimensions, self._model.facts.config.hidden_size)
        listed = _as_prompts(prompts)
        requests = self._run(listed, None, progress=progress)
        pooling = self._model.facts.pooling
        found = []
        for number, request in enumerate(requests):
            if request.error is not None:
                raise RequestError(f"prompt {number}: {request.error}") from request.error
            assert pooling is not None
            vector = embedding_of(request, pooling, dimensions)
            found.append(EmbeddingOutput(vector, list(request.prompt_ids)))
        return found

    def _run(
        self, prompts: list[Prompt], params: list[SamplingParams] | None, *, progress: bool
    ) -> list[Request]:
        """Run prompts to their end; without ``params`` they are embedded."""
        requests: list[Request] = []
        try:
            for number, prompt in enumerate(prompts):
                one = None if params is None else params[number]
                requests.append(self._submit(prompt, one, number if len(prompts) > 1 else None))
            with progress_bar(requests, shown=progress) as advance:
                self._engine.run(requests, advance)
        except BaseException:
            for request in requests:
                self._engine.abort(request)
            raise
        return requests

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> GenerationOutput:
        """Answer a conversation. Raises PromptError when the model has no chat template."""
        return self.generate([self.tokenizer.apply_chat(messages)], params)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> TokenStream:
        """Continue a prompt piece by piece; closing the stream ends the request.

        The prompt is checked when this is called, not when the first piece is asked for. Several
        streams may be read in turn; their requests run together.
        """
        request = self._engine.submit(self._encode(prompt), _checked(params or SamplingParams()))
        return TokenStream(self._engine, request)

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> TokenStream:
        """Answer a conversation piece by piece."""
        return self.stream(self.tokenizer.apply_chat(messages), params)

    def _submit(self, prompt: Prompt, params: SamplingParams | None, number: int | None) -> Request:
        given = params or SamplingParams()
        try:
            return self._engine.submit(self._encode(prompt), given, embeds=params is None)
        except PromptError as error:
            if number is None:
                raise
            raise PromptError(f"prompt {number}: {error}") from None

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("the prompt is empty; expected some text")
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
            raise PromptError(f"prompt {prompt!r} is neither text nor a list of token ids")
        return [_token_id(value) for value in prompt]


class TokenStream(Iterator[StreamChunk]):
    """The pieces of one answer, as they are generated. A context manager, and its own iterator."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._request = request

    def __next__(self) -> StreamChunk:
        request = self._request
        while not request.events:
            if request.error is not None:
                raise request.error
            if request.finish_reason is not None:
                raise StopIteration
            self._engine.advance(request)
        event = request.events.popleft()
        reason = event.finish_reason
        return StreamChunk(
            event.text,
            [] if event.token_id is None else [event.token_id],
            None if reason is None else reason.value,
            None if reason is None else _output(request),
        )

    def close(self) -> None:
        """End the request, wherever it is, and free what it holds; a second call does nothing."""
        self._request.events.clear()
        self._engine.abort(self._request)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _token_id(value: object) -> int:
    if isinstance(value, (bool, str)) or not hasattr(value, "__index__"):
        raise PromptError(f"a prompt of token ids holds {value!r}; expected integers")
    return operator.index(value)


def _checked(params: object) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise UsageError(f"params must be SamplingParams, found {type(params).__name__}")
    return params


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]  # What is not text is refused when it is encoded.
    listed: list[Any] = list(prompts)
    if listed and not isinstance(listed[0], str) and hasattr(listed[0], "__index__"):
        return [listed]
    return listed


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, (str, Mapping)) or not isinstance(params, Sequence):
        params = [_checked(params)]
    if len(params) != count:
        raise UsageError(f"{len(params)} sampling parameters for {count} prompts; expected as many")
    return [_checked(one) for one in params]


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
        prompt_logprobs=_prompt_logprobs(request),
        error=None if request.error is None else str(request.error),
    )


def _prompt_logprobs(request: Request) -> list[TokenLogprobs | None] | None:
    if request.params.prompt_logprobs is None:
        return None
    return [None, *request.prompt_logprobs]
