"""How the command line is read: option groups, and usage errors in one line.

Typer prints a usage box for a mistake and offers no hook to change it. Here the mistakes become
``UsageError`` with a message of one line, which ``main`` prints like every other error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

from typer.core import TyperCommand, TyperGroup

from layline.cli.values import BadValue, closest
from layline.errors import UsageError


class CommandGroup(TyperGroup):
    """A group of commands that answers an unknown or missing one in one line."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that ``args`` names. Raises UsageError for an unknown one."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            known = self.list_commands(ctx)
            raise UsageError(
                f"{ctx.command_path} command {name!r} is not one of {', '.join(known)}"
                f"{closest(name, known)}"
            )
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the group's own options. Raises UsageError when no command follows."""
        if not args and not ctx.resilient_parsing:
            known = ", ".join(self.list_commands(ctx))
            raise UsageError(f"no command given to {ctx.command_path}; expected one of {known}")
        rest: list[str] = super().parse_args(ctx, args)
        return rest


class OneLineCommand(TyperCommand):
    """A command that names a surplus argument instead of printing its usage."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises UsageError for one too many."""
        ctx.allow_extra_args = True
        given = list(args)
        try:
            rest: list[str] = super().parse_args(ctx, args)
        except Exception as error:
            # The parser of option values knows no context, and the message needs the help text.
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            # The parser takes arguments off the list, so the one at fault is before what is left.
            failed = given[len(given) - len(args) - 1] if len(args) < len(given) else ""
            if "NoSuchOption" in kinds_of(error) and takes_prompt(self) and like_a_prompt(failed):
                raise UsageError(
                    f"{failed!r} starts with a dash and is no option of {ctx.command_path}; to "
                    f"use it as PROMPT put -- before it (-- {failed!r}), or give - and the text "
                    "on stdin"
                ) from None
            raise
        if ctx.args and not ctx.resilient_parsing:
            wanted = [shown_name(p) for p in self.params if p.param_type_name == "argument"]
            takes = " ".join(wanted) or "no arguments"
            raise UsageError(
                f"unexpected argument {ctx.args[0]!r}; {ctx.command_path} takes {takes} "
                "(quote a value that has spaces)"
            )
        return rest


def takes_prompt(command: TyperCommand) -> bool:
    """Whether an argument of the command is text that may start with anything."""
    return any(getattr(parameter, "metavar", None) == "PROMPT" for parameter in command.params)


def like_a_prompt(argument: str) -> bool:
    """Whether what was read as an option looks like text: ``-hello``, ``-1 + 2``, ``--- x``."""
    if not argument.startswith("-"):
        return False
    if any(character.isspace() for character in argument):
        return True
    one_dash = not argument.startswith("--")
    return (one_dash and len(argument) > 2) or not argument.lstrip("-")[:1].isalpha()


def shown_name(parameter: Any) -> str:
    """The name a user knows a parameter by: its metavar, its flag or its name in capitals."""
    if parameter.param_type_name == "option":
        return str(parameter.opts[0])
    return str(parameter.metavar or parameter.name.upper())


def kinds_of(error: Exception) -> set[str]:
    """The names of the classes of ``error``.

    Older typer raises click's classes and newer typer its own copy of them, which has no public
    import path; the class names are the same in both, so those are what is looked at.
    """
    return {kind.__name__ for kind in type(error).__mro__}


def usage_message(error: Exception) -> str | None:
    """The one-line form of a parsing error of typer's, or None for any other exception."""
    kinds = kinds_of(error)
    if "ClickException" not in kinds:
        return None
    found: Any = error
    if isinstance(error, BadValue):
        message = found.message
    elif "NoSuchOption" in kinds:
        message = unknown_option(found.option_name, found.ctx)
    elif "MissingParameter" in kinds:
        name = shown_name(found.param)
        expected = parameter_help(found.param, found.ctx) or name
        message = f"missing {name}; {found.ctx.command_path} expects {expected}"
    elif "BadOptionUsage" in kinds and "requires" in found.message:
        message = f"{found.option_name} has no value; expected {option_help(found)}"
    elif "BadOptionUsage" in kinds:
        message = f"{found.option_name} was given a value; expected {found.option_name} alone"
    else:
        message = found.format_message()
    return str(message)


def parameter_help(parameter: Any, ctx: Any) -> str | None:
    """A parameter's help text, which typer keeps in the record it prints."""
    record = parameter.get_help_record(ctx) if ctx is not None else None
    text = getattr(parameter, "help", None) or (record[1] if record else None)
    return None if text is None else str(text).split("  [")[0]


def option_help(error: Any) -> str:
    """What the option that ``error`` is about expects, from its help text."""
    for parameter in error.ctx.command.params if error.ctx else ():
        if error.option_name in parameter.opts:
            return f"{error.option_name} {parameter.metavar or 'VALUE'}, {parameter.help}"
    return f"{error.option_name} VALUE"


def unknown_option(name: str, ctx: Any) -> str:
    """The line for an option that the command in ``ctx`` does not have.

    It lists all options only where none is near.
    """
    known = [option for parameter in ctx.command.params for option in long_options(parameter)]
    near = closest(name, known)
    if near:
        return f"unknown option {name!r}{near} ({ctx.command_path} --help lists all)"
    return f"unknown option {name!r}; {ctx.command_path} takes {', '.join(known)}"


def long_options(parameter: Any) -> list[str]:
    """All spellings of an option, its ``--no-`` form too; nothing for an argument."""
    if parameter.param_type_name != "option":
        return []
    return [*parameter.opts, *parameter.secondary_opts]


def grouped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a command take dataclasses whose fields are options.

    Typer wants every option as a parameter of the function; commands here share options and have
    many. The returned function has the fields as its parameters, and calls ``function`` with the
    dataclasses made from them.
    """
    groups: dict[str, type[Any]] = {}
    flat: list[inspect.Parameter] = []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation) and isinstance(parameter.annotation, type):
            groups[parameter.name] = parameter.annotation
            flat.extend(field_parameters(parameter.annotation))
        else:
            flat.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def call(**values: Any) -> Any:
        made = {
            name: group(**{f.name: values.pop(f.name) for f in fields(group)})
            for name, group in groups.items()
        }
        return function(**values, **made)

    call.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return call


def field_parameters(group: type[Any]) -> list[inspect.Parameter]:
    """The fields of an option dataclass as keyword-only parameters."""
    hints = get_type_hints(group, include_extras=True)
    parameters = []
    for field in fields(group):
        default: Any = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        elif default is MISSING:
            default = inspect.Parameter.empty
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=hints[field.name],
            )
        )
    return parameters
