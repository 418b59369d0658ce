"""Plan one edge: the operations that bring a producer's output to a consumer's input."""

from __future__ import annotations

from layline.boundary.contracts import EdgeDecl, StageOutput
from layline.boundary.planning.records import Op, OpKind, Place
from layline.errors import DeclarationError

ENTER = Op(OpKind.ENTER, Place.PREPARE)
READ = Op(OpKind.READ, Place.PREPARE)
UPDATE_AND_READ = Op(OpKind.UPDATE_AND_READ, Place.PREPARE)
LEAVE = Op(OpKind.LEAVE, Place.EXIT)
UPDATE = Op(OpKind.UPDATE, Place.EXIT)


def plan_exit(producer: StageOutput) -> Op:
    """What the producer's exit does: leave a contribution, or write the residual itself."""
    return UPDATE if producer.update.at_producer else LEAVE


def plan_edge(edge: EdgeDecl) -> tuple[Op, ...]:
    """The edge's operations in order, the producer's first.

    Raises DeclarationError for an edge whose rows move or whose producer owes a sum: this version
    plans one rank, where every row is present and every sum is whole.
    """
    if edge.producer is None:
        return (ENTER, READ)
    moved = edge.producer.layout != edge.consumer.layout
    if moved or edge.producer.owed is not None or edge.residual_source != edge.residual_destination:
        owed = "nothing" if edge.producer.owed is None else f"a sum over {edge.producer.owed.value}"
        raise DeclarationError(
            f"no plan brings rows [{edge.producer.layout}] owing {owed} to rows "
            f"[{edge.consumer.layout}]: expected one rank, where rows stay and nothing is owed"
        )
    leaving = plan_exit(edge.producer)
    return (leaving, READ if leaving is UPDATE else UPDATE_AND_READ)
