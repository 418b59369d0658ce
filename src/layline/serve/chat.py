"""/v1/chat/completions: a conversation in, one or several answers out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from layline.engine.answers import Chunk
from layline.serve.accounts import Account
from layline.serve.answering import Answering, Reason, SentUsage
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
from layline.serve.unsupported import refuse_chat


class ChatAnswer(Answering):
    """One request to /v1/chat/completions."""

    prefix = "chatcmpl"
    param = "messages"

    def __init__(self, service: Service, body: ChatRequest, account: Account) -> None:
        super().__init__(service, body, account)
        self._body = body

    async def prepare(self) -> Job:
        """See Answering."""
        refuse_chat(self._body)
        return await chat_job(self.service, self._body)

    def piece(
        self, chunk: Chunk, placed: Sequence[Placed], *, first: bool
    ) -> Iterable[ChunkChoice]:
        """See Answering. Role, text and finish reason are events of their own, as OpenAI's are."""
        if first:
            begin = Delta(role="assistant", content="", refusal=None)
            yield ChunkChoice(chunk.index, begin, None, None)
        if chunk.text or placed:
            delta = Delta(content=chunk.text)
            yield ChunkChoice(chunk.index, delta, self._reported(placed), None)
        if chunk.finish_reason is not None:
            yield ChunkChoice(chunk.index, Delta(), None, chunk.finish_reason)  # type: ignore[arg-type]

    def choice(self, index: int, text: str, placed: Sequence[Placed], reason: Reason) -> ChatChoice:
        """See Answering."""
        return ChatChoice(index, AnswerMessage(text), self._reported(placed), reason)

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
