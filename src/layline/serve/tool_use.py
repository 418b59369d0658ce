"""How the answers to a request may call functions, and the calls that the request tells of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from layline.grammar import JSON_OBJECT, JSON_SCHEMA, Grammar
from layline.serve.forms import NamedTool, PastCall, Tool
from layline.serve.problems import ApiError, invalid
from layline.serve.requests import ChatRequest
from layline.serve.service import Service
from layline.serve.structure import checked
from layline.text.tokenizer import Tokenizer
from layline.text.tools.forcing import Function, calls_or, forced_calls, strict_calls
from layline.text.tools.formats import AUTO, FORMATS, NONE, ToolFormat, format_of


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The functions that answers may call.

    ``template_tools`` is what the chat template is given. ``grammar`` is None where any text may
    come, and has nothing but calls where they are ``forced``; ``shown_ids`` are special tokens that
    calls are told by.
    """

    form: ToolFormat
    names: frozenset[str]
    parallel: bool
    forced: bool
    template_tools: list[dict[str, Any]]
    grammar: Grammar | None
    shown_ids: frozenset[int]


def tool_use(service: Service, body: ChatRequest, answer: Grammar | None) -> ToolUse | None:
    """What ``body`` says of functions; None where none may be called.

    ``answer`` is what a text must look like that calls none. Raises ApiError.
    """
    if not body.tools or body.tool_choice == "none":
        return None
    form = _format(service)
    called = _callable(body.tools, body.tool_choice)
    parallel = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedTool)
    return ToolUse(
        form=form,
        names=frozenset(tool.function.name for tool in called),
        parallel=parallel,
        forced=body.tool_choice not in (None, "auto"),
        template_tools=[_for_template(tool) for tool in body.tools],
        grammar=_grammar(service.tokenizer, form, called, body, answer, parallel=parallel),
        shown_ids=frozenset(
            token_id
            for marker in form.markers
            if (token_id := special_id(service.tokenizer, marker)) is not None
        ),
    )


def _grammar(
    tokenizer: Tokenizer,
    form: ToolFormat,
    tools: Sequence[Tool],
    body: ChatRequest,
    answer: Grammar | None,
    *,
    parallel: bool,
) -> Grammar | None:
    functions = [
        Function(tool.function.name, tool.function.parameters, bool(tool.function.strict))
        for tool in tools
    ]

    def terminal(marker: str) -> str:
        token_id = special_id(tokenizer, marker)
        return json.dumps(marker) if token_id is None else f"<[{token_id}]>"

    def make() -> Grammar | None:
        if body.tool_choice not in (None, "auto"):
            return forced_calls(form, functions, terminal, parallel=parallel)
        if answer is not None:
            if answer.kind not in (JSON_OBJECT, JSON_SCHEMA):
                raise _no_json()
            return calls_or(form, functions, terminal, answer, parallel=parallel)
        if any(function.strict for function in functions):
            return strict_calls(form, functions, terminal, parallel=parallel)
        return None

    return checked(make, "tools")


def special_id(tokenizer: Tokenizer, marker: str) -> int | None:
    """The special token that ``marker`` is, if it is one."""
    ids = tokenizer.encode(marker, add_special=False)
    return ids[0] if len(ids) == 1 and ids[0] in tokenizer.special_ids else None


def past_calls(calls: Sequence[PastCall]) -> list[dict[str, Any]]:
    """Calls of an earlier answer as templates know them: arguments are objects there."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": _arguments(call.function.arguments),
            },
        }
        for call in calls
    ]


def _arguments(text: str) -> Any:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def _format(service: Service) -> ToolFormat:
    template = service.tokenizer.chat_template
    named = service.settings.tool_parser
    if named == NONE:
        raise _unsupported("this server reads no calls of functions (--tool-parser none)")
    if template is None or not template.takes_tools:
        raise _unsupported(f"the chat template of '{service.settings.model_name}' takes no tools")
    form = format_of(template.tools_source) if named == AUTO else FORMATS[named]
    if form is None:
        raise _unsupported(
            f"the chat template of '{service.settings.model_name}' writes calls in a form that is "
            f"not known; start the server with --tool-parser {', '.join(FORMATS)}"
        )
    return form


def _no_json() -> ApiError:
    return invalid(
        "'structured_outputs' that are no JSON do not go with 'tools' that may be called; "
        "set tool_choice to 'none'",
        "structured_outputs",
    )


def _unsupported(told: str) -> ApiError:
    return invalid(f"'tools' are not supported here: {told}.", "tools", "unsupported_parameter")


def _callable(tools: Sequence[Tool], choice: Any) -> list[Tool]:
    """The tools that may be called. Raises ApiError for a name that is there twice or nowhere."""
    by_name = {tool.function.name: tool for tool in tools}
    if len(by_name) < len(tools):
        raise invalid("'tools' has two functions of the same name.", "tools", "invalid_value")
    if not isinstance(choice, NamedTool):
        return list(tools)
    wanted = choice.function.name
    if wanted not in by_name:
        raise invalid(
            f"Invalid value for 'tool_choice': no function '{wanted[:64]}' in 'tools'.",
            "tool_choice",
            "invalid_value",
        )
    return [by_name[wanted]]


def _for_template(tool: Tool) -> dict[str, Any]:
    function = tool.function
    given = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters or {"type": "object", "properties": {}},
    }
    return {
        "type": "function",
        "function": {name: value for name, value in given.items() if value is not None},
    }
