"""The forms in which models write calls, and which of them a chat template speaks of."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from layline.text.tools.marked import HermesParser, LlamaParser, MistralParser
from layline.text.tools.parser import ToolParser
from layline.text.tools.pythonic import PythonicParser

AUTO = "auto"
NONE = "none"


@dataclass(frozen=True)
class ToolFormat:
    """One form of calls.

    ``markers`` are the texts around calls, special tokens in some vocabularies; ``arguments`` is
    what the object's member of that meaning is called; ids of calls have ``id_length`` letters and
    digits, or OpenAI's form where that is 0.
    """

    name: str
    parser: Callable[[frozenset[str]], ToolParser]
    markers: tuple[str, ...] = ()
    arguments: str = "arguments"
    id_length: int = 0


HERMES = ToolFormat("hermes", HermesParser, ("<tool_call>", "</tool_call>"))
LLAMA = ToolFormat("llama", LlamaParser, ("<|python_tag|>",), arguments="parameters")
# Its chat templates refuse ids of any other length.
MISTRAL = ToolFormat("mistral", MistralParser, ("[TOOL_CALLS]",), id_length=9)
PYTHONIC = ToolFormat("pythonic", PythonicParser)
FORMATS = {each.name: each for each in (HERMES, LLAMA, MISTRAL, PYTHONIC)}

_PYTHONIC = re.compile(r"\[\w+\(\w+ ?=")
_LLAMA = re.compile(r"""\{\\?"name\\?": ?function name, ?\\?"parameters\\?":""")
# Calls inside the same marker that are no JSON.
_OTHER = re.compile(r"<function=|<arg_key>|<invoke ")


def format_of(template: str) -> ToolFormat | None:
    """The form that the source of a chat template speaks of; None for none or one not known."""
    if _OTHER.search(template):
        return None
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|python_tag|>" in template or _LLAMA.search(template):
        return LLAMA
    return PYTHONIC if _PYTHONIC.search(template) else None
