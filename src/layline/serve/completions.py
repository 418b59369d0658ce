"""/v1/completions: prompts in, continuations out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from layline.engine.answers import Chunk
from layline.serve.accounts import Account
from layline.serve.answering import Answering, Reason, SentUsage
from layline.serve.echo import echoed_logprobs, moved
from layline.serve.exchange import Reply
from layline.serve.jobs import Job, PromptText, check_stream, completion_job
from layline.serve.logprobs import Placed, completion_logprobs
from layline.serve.requests import CompletionRequest
from layline.serve.responses import Completion, CompletionChoice, CompletionLogprobs, Usage
from layline.serve.service import Service
from layline.serve.unsupported import refuse_completion


class CompletionAnswer(Answering):
    """One request to /v1/completions."""

    prefix = "cmpl"
    param = "prompt"

    def __init__(self, service: Service, body: CompletionRequest, account: Account) -> None:
        super().__init__(service, body, account)
        self._body = body
        self._echo: dict[int, PromptText] = {}

    async def run(self, reply: Reply) -> None:
        """See Answering. A request for no tokens and no scores is answered without the engine."""
        if self._body.max_tokens == 0 and not self._scores_prompts:
            await self._answer_nothing(reply)
        else:
            await super().run(reply)

    async def prepare(self) -> Job:
        """See Answering."""
        refuse_completion(self._body)
        job = await completion_job(self.service, self._body)
        if self._body.echo:
            count = len(job.prompts) * job.choices
            self._echo = {i: job.prompts[i // job.choices] for i in range(count)}
        return job

    def piece(
        self, chunk: Chunk, placed: Sequence[Placed], *, first: bool
    ) -> Iterable[CompletionChoice]:
        """See Answering."""
        text = self._before(chunk.index) + chunk.text if first else chunk.text
        if text or placed or chunk.finish_reason is not None:
            yield CompletionChoice(
                chunk.index,
                text,
                self._reported(chunk.index, placed, first=first),
                chunk.finish_reason,  # type: ignore[arg-type]
            )

    def choice(
        self, index: int, text: str, placed: Sequence[Placed], reason: Reason
    ) -> CompletionChoice:
        """See Answering."""
        whole = self._before(index) + text
        return CompletionChoice(index, whole, self._reported(index, placed, first=True), reason)

    def event(self, choices: Sequence[CompletionChoice], usage: SentUsage) -> Completion:
        """See Answering."""
        return Completion(
            id=self.id,
            created=self.created,
            model=self.service.settings.model_name,
            choices=list(choices),
            usage=usage,
            system_fingerprint=self.service.fingerprint,
        )

    def whole(self, choices: Sequence[CompletionChoice], usage: Usage) -> Completion:
        """See Answering."""
        return self.event(choices, usage)

    @property
    def _scores_prompts(self) -> bool:
        return bool(self._body.echo) and self._body.logprobs is not None

    def _before(self, index: int) -> str:
        return self._echo[index].text if self._echo else ""

    def _reported(
        self, index: int, placed: Sequence[Placed], *, first: bool
    ) -> CompletionLogprobs | None:
        if not self.has_logprobs:
            return None
        tokenizer = self.service.tokenizer
        if self._scores_prompts and first:
            found = self.parts[index].prompt_logprobs
            return echoed_logprobs(tokenizer, self._echo[index], found, placed)
        return completion_logprobs(tokenizer, moved(placed, len(self._before(index))))

    async def _answer_nothing(self, reply: Reply) -> None:
        """With echo the prompts themselves, else empty texts."""
        self.service.require_model(self._body.model)
        self.service.require_text()
        check_stream(self._body)
        job = await self.prepare()
        choices = [
            self.choice(index, "", (), "length") for index in range(len(job.prompts) * job.choices)
        ]
        if self._body.stream:
            await reply.start_events()
            await self.send(reply, choices)
            await self.send_end(reply, job)
        else:
            await reply.json(self.whole(choices, self.usage(job)))
