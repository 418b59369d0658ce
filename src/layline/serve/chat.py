"""/v1/chat/completions: a conversation in, one or several answers out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from msgspec import UNSET

from layline.engine.answers import Chunk
from layline.serve.accounts import Account
from layline.serve.answering import Answering, Reason, SentUsage
from layline.serve.called import AnswerCalls
from layline.serve.jobs import Job, chat_job
from layline.serve.logprobs import Placed, chat_logprobs
from layline.serve.requests import ChatRequest
from layline.serve.responses import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    Usage,
)
from layline.serve.service import Service
from layline.serve.tool_use import ToolUse
from layline.serve.unsupported import refuse_chat


class ChatAnswer(Answering):
    """One request to /v1/chat/completions."""

    prefix = "chatcmpl"
    param = "messages"

    def __init__(self, service: Service, body: ChatRequest, account: Account) -> None:
        super().__init__(service, body, account)
        self._body = body
        self._tools: ToolUse | None = None
        self._calls: dict[int, AnswerCalls] = {}
        self._unsent: dict[int, list[Placed]] = defaultdict(list)

    async def prepare(self) -> Job:
        """See Answering."""
        refuse_chat(self._body)
        job = await chat_job(self.service, self._body)
        self._tools = job.tools
        return job

    def piece(
        self, chunk: Chunk, placed: Sequence[Placed], *, first: bool
    ) -> Iterable[ChunkChoice]:
        """See Answering. Role, text and finish reason are events of their own, as OpenAI's are."""
        if first:
            begin = Delta(role="assistant", content="", refusal=None)
            yield ChunkChoice(chunk.index, begin, None, None)
        if self._tools is not None:
            yield from self._called(chunk, placed, self._tools)
            return
        if chunk.text or placed:
            delta = Delta(content=chunk.text)
            yield ChunkChoice(chunk.index, delta, self._reported(placed), None)
        if chunk.finish_reason is not None:
            yield ChunkChoice(chunk.index, Delta(), None, chunk.finish_reason)  # type: ignore[arg-type]

    def _called(
        self, chunk: Chunk, placed: Sequence[Placed], tools: ToolUse
    ) -> Iterable[ChunkChoice]:
        """The events of an answer that may call; log-probabilities come with the next of them."""
        index, reason = chunk.index, chunk.finish_reason
        calls = self._calls.setdefault(index, AnswerCalls(tools))
        unsent = self._unsent[index]
        unsent += placed
        for delta in calls.take(chunk.text, reason):
            yield ChunkChoice(index, delta, self._reported(unsent), None)
            unsent.clear()
        if reason is not None:
            reported = self._reported(unsent) if unsent else None
            yield ChunkChoice(index, Delta(), reported, calls.reason(reason))

    def choice(self, index: int, text: str, placed: Sequence[Placed], reason: Reason) -> ChatChoice:
        """See Answering."""
        reported = self._reported(placed)
        if self._tools is None:
            return ChatChoice(index, AnswerMessage(text), reported, reason)
        calls = AnswerCalls(self._tools)
        content, found = calls.whole(text, reason)
        message = AnswerMessage(content, tool_calls=found or UNSET)
        return ChatChoice(index, message, reported, calls.reason(reason))

    def event(self, choices: Sequence[ChunkChoice], usage: SentUsage) -> ChatChunk:
        """See Answering."""
        return ChatChunk(
            id=self.id,
            created=self.created,
            model=self.service.settings.model_name,
            choices=list(choices),
            usage=usage,
            system_fingerprint=self.service.fingerprint,
        )

    def whole(self, choices: Sequence[ChatChoice], usage: Usage) -> ChatCompletion:
        """See Answering."""
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.service.settings.model_name,
            choices=list(choices),
            usage=usage,
            system_fingerprint=self.service.fingerprint,
        )

    def _reported(self, placed: Sequence[Placed]) -> ChatLogprobs | None:
        return chat_logprobs(self.service.tokenizer, placed) if self.has_logprobs else None
