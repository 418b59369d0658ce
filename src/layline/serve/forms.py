"""Parts of bodies that say what an answer looks like: formats, functions, calls of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class JsonSchemaFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    """A schema with a name, which changes nothing here.

    Without ``strict``, keywords that cannot be enforced are ignored.
    """

    name: Name
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    """The form that an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True, kw_only=True):
    """This server's own way to say what an answer must look like: one of these.

    A JSON schema (as an object or its text), a regular expression, one of several texts, or a
    grammar in llguidance's dialect of Lark.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=4096)] | None = None
    grammar: str | None = None


class FunctionDefinition(Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call; without ``parameters`` it has none."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    """What the model may use: functions only."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Struct, forbid_unknown_fields=True, kw_only=True):
    """Which function must be called."""

    name: str


class NamedTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """That one function must be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    """A call's function and its arguments as the model wrote them, which should be JSON."""

    name: str
    arguments: str


class PastCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """A call in an earlier answer."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None
