"""A pipeline's schedule as a drawing: stages by time, one self-contained SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from layline.engine.pipeline_costs import Schedule
from layline.errors import UsageError
from layline.pipeline.schedule import Timeline

WIDTH = 1080
LEFT = 190
RIGHT = 24
ROW = 34
GAP = 8
TITLE = 44
"""From a panel's top to its first row."""
AXIS = 40
LEGEND = 34
MARGIN = 22
LETTER = 6.6
"""About the width of a letter in the drawing's font."""
# Eight that differ in hue and in lightness, with dark or light letters on them.
FILLS = ("#4e79a7", "#f2a65a", "#59a14f", "#e8c547", "#9c6ba8", "#76b7b2", "#d1605e", "#b9a08a")
LIGHT_TEXT = frozenset({"#4e79a7", "#59a14f", "#9c6ba8", "#d1605e"})
STYLE = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1d2733}"
    ".title{font-weight:600;font-size:14px}.head{font-weight:600;font-size:16px}"
    ".small{font-size:11px;fill:#51606f}.bar{stroke:#fff;stroke-width:1}"
    ".axis{stroke:#8a97a4;stroke-width:1}.grid{stroke:#dfe5ea;stroke-width:1}"
)
HATCH = (
    '<pattern id="bubble" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="7" height="7" fill="#f1f3f5"/>'
    '<rect width="2.4" height="7" fill="#c3ccd4"/></pattern>'
)


def write_drawing(
    path: str, title: str, stages: Sequence[str], schedules: Sequence[Schedule]
) -> None:
    """Draw ``schedules`` into a file. Raises UsageError when it cannot be written."""
    try:
        Path(path).write_text(drawing(title, stages, schedules), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--draw {path!r} cannot be written: {error.strerror}; expected a path like "
            "schedule.svg in a folder that exists"
        ) from None


def drawing(title: str, stages: Sequence[str], schedules: Sequence[Schedule]) -> str:
    """The SVG document; ``stages`` name the rows."""
    parts = []
    top: float = MARGIN + 30
    for schedule in schedules:
        panel, height = _panel(schedule, stages, top)
        parts.append(panel)
        top += height
    height = top + 6
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><defs>{HATCH}</defs>"
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
        f"{_text(MARGIN, MARGIN + 8, title, 'head')}{''.join(parts)}</svg>\n"
    )


def _panel(schedule: Schedule, stages: Sequence[str], top: float) -> tuple[str, float]:
    """One schedule and its height."""
    bottom = top + TITLE + len(stages) * (ROW + GAP)
    parts = [
        _text(MARGIN, top + 18, schedule.title, "title"),
        _text(MARGIN, top + 35, _summary(schedule), "small"),
    ]
    parts.append(_grid(top + TITLE, bottom))
    done = schedule.timeline
    for stage, name in enumerate(stages):
        y = top + TITLE + stage * (ROW + GAP)
        head, _, rest = name.partition("\n")
        parts.append(_text(MARGIN, y + 15, head))
        parts.append(_text(MARGIN, y + 29, rest, "small"))
        for start, stop in done.idle(stage):
            parts.append(_rect(_x(done, start), y, _x(done, stop), 'fill="url(#bubble)"'))
        for bar in done.bars:
            if bar.stage == stage:
                span = (_x(done, bar.start), _x(done, bar.stop))
                group = schedule.groups[bar.item]
                parts.append(_bar(span, y, group, schedule.items[bar.item]))
    parts.append(_legend(schedule, bottom + AXIS))
    return "".join(parts), bottom + AXIS + LEGEND + MARGIN - top


def _summary(schedule: Schedule) -> str:
    text = (
        f"numbers: {schedule.numbers}; bubbles: {schedule.timeline.bubble:.1%} of the stages' time"
    )
    if schedule.steady is not None:
        text += f"; {schedule.steady:.1%} in the long run"
    return text


def _x(done: Timeline, time: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * time / done.length


def _grid(top: float, bottom: float) -> str:
    """Lines at every quarter of the schedule, and its axis."""
    parts = []
    for quarter in range(5):
        x = LEFT + (WIDTH - LEFT - RIGHT) * quarter / 4
        parts.append(
            f'<line class="grid" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>'
        )
        anchor = ("start", "middle", "middle", "middle", "end")[quarter]
        parts.append(_text(x, bottom + 16, f"{25 * quarter}%", "small", anchor))
    parts.append(
        f'<line class="axis" x1="{LEFT}" y1="{bottom:.1f}" x2="{WIDTH - RIGHT}" y2="{bottom:.1f}"/>'
    )
    parts.append(_text(MARGIN, bottom + 16, "time, share of the whole", "small"))
    return "".join(parts)


def _bar(span: tuple[float, float], y: float, group: int, name: str) -> str:
    fill = FILLS[group % len(FILLS)]
    start, stop = span
    bar = _rect(start, y, stop, f'class="bar" fill="{fill}"')
    if stop - start < LETTER * len(name) + 6:
        return bar
    colour = "#fff" if fill in LIGHT_TEXT else "#1d2733"
    middle = (start + stop) / 2
    return bar + (
        f'<text x="{middle:.1f}" y="{y + ROW / 2 + 4:.1f}" text-anchor="middle" '
        f'style="fill:{colour}">{escape(name)}</text>'
    )


def _legend(schedule: Schedule, y: float) -> str:
    """What the colours are; many items are named by the first and the last."""
    several = max(schedule.groups) + 1
    decodes = schedule.steady is not None
    names = [f"microbatch {index}" if decodes else f"chunk {index}" for index in range(several)]
    shown = list(enumerate(names))
    if several > len(FILLS):
        shown = [*shown[: len(FILLS) - 1], (several - 1, f".. {names[-1]}")]
    entries = [(FILLS[index % len(FILLS)], name) for index, name in shown]
    parts = []
    widths = [24 + LETTER * len(name) + 16 for _, name in entries]
    lefts = [float(LEFT)]
    for width in widths:
        lefts.append(lefts[-1] + width)
    for (fill, name), (left, _) in zip(entries, pairwise(lefts), strict=True):
        parts.append(f'<rect x="{left:.1f}" y="{y:.1f}" width="16" height="14" fill="{fill}"/>')
        parts.append(_text(left + 22, y + 11.5, name, "small"))
    parts.append(
        f'<rect x="{MARGIN}" y="{y:.1f}" width="16" height="14" fill="url(#bubble)" '
        'stroke="#c3ccd4"/>'
    )
    parts.append(_text(MARGIN + 22, y + 11.5, "bubble: stage idle", "small"))
    return "".join(parts)


def _rect(start: float, y: float, stop: float, paint: str) -> str:
    width = max(stop - start, 0.5)
    return f'<rect x="{start:.2f}" y="{y:.1f}" width="{width:.2f}" height="{ROW}" {paint}/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named} text-anchor="{anchor}">{escape(text)}</text>'
