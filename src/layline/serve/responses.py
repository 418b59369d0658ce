"""The bodies that are answered, as types; the OpenAPI document is made from these."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class PromptDetails(Struct):
    """Tokens of the prompts that were found in the cache."""

    cached_tokens: int


class Usage(Struct):
    """Token counts of a request, over all its answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(Struct):
    """A likely token; ``bytes`` are its own, which may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """A token of the answer, and the likeliest ones at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of a chat answer."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    """Log-probabilities of a completion; ``bytes`` is this server's own field.

    None stands for those of the first token of a prompt.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    bytes: list[list[int]]


class CompletionChoice(Struct):
    """One completion, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(Struct):
    """The answer of /v1/completions; in a stream, one event of it."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None


class Embedding(Struct):
    """One text's vector: numbers, or in base64 as little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Struct):
    """Token counts of a request for embeddings."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct):
    """The answer of /v1/embeddings."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class CallFunction(Struct):
    """The function that is called, and its arguments: JSON, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A function that the assistant asks to be called."""

    id: str
    function: CallFunction
    type: Literal["function"] = "function"


class AnswerMessage(Struct):
    """What the assistant says; no content where it only calls."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(Struct):
    """The answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None


class FunctionDelta(Struct):
    """The name of a call's function, with its first event, and more of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(Struct):
    """A piece of call ``index``; ``id`` and ``type`` come with its first."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class Delta(Struct):
    """What an event of a chat stream adds."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(Struct):
    """A piece of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatChunk(Struct):
    """One event of a chat stream."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | None = None


class Model(Struct):
    """The model that is served; ``max_model_len`` is this server's own field."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "layline"


class ModelList(Struct):
    """All models of this server: one."""

    data: list[Model]
    object: Literal["list"] = "list"


class Tokenized(Struct):
    """The answer of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(Struct):
    """The answer of /detokenize."""

    prompt: str


class Health(Struct):
    """Whether requests are taken: ``ok``, ``stopping`` or ``failed``."""

    status: Literal["ok", "stopping", "failed"]


class Problem(Struct):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ProblemBody(Struct):
    """Every answer that is an error."""

    error: Problem
