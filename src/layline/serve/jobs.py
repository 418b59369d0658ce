"""From a request's body to what the engine is asked: prompts, and how to continue them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from layline.engine.answers import Submission
from layline.errors import SamplingError
from layline.sampling import SamplingParams
from layline.serve.problems import as_api_error, invalid
from layline.serve.requests import ChatRequest, CompletionRequest, Message, Sampling
from layline.serve.service import Service
from layline.serve.structure import answer_grammar
from layline.serve.tool_use import ToolUse, past_calls, tool_use
from layline.text.detokenize import IncrementalDecoder
from layline.text.tokenizer import Tokenizer

LEAST_TOP_P = 1e-9
DEFAULT_COMPLETION_TOKENS = 16
_GOLDEN = 0x9E3779B97F4A7C15
_SEED_MASK = (1 << 63) - 1


@dataclass(frozen=True)
class PromptText:
    """A prompt's token ids; where it is to be echoed, its text and where in it each begins."""

    ids: list[int]
    text: str = ""
    offsets: Sequence[int] = ()


@dataclass(frozen=True)
class Job:
    """What one request asks for: ``choices`` answers to each of ``prompts``."""

    prompts: tuple[PromptText, ...]
    params: SamplingParams
    choices: int
    priority: int
    cache_salt: str
    tools: ToolUse | None = None
    grammar_param: str = "grammar"

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    def submissions(self, tenant: str = "") -> list[Submission]:
        """One for each answer, in the order of their indices; cached for ``tenant`` alone."""
        return [
            Submission(
                prompt_ids=prompt.ids,
                params=self._params(number * self.choices + choice),
                priority=self.priority,
                cache_salt=f"{tenant}{self.cache_salt}",
                shown_ids=self.tools.shown_ids if self.tools is not None else frozenset(),
            )
            for number, prompt in enumerate(self.prompts)
            for choice in range(self.choices)
        ]

    def _params(self, index: int) -> SamplingParams:
        """Answer ``index`` of a seeded request has a seed of its own, or all would be the same."""
        if self.params.seed is None or index == 0:
            return self.params
        return replace(self.params, seed=(self.params.seed + index * _GOLDEN) & _SEED_MASK)


def check_stream(body: Sampling) -> None:
    """Raise ApiError for stream options without a stream."""
    if body.stream_options is not None and not body.stream:
        raise invalid(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            "stream_options",
        )


