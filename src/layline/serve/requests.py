"""The bodies that are accepted, as types; the OpenAPI document is made from these."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from layline.serve.forms import PastCall, ResponseFormat, StructuredOutputs, Tool, ToolChoice
from layline.serve.settings import MAX_CHOICES

Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Id = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Text = Annotated[str, Meta(min_length=1)]
Bias = dict[str, Annotated[float, Meta(ge=-100, le=100)]]


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that completions and chat completions share.

    From ``top_k`` on they are this server's own; OpenAI's API has none of them.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[Bias, Meta(max_length=1024)] | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=16)] | None = None
    seed: Seed | None = None
    user: str | None = None
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Id], Meta(max_length=1024)] | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    structured_outputs: StructuredOutputs | None = None


Prompt = str | list[str | Id | list[Id]]


class CompletionRequest(Sampling):
    """The body of /v1/completions. A list of prompts is all text, all ids, or all lists of ids."""

    prompt: Prompt
    max_tokens: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    suffix: str | None = None


class EmbeddingRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /v1/embeddings; ``priority`` and ``cache_salt`` are this server's own."""

    model: str
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None


class ContentPart(Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a message; only text is read."""

    type: str
    text: str | None = None


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn of a conversation, an assistant's answer as it was received included."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None


class ChatRequest(Sampling):
    """The body of /v1/chat/completions.

    ``metadata`` to ``verbosity`` are OpenAI's fields that change nothing here; those that would
    change an answer are refused by ``unsupported``.
    """

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prediction: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /detokenize."""

    tokens: list[Id]
    model: str | None = None
    skip_special_tokens: bool = False
