"""What an answer must look like: from the fields of a body to a grammar."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from layline.errors import SamplingError
from layline.grammar import Grammar
from layline.serve.forms import ResponseFormat, StructuredOutputs
from layline.serve.problems import ApiError, invalid
from layline.serve.requests import ChatRequest, Sampling

T = TypeVar("T")

INVALID_SCHEMA = "invalid_schema"


def answer_grammar(body: Sampling) -> Grammar | None:
    """The grammar that ``body`` asks for in one of the two ways. Raises ApiError."""
    structured = None
    if body.structured_outputs is not None:
        structured = _structured(body.structured_outputs)
    wanted = body.response_format if isinstance(body, ChatRequest) else None
    formatted = None if wanted is None else _formatted(wanted)
    if structured is not None and formatted is not None:
        raise invalid(
            "'structured_outputs' and 'response_format' both say what the answer looks like; "
            "expected one of them",
            "structured_outputs",
        )
    return structured or formatted


def checked(make: Callable[[], T], param: str) -> T:
    """What ``make`` returns. Raises ApiError about ``param`` for a grammar that it refuses."""
    try:
        return make()
    except SamplingError as error:
        raise grammar_problem(error, param) from None


def grammar_problem(error: SamplingError, param: str) -> ApiError:
    """What a caller is told of a grammar that is refused."""
    message = str(error).removeprefix("grammar ")
    return invalid(f"Invalid grammar in '{param}': {message}.", param, INVALID_SCHEMA)


def _formatted(wanted: ResponseFormat) -> Grammar | None:
    if wanted.type != "json_schema":
        if wanted.json_schema is not None:
            raise invalid(
                "'response_format.json_schema' is only allowed with the type 'json_schema'.",
                "response_format.json_schema",
            )
        return Grammar.json_object() if wanted.type == "json_object" else None
    if wanted.json_schema is None:
        raise _missing("response_format.json_schema")
    schema = wanted.json_schema.schema
    if schema is None:
        raise _missing("response_format.json_schema.schema")
    lenient = not wanted.json_schema.strict
    return checked(lambda: Grammar.json_schema(schema, lenient=lenient), "response_format")


def _structured(wanted: StructuredOutputs) -> Grammar:
    given = [
        name for name in ("json", "regex", "choice", "grammar") if getattr(wanted, name) is not None
    ]
    if len(given) != 1:
        told = f"found {' and '.join(given)}" if given else "found none"
        raise invalid(
            f"'structured_outputs' needs exactly one of json, regex, choice and grammar; {told}",
            "structured_outputs",
        )
    (name,) = given
    value = getattr(wanted, name)
    kinds: dict[str, Callable[[], Grammar]] = {
        "json": lambda: Grammar.json_schema(value),
        "regex": lambda: Grammar.regex(value),
        "choice": lambda: Grammar.choice(value),
        "grammar": lambda: Grammar.lark(value),
    }
    return checked(kinds[name], f"structured_outputs.{name}")


def _missing(name: str) -> ApiError:
    text = f"Missing required parameter: '{name}'."
    return invalid(text, name, "missing_required_parameter")
