"""Reading a request's body: bounded in size and time, strict JSON, checked against its type."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from layline.serve.problems import ApiError, invalid
from layline.serve.settings import ServeSettings

T = TypeVar("T")

_PATH = re.compile(r" - at `(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)
_SHOWN = 200


async def read_json(request: Request, kind: type[T], settings: ServeSettings) -> T:
    """The body as an object of ``kind``.

    Raises ApiError: 415 for another content type, 413 for a body above the limit, 408 for one that
    takes too long, 400 for one that is not strict JSON or not of the kind.
    """
    require_json(request)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            data = await _limited(request, settings.max_body)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not arrive within {settings.body_timeout_s:g} s",
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None
    return parse(data, kind)


def require_json(request: Request) -> None:
    """Raise ApiError for a body that is not declared as JSON in UTF-8.

    A page of another site can send a form or plain text without asking first, never this type.
    """
    kind, _, rest = request.headers.get("content-type", "").partition(";")
    charset = rest.lower().replace(" ", "").replace('"', "")
    if kind.strip().lower() != "application/json":
        raise ApiError(
            415,
            f"Content-Type {kind.strip()[:_SHOWN]!r} is not supported; expected application/json",
            code="unsupported_media_type",
        )
    if charset.startswith("charset=") and charset not in ("charset=utf-8", "charset=utf8"):
        raise ApiError(
            415, f"{rest.strip()[:_SHOWN]!r} is not supported; expected charset=utf-8",
            code="unsupported_media_type",
        )  # fmt: skip


async def _limited(request: Request, most: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise too_large(most)
    data = bytearray()
    try:
        async for piece in request.stream():
            data += piece
            if len(data) > most:
                raise too_large(most)
    except ClientDisconnect:
        raise ApiError(400, "the connection was closed within the body") from None
    return bytes(data)


def too_large(most: int) -> ApiError:
    """The answer to a body above the limit."""
    return ApiError(
        413,
        f"the body is larger than {most} bytes; this server takes no larger one",
        code="request_too_large",
        headers={"Connection": "close"},
    )


def parse(data: bytes, kind: type[T]) -> T:
    """Strict JSON to ``kind``. Raises ApiError with the name of the field at fault."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except msgspec.DecodeError as error:
        raise invalid(f"the body is not JSON in UTF-8: {error}", code="invalid_json") from None
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None


def _invalid_field(message: str) -> ApiError:
    found = _PATH.search(message)
    path = found["path"].removeprefix("$").lstrip(".") if found else ""
    told = message[: found.start()] if found else message
    if unknown := _UNKNOWN.match(told):
        name = _joined(path, unknown["name"])
        return invalid(f"Unknown parameter: '{name}'.", name, "unknown_parameter")
    if missing := _MISSING.match(told):
        name = _joined(path, missing["name"])
        text = f"Missing required parameter: '{name}'."
        return invalid(text, name, "missing_required_parameter")
    told = told.replace("`", "")
    about = f"Invalid value for '{path}': " if path else "Invalid body: "
    return invalid(f"{about}{told[0].lower()}{told[1:]}.", path or None, "invalid_type")


def _joined(path: str, name: str) -> str:
    return f"{path}.{name[:_SHOWN]}" if path else name[:_SHOWN]
