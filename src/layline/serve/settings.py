"""What a server is told besides its model. Plain data: nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from layline.serve.hosts import is_loopback

TOOL_PARSERS = ("auto", "hermes", "llama", "mistral", "pythonic", "none")
"""What ``tool_parser`` may be: a form of ``layline.text.tools.formats``, to be found, or none."""
MAX_CHOICES = 128
"""The most answers of one request, over all its prompts."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How a server listens, whom it answers and what it refuses.

    ``max_body`` is in bytes, names that end in ``_s`` are seconds. ``requests_per_minute`` and
    ``tokens_per_minute`` hold for each key, or for everybody where there are no keys.
    ``tool_parser`` names the form in which the model calls functions, or is ``auto`` or ``none``.
    ``linger_s`` is how long a server whose engine failed goes on saying so before it ends.
    ``address`` is what ``host`` was found to be when the socket was bound. ``allowed_hosts`` are
    names by which clients may call the server, besides those of its own machine.
    """

    host: str = "127.0.0.1"
    address: str | None = None
    port: int = 8000
    model_name: str = "model"
    tool_parser: str = "auto"
    api_keys: tuple[str, ...] = ()
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body: int = 8 << 20
    max_waiting: int = 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    linger_s: float = 3.0

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.address or self.host)

    def shown(self) -> dict[str, Any]:
        """All settings as they may be logged: of the keys only how many there are."""
        return {**asdict(self), "api_keys": len(self.api_keys)}
