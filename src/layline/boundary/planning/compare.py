"""Set planned collectives beside those that ran: one by one in order, and in totals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from layline.comm.groups import CollectiveKind, CollectiveRecord
from layline.topology import GroupName

Key = tuple[bool, GroupName, CollectiveKind]


@dataclass
class Side:
    """What one side, planned or executed, comes to."""

    count: int = 0
    payload_bytes: int = 0
    seconds: float = 0.0


@dataclass
class Pair:
    """Planned and executed collectives of one kind on one group."""

    planned: Side = field(default_factory=Side)
    executed: Side = field(default_factory=Side)


@dataclass
class Comparison:
    """Totals by place (in compute or not), group and kind, and what differs, in words."""

    pairs: dict[Key, Pair] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """True when every collective was planned, and every planned one ran."""
        return not self.differences

    def add(
        self,
        where: str,
        planned: Sequence[CollectiveRecord],
        executed: Sequence[CollectiveRecord],
    ) -> None:
        """Compare one rank's step; ``where`` names it in a difference.

        Kind, group, rows, columns, bytes, order and place must be equal; only time is not planned.
        The first difference of a step is kept, as what follows it is out of step.
        """
        for record in planned:
            _count(self._pair(record).planned, record)
        for record in executed:
            _count(self._pair(record).executed, record)
        for index, (wanted, found) in enumerate(zip_longest(planned, executed)):
            if wanted is None or found is None or _facts(wanted) != _facts(found):
                self.differences.append(
                    f"{where}, collective {index} of {len(planned)}: planned {_words(wanted)}, "
                    f"ran {_words(found)}"
                )
                return

    def totals(self) -> Iterable[tuple[Key, Pair]]:
        """Boundaries first, then compute; by group and kind."""
        order = [*GroupName]
        return sorted(
            self.pairs.items(),
            key=lambda item: (item[0][0], order.index(item[0][1]), str(item[0][2])),
        )

    def _pair(self, record: CollectiveRecord) -> Pair:
        return self.pairs.setdefault((record.in_compute, record.group, record.kind), Pair())


def _count(side: Side, record: CollectiveRecord) -> None:
    side.count += 1
    side.payload_bytes += record.payload_bytes
    side.seconds += record.seconds or 0.0


def _facts(record: CollectiveRecord) -> tuple[object, ...]:
    shape = (record.rows, record.columns, record.payload_bytes)
    return (record.kind, record.group, *shape, record.in_compute)


def _words(record: CollectiveRecord | None) -> str:
    if record is None:
        return "nothing"
    place = " in compute" if record.in_compute else " at a boundary"
    return (
        f"{record.kind.value} {record.group.name} of {record.rows} x {record.columns} "
        f"({record.payload_bytes} bytes){place}"
    )
