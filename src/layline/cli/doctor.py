"""``layline doctor``: what this machine and this installation offer."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from layline.cli.output import write_json, write_line


def doctor(
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Versions, processor, memory, GPUs, pulled models and the environment doors in effect."""
    from layline.cli.inventory import inventory

    found = inventory()
    if json:
        write_json(found)
        return
    for title, section in found.items():
        write_line(title)
        for line in section_lines(section):
            write_line(f"  {line}")


def section_lines(section: dict[str, Any]) -> list[str]:
    """A section of the inventory as aligned lines; the entries of a list get one each."""
    width = max((len(name) for name in section), default=0)
    lines = []
    for name, value in section.items():
        entries = value if isinstance(value, list) and value else [value]
        if not isinstance(entries[0], dict):
            entries = [value]
        names = [name] + [""] * (len(entries) - 1)
        lines += [
            f"{title:<{width}}  {shown(entry)}" for title, entry in zip(names, entries, strict=True)
        ]
    return lines or ["none"]


def shown(value: Any) -> str:
    """A value for people."""
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(shown(item) for item in value) or "none"
    if isinstance(value, dict):
        return " · ".join(f"{name} {shown(item)}" for name, item in value.items())
    return str(value)
