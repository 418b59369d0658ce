"""Opening a model for a command."""

from __future__ import annotations

import gc
import re
from dataclasses import fields
from typing import TYPE_CHECKING

from layline.cli.options import RunOptions
from layline.config import elastic_environment
from layline.errors import UsageError

if TYPE_CHECKING:
    from layline.engine.llm import LLM

# As a word of a sentence, not as a part of a path or a quoted value.
NAMES = [each.name for each in fields(RunOptions)]
# A short one is a word of its own, unless a value follows.
KEYWORD = re.compile(
    rf"(?<![^\s(])(?:(?:{'|'.join(name for name in NAMES if '_' in name)})(?= )"
    rf"|(?:{'|'.join(name for name in NAMES if '_' not in name)})(?= [\d']))"
)


def open_llm(model: str, run: RunOptions) -> LLM:
    """Load ``model`` as the flags say. Raises LaylineError. The only place a command does so."""
    # Importing torch and loading make some million objects that all stay: collecting among them
    # costs a tenth of the start-up, and later collections need not look at them again.
    gc.disable()
    try:
        from layline.engine.llm import LLM

        return LLM(model=model, **run.keywords())
    except UsageError as error:
        raise type(error)(with_flags(str(error))) from None
    finally:
        gc.freeze()
        gc.enable()


def follow() -> int | None:
    """Under torchrun: None for the process that runs the command, which is rank 0.

    Every other process is a rank of its model until the command is done; its exit status.
    """
    found = elastic_environment()
    if found is None or found[0] == 0:
        return None
    from layline.engine.elastic import World, follow

    return follow(World(*found))


def with_flags(message: str) -> str:
    """``message`` with the flags of RunOptions where it names the engine's keywords."""
    return KEYWORD.sub(lambda found: f"--{found[0].replace('_', '-')}", message)


def chosen_model(argument: str | None, option: str | None, default: str) -> str:
    """The model from ``MODEL`` or ``--model``. Raises UsageError when they disagree."""
    if argument is not None and option is not None and argument != option:
        raise UsageError(
            f"MODEL {argument!r} and --model {option!r} disagree; give one of them, "
            f"such as --model {option!r}"
        )
    return argument or option or default
