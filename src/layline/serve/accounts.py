"""Who asks: keys, compared in constant time, and what each may still ask for."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import math
import time
from collections.abc import Callable

from layline.serve.problems import ApiError
from layline.serve.settings import ServeSettings

MINUTE_S = 60.0


class Bucket:
    """Fills evenly up to a minute's worth; what is taken may exceed what is left, once."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled = clock()

    def wait_s(self, least: float) -> float:
        """Seconds until ``least`` is there; 0.0 when it is."""
        self._fill()
        return max(0.0, (least - self._level) * MINUTE_S / self._per_minute)

    def take(self, amount: float) -> None:
        """Take ``amount``."""
        # First: what ran over while nobody asked must not pay for it.
        self._fill()
        self._level -= amount

    def _fill(self) -> None:
        now = self._clock()
        gained = (now - self._filled) * self._per_minute / MINUTE_S
        self._level = min(float(self._per_minute), self._level + gained)
        self._filled = now


class Account:
    """What one key has used. ``name`` may be logged: it does not tell the key.

    ``tenant`` comes before the salts of the key's requests, so that no other key finds what they
    left in the cache; it is empty where there are no keys.
    """

    def __init__(self, name: str, settings: ServeSettings, tenant: str = "") -> None:
        self.name = name
        self.tenant = tenant
        self._requests = _bucket(settings.requests_per_minute)
        self._tokens = _bucket(settings.tokens_per_minute)

    def spend_request(self) -> None:
        """Count a request. Raises ApiError (429) when a limit is reached."""
        for bucket, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            wait = 0.0 if bucket is None else bucket.wait_s(1.0)
            if wait > 0:
                seconds = math.ceil(wait)
                raise ApiError(
                    429,
                    f"Rate limit reached for {what} per minute; try again in {seconds} s",
                    kind=what,
                    code="rate_limit_exceeded",
                    headers={"Retry-After": str(seconds)},
                )
        if self._requests is not None:
            self._requests.take(1.0)

    def spend_tokens(self, count: int) -> None:
        """Count tokens of prompts and answers, which are known when they are there."""
        if self._tokens is not None:
            self._tokens.take(count)


class Accounts:
    """All who may ask."""

    def __init__(self, settings: ServeSettings) -> None:
        # The digests of two keys differ; the short names of their fingerprints might not.
        self._known = [
            (_digest(key), Account(key_name(key), settings, tenant_of(key)))
            for key in settings.api_keys
        ]
        self._anyone = Account("anyone", settings)

    def of(self, authorization: str) -> Account | None:
        """The account of a request's Authorization header; None for one that is not known.

        Every key is compared, whichever fits, so that the time taken tells nothing.
        """
        if not self._known:
            return self._anyone
        given = _digest(_given_key(authorization))
        found = None
        for digest, account in self._known:
            if hmac.compare_digest(digest, given):
                found = account
        return found


def key_name(key: str) -> str:
    """What stands for a key in the log."""
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def tenant_of(key: str) -> str:
    """What stands for a key before a salt: of one length, and of no use for finding the key."""
    return hashlib.sha256(b"layline tenant\0" + key.encode()).hexdigest()


def unauthorized(*, page: bool) -> ApiError:
    """The answer to an unknown key; a browser is told to ask for one, as a password."""
    scheme = 'Basic realm="layline: the password is an API key"' if page else "Bearer"
    return ApiError(
        401,
        "Incorrect or missing API key; expected the header 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": scheme},
    )


def _given_key(authorization: str) -> str:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            decoded = base64.b64decode(value.strip(), validate=True).decode()
        except (binascii.Error, ValueError):
            return ""
        return decoded.partition(":")[2]
    return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _bucket(per_minute: int | None) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute)
