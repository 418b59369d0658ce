"""The rules of a call that is written as in Python, with arguments by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from layline.errors import SamplingError
from layline.grammar import dumped

_SHARED = ("$defs", "definitions", "x-guidance")
_ENFORCED = ("type", "properties", "required", "additionalProperties")
_REMARKS = ("title", "description", "examples", "$schema", "$id", "$comment")
_UNDERSTOOD = frozenset((*_SHARED, *_ENFORCED, *_REMARKS))


def keyword_call(number: int, name: str, schema: Mapping[str, Any], *, exact: bool) -> list[str]:
    """``call_N: name(key=value, ...)``; keys in the order of the schema, values as JSON has them.

    Raises SamplingError for what cannot be written that way; ``exact``, for keywords that would be
    ignored too.
    """
    head = json.dumps(f"{name}(")
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise _refused(name, "properties that are no object")
    unknown = [key for key in schema if key not in _UNDERSTOOD]
    if exact and unknown:
        raise _refused(name, f"the keyword {unknown[0][:50]!r}")
    if not properties:
        if schema.get("additionalProperties") is False or "properties" in schema:
            return [f'call_{number}: {head} ")"']
        pair = f'pair_{number}: /[A-Za-z_][A-Za-z0-9_]*/ "=" %json {{}}'
        pairs = f'(pair_{number} (", " pair_{number})*)?'
        return [f'call_{number}: {head} {pairs} ")"', pair]
    required = schema.get("required", [])
    if not isinstance(required, list):
        raise _refused(name, "a value of 'required' that is no list")
    shared = {each: schema[each] for each in _SHARED if each in schema}
    rules = []
    for place, (key, inner) in enumerate(properties.items()):
        if not key.isidentifier():
            raise _refused(name, f"the name {key[:50]!r}")
        value = dumped({**inner, **shared} if isinstance(inner, dict) else inner)
        before = json.dumps(f"{key}=", ensure_ascii=False)
        rules.append(f"pair_{number}_{place}: {before} %json {value}")
    rules += _in_order(number, [key in required for key in properties])
    return [f'call_{number}: {head} keys_{number}_0 ")"', *rules]


def _refused(name: str, what: str) -> SamplingError:
    return SamplingError(
        f"grammar of the arguments of {name!r} has {what}, which this model's form of calls cannot "
        "follow; expected properties whose names are letters, digits and _"
    )


def _in_order(number: int, needed: Sequence[bool]) -> list[str]:
    """``keys_N_0``: the pairs of call N in order, with commas between; what is not needed may miss.

    ``keys`` has no pair before it yet, ``more`` has one.
    """
    rules = []
    last = len(needed)
    for place, is_needed in enumerate(needed):
        pair, after = f"pair_{number}_{place}", f"more_{number}_{place + 1}"
        skip_first = "" if is_needed else f" | keys_{number}_{place + 1}"
        skip_later = "" if is_needed else f" | {after}"
        rules.append(f"keys_{number}_{place}: {pair} {after}{skip_first}")
        rules.append(f'more_{number}_{place}: ", " {pair} {after}{skip_later}')
    return [*rules, f'keys_{number}_{last}: ""', f'more_{number}_{last}: ""']
