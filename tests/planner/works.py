"""Works made by hand: a few operators of one second each, and what lies between them."""

from __future__ import annotations

from collections.abc import Mapping

from meshwise.hardware.words import machine_from_words
from meshwise.planner.price import COMMUNICATION, COMPUTE, LAUNCH, MODEL, Priced, priced
from meshwise.planner.prices import Overlap, Prices
from meshwise.planner.work import CollectiveOperation, Copy, Event, Launch, Operation, Work

FREE = Overlap(1.0, 1.0)


def operation(name: str = "aten.mm") -> Operation:
    return Operation(name, ((1, 1),), ("fp32",), 0, 0, 0)


def computes(name: str = "aten.mm", stream: str = "main", **more: object) -> Launch:
    return Launch(operation(name), stream, **more)  # type: ignore[arg-type]


def gathers(ranks: tuple[int, ...], stream: str = "comm", kind: str = "all-gather", **more: object) -> Launch:
    return Launch(CollectiveOperation(kind, 1024, ranks), stream, **more)  # type: ignore[arg-type]


def sends(source: int, target: int, **more: object) -> Launch:
    return Launch(CollectiveOperation("send", 1024, (source, target)), "sends", **more)  # type: ignore[arg-type]


def receives(source: int, target: int, **more: object) -> Launch:
    return Launch(CollectiveOperation("receive", 1024, (source, target)), "receives", **more)  # type: ignore[arg-type]


def work(*events: Event, rank: int = 0, ranks: int = 8, kind: str = "gpu") -> Work:
    return Work(rank, ranks, kind, (), events)


class Given(Prices):
    """Seconds by the name of an operator or the kind of a collective; 1 for what is not named."""

    def __init__(
        self,
        seconds: Mapping[str, float] | None = None,
        launch: float = 0.0,
        words: str = "8xH100",
        spread: float = 1.0,
    ) -> None:
        super().__init__(machine_from_words(words))
        self.seconds, self.launching, self.spread = seconds or {}, launch, spread

    def of(self, what: Operation | CollectiveOperation | Copy, rank: int) -> Priced | None:
        name = what.name if isinstance(what, Operation) else "copy" if isinstance(what, Copy) else what.kind
        factor = COMPUTE if isinstance(what, Operation) else COMMUNICATION
        return priced(self.seconds.get(name, 1.0), self.spread, MODEL, factor)

    def host(
        self, what: Operation | CollectiveOperation | Copy, rank: int, phase: str = "", dtensors: bool = False
    ) -> Priced:
        return priced(self.launching, self.spread, MODEL, LAUNCH)
