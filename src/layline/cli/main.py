"""The ``layline`` command: builds the parser, runs one command, turns failures into exit codes.

Exit status: 0 done, 1 a check failed, 2 bad usage or input, 3 the run failed, 130 interrupted,
141 the reader of our output went away.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from layline.cli import chat, doctor, gate, generate, pull, serve
from layline.cli.bench import boundary, latency, pipeline, throughput
from layline.cli.failures import write_traceback
from layline.cli.grammar import CommandGroup, OneLineCommand, grouped, usage_message
from layline.cli.output import (
    OutputClosedError,
    OutputFailedError,
    abandon_stdout,
    cannot_write,
    lenient_streams,
    note,
)
from layline.cli.plan import command as plan
from layline.errors import LaylineError

INTERRUPTED = 130
OUTPUT_CLOSED = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status. Never raises for a user's mistake."""
    lenient_streams()
    try:
        result = build()(
            args=None if arguments is None else list(arguments),
            prog_name="layline",
            standalone_mode=False,
        )
        if sys.stdout is not None:
            sys.stdout.flush()
    except LaylineError as error:
        if isinstance(error, OutputFailedError):
            abandon_stdout()
        return fail(str(error), error.exit_status)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (OutputClosedError, BrokenPipeError, SystemExit):
        # SystemExit is typer's answer to a broken pipe while it prints help.
        abandon_stdout()
        return OUTPUT_CLOSED
    except Exception as error:
        return fail_otherwise(error)
    return result if isinstance(result, int) else 0


def fail_otherwise(error: Exception) -> int:
    """Exit status of an exception that is none of ours, after its line: a mistake or a surprise."""
    message = usage_message(error)
    if message is not None:
        return fail(message, 2)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        # Help, which typer prints, and the last flush.
        abandon_stdout()
        return fail(cannot_write(error), 3)
    return fail(
        f"internal error: {type(error).__name__}: {error}; traceback in {write_traceback()}", 3
    )


def fail(message: str, status: int) -> int:
    """Print ``message`` as one line on stderr and return ``status``."""
    try:
        note(f"layline: {' '.join(message.split())}")
    except (OutputClosedError, OutputFailedError):
        # Stderr cannot be written either.
        return status
    return status


def build() -> typer.Typer:
    """The parser with every command."""
    app = typer.Typer(
        cls=CommandGroup,
        help="An LLM inference engine built around what crosses a line.",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    for name, function in (
        ("pull", pull.pull),
        ("generate", generate.generate),
        ("chat", chat.chat),
        ("serve", serve.serve),
        ("plan", plan.plan),
        ("gate", gate.gate),
        ("doctor", doctor.doctor),
    ):
        app.command(name, cls=OneLineCommand, short_help=first_line(function))(grouped(function))
    bench = typer.Typer(
        cls=CommandGroup, help="Measure, beside other engines.", rich_markup_mode=None
    )
    bench.callback()(bench_root)
    for name, measure in (
        ("latency", latency.latency),
        ("throughput", throughput.throughput),
        ("pipeline", pipeline.pipeline),
        ("boundary", boundary.boundary),
    ):
        bench.command(name, cls=OneLineCommand, short_help=first_line(measure))(grouped(measure))
    app.add_typer(bench, name="bench")
    return app


def first_line(function: Callable[..., Any]) -> str:
    """The summary of a command for the list of its group, which typer would cut short."""
    return (function.__doc__ or "").partition("\n")[0]


def show_version(wanted: bool) -> None:
    """Print the version and stop, when ``--version`` was given."""
    if wanted:
        from layline import __version__
        from layline.cli.output import write_line

        write_line(f"layline {__version__}")
        raise typer.Exit


def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """An LLM inference engine built around what crosses a line."""


def bench_root() -> None:
    """Measure, beside other engines in the same run."""


if __name__ == "__main__":
    sys.exit(main())
