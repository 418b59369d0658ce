"""The application on a tiny model, and a server process that most tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from layline import LLM
from layline.serve.service import Service
from support.serving import NAME, Server, client_on, save_talker, sdk_on, service_on, serving


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny checkpoint that can chat, and its transformers model."""
    path = tmp_path_factory.mktemp("served")
    return path, save_talker(path)


@pytest.fixture(scope="session")
def llm(checkpoint: tuple[Path, Any]) -> LLM:
    return LLM(str(checkpoint[0]), threads=1, max_model_len=512)


@pytest.fixture(scope="module")
def service(llm: LLM) -> Iterator[Service]:
    with service_on(llm) as found:
        yield found


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Any]:
    with client_on(service) as found:
        yield found


@pytest.fixture(scope="module")
def sdk(client: Any) -> Any:
    """OpenAI's own client."""
    return sdk_on(client)


@pytest.fixture(scope="module")
def server(
    checkpoint: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("log")
    flags = ("--served-model-name", NAME, "--threads", "1", "--max-running", "64")
    with serving(checkpoint[0], folder, *flags) as found:
        yield found
