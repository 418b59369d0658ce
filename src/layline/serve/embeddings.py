"""/v1/embeddings: texts in, one vector for each out."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from layline.engine.answers import Submission
from layline.engine.embedding import embedding_of
from layline.errors import LaylineError
from layline.sampling import SamplingParams
from layline.serve.accounts import Account
from layline.serve.exchange import Reply
from layline.serve.jobs import listed_prompts
from layline.serve.problems import as_api_error, invalid
from layline.serve.requests import EmbeddingRequest
from layline.serve.responses import Embedding, EmbeddingList, EmbeddingUsage
from layline.serve.service import Service
from layline.serve.settings import MAX_CHOICES
from layline.serve.unsupported import refuse_embeddings

MAX_INPUTS = 2048
"""The most texts of one request, as in OpenAI's API."""


class EmbeddingAnswer:
    """One request to /v1/embeddings."""

    def __init__(self, service: Service, body: EmbeddingRequest, account: Account) -> None:
        self._service = service
        self._body = body
        self._account = account

    async def run(self, reply: Reply) -> None:
        """Answer. Raises ApiError."""
        self._service.require_model(self._body.model)
        if self._service.pooling is None:
            raise refuse_embeddings(self._service.settings.model_name)
        self._check_dimensions()
        prompts = await self._prompts()
        # In parts, so that a long list does not count as overload.
        most = min(MAX_CHOICES, self._service.settings.max_waiting)
        vectors: list[npt.NDArray[np.float32]] = []
        for start in range(0, len(prompts), most):
            vectors += await self._embedded(prompts[start : start + most])
        tokens = sum(map(len, prompts))
        data = [Embedding(index, self._written(vector)) for index, vector in enumerate(vectors)]
        usage = EmbeddingUsage(tokens, tokens)
        await reply.json(EmbeddingList(data, self._service.settings.model_name, usage))

    def _check_dimensions(self) -> None:
        wanted, most = self._body.dimensions, self._service.hidden_size
        if wanted is not None and wanted > most:
            raise invalid(
                f"'dimensions' is {wanted}; expected 1 to {most}, the model's own",
                "dimensions",
                "invalid_value",
            )

    async def _prompts(self) -> list[list[int]]:
        listed = listed_prompts(self._body.input, "input")
        if len(listed) > MAX_INPUTS:
            raise invalid(
                f"'input' has {len(listed)} texts; expected at most {MAX_INPUTS}",
                "input",
                "invalid_value",
            )
        found = []
        for prompt in listed:
            if prompt == "":
                raise invalid("'input' holds an empty text; expected some", "input")
            ids = prompt
            if isinstance(ids, str):
                ids = await self._service.encode(ids, "input")
            self._service.check_length(ids, "input", answer=0)
            found.append(ids)
        return found

    async def _embedded(self, prompts: Sequence[list[int]]) -> list[npt.NDArray[np.float32]]:
        pooling = self._service.pooling
        assert pooling is not None
        submissions = [
            Submission(
                prompt_ids=ids,
                params=SamplingParams(),
                priority=self._body.priority or 0,
                cache_salt=self._account.tenant + (self._body.cache_salt or ""),
                embeds=True,
            )
            for ids in prompts
        ]
        async with await self._service.submit(submissions, "input") as answers:
            try:
                async for _ in answers:
                    pass
            except LaylineError as error:
                raise as_api_error(error, log_as="an embedding") from None
            finally:
                self._account.spend_tokens(sum(map(len, prompts)))
            requests = [part.request for part in answers.parts]
            return [
                embedding_of(request, pooling, self._body.dimensions)
                for request in requests
                if request is not None
            ]

    def _written(self, vector: npt.NDArray[np.float32]) -> list[float] | str:
        if self._body.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
        numbers: list[float] = vector.tolist()
        return numbers