def wants_usage(body: Sampling) -> bool:
    """True when the stream ends with an event of token counts."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)


async def chat_job(service: Service, body: ChatRequest) -> Job:
    """What a chat request asks for. Raises ApiError."""
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise invalid(
            "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported.",
            "max_completion_tokens",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    most = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(body, max_tokens=most, logprobs=logprobs)
    service.check_choices(body.n or 1, "n")
    answer = answer_grammar(body)
    tools = tool_use(service, body, answer)
    params = replace(params, grammar=answer if tools is None else tools.grammar)
    messages = template_messages(body.messages)
    ids = await service.encode_chat(
        messages,
        body.chat_template_kwargs or {},
        tools=None if tools is None else tools.template_tools,
    )
    service.check_length(ids, "messages")
    job = job_of(body, [PromptText(ids)], params)
    return job if tools is None else replace(job, tools=tools, grammar_param="tools")


async def completion_job(service: Service, body: CompletionRequest) -> Job:
    """What a completion request asks for. Raises ApiError."""
    most = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    scored = body.logprobs if body.echo else None
    # An answer of no tokens to a prompt that is not scored never reaches the engine.
    least = 1 if scored is None else 0
    params = sampling_params(
        body, max_tokens=max(most, least), logprobs=body.logprobs, prompt_logprobs=scored
    )
    params = replace(params, grammar=answer_grammar(body))
    prompts = listed_prompts(body.prompt, "prompt")
    service.check_choices(len(prompts) * (body.n or 1), "prompt")
    found = []
    for prompt in prompts:
        one = await echoed_prompt(service, prompt) if body.echo else await plain(service, prompt)
        service.check_length(one.ids, "prompt", answer=min(max(most, least), 1))
        found.append(one)
    return job_of(body, found, params)


async def plain(service: Service, prompt: str | list[int]) -> PromptText:
    """A prompt of which nothing but its ids is wanted."""
    ids = await service.encode(prompt, "prompt") if isinstance(prompt, str) else prompt
    return PromptText(ids)


async def echoed_prompt(service: Service, prompt: str | list[int]) -> PromptText:
    """A prompt whose text will be given back."""
    if isinstance(prompt, str):
        ids, offsets = await service.encode_placed(prompt, "prompt")
        return PromptText(ids, prompt, offsets)
    return PromptText(prompt, *placed_text(service.tokenizer, prompt))


def placed_text(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, list[int]]:
    """The text of token ids, and where in it each begins."""
    decoder = IncrementalDecoder(tokenizer, ())
    text, offsets = "", []
    for token_id in ids:
        offsets.append(len(text))
        text += decoder.add(token_id)
    return text + decoder.finish(), offsets


def job_of(body: Sampling, prompts: Sequence[PromptText], params: SamplingParams) -> Job:
    """The job of a request whose prompts and parameters are known."""
    salt = body.cache_salt or ""
    source = "structured_outputs" if body.structured_outputs is not None else "response_format"
    return Job(
        tuple(prompts),
        params,
        body.n or 1,
        body.priority or 0,
        salt,
        grammar_param=source,
    )


def listed_prompts(prompt: str | list[Any], name: str) -> list[str | list[int]]:
    """One prompt or many as a list. Raises ApiError for a list of several kinds."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if kinds in ({str}, {list}):
        return prompt
    raise invalid(
        f"'{name}' is an empty or mixed list; expected a text, a list of texts, a list of token "
        "ids or a list of such lists",
        name,
        "invalid_type",
    )


def sampling_params(
    body: Sampling,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The engine's parameters. Raises ApiError."""
    given = {
        name: value
        for name in (
            *("temperature", "presence_penalty", "frequency_penalty", "seed", "top_k", "min_p"),
            *("repetition_penalty", "min_tokens", "ignore_eos"),
        )
        if (value := getattr(body, name)) is not None
    }
    if body.top_p is not None:
        # OpenAI's range begins with 0, which there leaves the likeliest token.
        given["top_p"] = max(body.top_p, LEAST_TOP_P)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    try:
        return SamplingParams(
            **given,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            stop=tuple(stop),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            logit_bias=bias_by_id(body.logit_bias),
        )
    except SamplingError as error:
        raise as_api_error(error) from None


def bias_by_id(bias: dict[str, float] | None) -> dict[int, float] | None:
    """``logit_bias`` with numbers for keys. Raises ApiError for a key that is no token id."""
    if not bias:
        return None
    found = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise invalid(
                f"Invalid key in 'logit_bias': {key[:50]!r}. Expected a token id.", "logit_bias"
            )
        found[int(key)] = value
    return found


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates know them; "developer" is OpenAI's newer name of "system"."""
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: Message, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        for number, part in enumerate(content):
            if part.type != "text" or part.text is None:
                at = f"{where}.content[{number}]"
                raise invalid(
                    f"{at} is of type '{part.type[:50]}'; this model reads text parts only",
                    at,
                    "unsupported_content",
                )
        content = "".join(part.text or "" for part in content)
    if content is None and message.role == "assistant":
        content = message.refusal
    if message.role == "tool" and message.tool_call_id is None:
        at = f"{where}.tool_call_id"
        raise invalid(f"Missing required parameter: '{at}'.", at, "missing_required_parameter")
    found = {
        "role": role,
        "content": content,
        "name": message.name,
        "tool_calls": past_calls(message.tool_calls) if message.tool_calls else None,
        "tool_call_id": message.tool_call_id,
    }
    return {name: value for name, value in found.items() if value is not None}
