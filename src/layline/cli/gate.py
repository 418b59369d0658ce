"""``layline gate``: the pipeline against one stage, bit by bit, and canaries that turn it red."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layline.cli import session
from layline.cli.options import (
    ModelArgument,
    ModelOption,
    RunOptions,
    choice_option,
    trace_option,
)
from layline.cli.output import note, write_json, write_line, write_timeline
from layline.config import DEFAULT_MODEL, EngineConfig
from layline.errors import UsageError, one_of

if TYPE_CHECKING:
    from layline.gates.canaries import Canary
    from layline.gates.canary_run import CanaryOutcome
    from layline.gates.run import Outcome
    from layline.gates.session import GateSession
    from layline.pipeline.trace import Timeline

CHOICES = ("eager", "batch", "prime", "verify", "graph", "all")


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """What is gated."""

    loop: Annotated[str, choice_option("--loop", CHOICES, "which loop's steps to replay")] = "all"
    canary: Annotated[
        list[str] | None,
        typer.Option(
            "--canary",
            metavar="NAME|all|list",
            help="re-create a failure class, which must turn the gate red; may be given again",
            show_default="none",
        ),
    ] = None
    trace: Annotated[
        str | None, trace_option("write a timeline of stages, transfers and waits, for Perfetto")
    ] = None
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False


def gate(
    options: GateOptions,
    run: RunOptions,
    argument: ModelArgument = None,
    model: ModelOption = None,
) -> int:
    """Prove that pipeline stages compute what one stage does, to the bit, in every loop."""
    name = session.chosen_model(argument, model, DEFAULT_MODEL)
    if options.loop == "graph" and run.device != "cpu":
        raise UsageError(
            "--loop graph replays captured steps, which this version does on the CPU alone; "
            "expected --device cpu"
        )
    canaries = chosen_canaries(options.canary)
    if options.canary == ["list"]:
        show_list(canaries, as_json=options.json)
        return 0
    if options.canary and options.trace:
        raise UsageError("--trace is of the gate itself; expected it without --canary")
    try:
        return run_gate(EngineConfig(**run.keywords(), model=name), options, canaries)
    except UsageError as error:
        raise type(error)(session.with_flags(str(error))) from None


def chosen_canaries(names: list[str] | None) -> list[Canary]:
    """Those that are named, all of them for ``all`` and ``list``. Raises UsageError."""
    if not names:
        return []
    from layline.gates.canaries import CANARIES

    known = {canary.name: canary for canary in CANARIES}
    if names in (["all"], ["list"]):
        return list(CANARIES)
    for name in names:
        if name not in known:
            raise UsageError(one_of("--canary", name, [*known, "all", "list"]))
    return [known[name] for name in dict.fromkeys(names)]


def show_list(canaries: list[Canary], *, as_json: bool) -> None:
    """The table of failure classes."""
    if as_json:
        rows = [{"canary": each.name, "class": each.number, "what": each.what} for each in canaries]
        write_json({"canaries": rows})
        return
    for each in canaries:
        write_line(f"{each.number:>2}  {each.name:<20} {each.what}")


def run_gate(engine: EngineConfig, options: GateOptions, canaries: list[Canary]) -> int:
    """Run what is asked for and print it; 0 where all is as it must be, else 1."""
    import time

    from layline.gates.session import open_gate
    from layline.pipeline.trace import Timeline

    begin = time.perf_counter()
    timeline = None if options.trace is None else Timeline()
    if timeline is not None and engine.device != "cpu":
        raise UsageError(
            "--trace shows when streams of the CPU ran; expected device cpu (a CUDA device's own "
            "profiler shows it there)"
        )
    with open_gate(engine, lambda line: note(f"layline: {line}")) as opened:
        if not options.json:
            write_line(opened.headline())
        if options.canary:
            passed, data = run_canaries(opened, canaries, quiet=options.json)
        else:
            passed, data = run_loops(opened, options, timeline)
    data |= {"passed": passed, "configuration": opened.configuration}
    data["seconds"] = round(time.perf_counter() - begin, 3)
    if timeline is not None and options.trace is not None:
        write_timeline(timeline, options.trace)
        data["trace"] = options.trace
    if options.json:
        write_json(data)
    else:
        verdict = "passed" if passed else "FAILED"
        what = "every canary turned it red" if options.canary and passed else verdict
        write_line(f"gate: {what}, {data['seconds']:.1f} s")
    return 0 if passed else 1


def run_loops(
    opened: GateSession, options: GateOptions, timeline: Timeline | None
) -> tuple[bool, dict[str, Any]]:
    """Every scenario of the loop, in every way."""
    from layline.gates.run import run_scenario

    quiet = options.json

    def report(outcome: Outcome) -> None:
        if not quiet:
            show_outcome(outcome)

    found: list[Outcome] = []
    for scenario in opened.make.of(options.loop):
        if scenario.loop == "graph" and opened.model.plan.engine.device != "cpu":
            continue
        found += run_scenario(opened.model, scenario, opened.doors, report, timeline)
    return all(each.is_green for each in found), {"arms": [each.as_data() for each in found]}


def show_outcome(outcome: Outcome) -> None:
    """One arm, its counters, and why it is red."""
    moved = ", ".join(f"{name} {count}" for name, count in outcome.counters.items() if count)
    told = outcome.refusal if outcome.verdict == "refused" else moved or "no counter moved"
    write_line(
        f"{outcome.verdict:<7} {outcome.scenario:<20} {outcome.way:<10} {outcome.num_steps:>3} "
        f"steps {outcome.num_values:>9} values {outcome.seconds:6.2f} s  {told}"
    )
    for reason in outcome.reasons:
        write_line(f"        {reason}")


def run_canaries(
    opened: GateSession, canaries: list[Canary], *, quiet: bool
) -> tuple[bool, dict[str, Any]]:
    """Every canary that is asked for, once broken and once not."""
    from layline.gates.canary_run import run_canary

    found: list[CanaryOutcome] = []
    for canary in canaries:
        found.append(run_canary(opened.bench, canary, opened.make, opened.doors))
        if not quiet:
            show_canary(found[-1])
    passed = all(each.is_red or each.absent is not None for each in found)
    return passed, {"canaries": [each.as_data() for each in found]}


def show_canary(found: CanaryOutcome) -> None:
    """One canary: red is what it is for."""
    verdict = found.verdict if found.is_red or found.verdict == "n/a" else found.verdict.upper()
    write_line(f"{verdict:<5}  {found.canary.number:>2} {found.canary.name:<20} {found.reason}")
