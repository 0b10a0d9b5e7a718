"""The order in which a staged copy's two legs run, without a GPU: pretended streams write down who waits for whom.

What comes before what is then asked of that graph: no buffer is overwritten before it was read, no read of the target
or write of the source comes too early, and the two legs do overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwise.transfer import path

Node = tuple[str, int]
"""(stream, position in it)"""


class Graph:
    """Work on streams: what each piece was made to wait for besides its own stream's order."""

    def __init__(self) -> None:
        self.length: dict[str, int] = {}
        self.waits: dict[Node, list[Node]] = {}
        self.work: dict[str, Node] = {}
        self.running = "host"

    def push(self, stream: str, *after: Node) -> Node:
        node = (stream, self.length.get(stream, 0))
        self.length[stream] = node[1] + 1
        self.waits[node] = list(after)
        return node

    def last(self, stream: str) -> Node:
        return (stream, self.length[stream] - 1) if self.length.get(stream) else self.push(stream)

    def before(self, first: Node, then: Node) -> bool:
        """Whether `first` is done when `then` begins."""
        seen, todo = set(), [then]
        while todo:
            node = todo.pop()
            if node in seen or node not in self.waits:
                continue
            seen.add(node)
            todo += self.waits[node]
            if node[1]:
                todo.append((node[0], node[1] - 1))
        return first in seen and first != then


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graph]:
    found = Graph()
    names = iter(["out", "back"])

    class Event:
        def __init__(self, device: torch.device) -> None:
            self.at: Node | None = None

        def record(self, stream: Stream) -> None:
            self.at = found.last(stream.name)

        def synchronize(self) -> None:
            pass

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            found.push(self.name, found.last(other.name))

        def wait_event(self, event: Event) -> None:
            found.push(self.name, *([event.at] if event.at else []))

        def __enter__(self) -> None:
            self.before, found.running = found.running, self.name

        def __exit__(self, *how: object) -> None:
            found.running = self.before

    original = Tensor.copy_

    def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
        number = sum(name.startswith(found.running) for name in found.work)
        found.work[f"{found.running} {number}"] = found.push(found.running)
        assert non_blocking
        return original(self, src)

    def buffers(lane: Any, size: int) -> None:
        lane.buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]

    current = iter([Stream("source"), Stream("target")] * 10)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "Stream", lambda device: Stream(next(names)))
    monkeypatch.setattr(torch.cpu, "current_stream", lambda device: next(current))
    monkeypatch.setattr(Tensor, "copy_", copy_)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda self, stream: found.work.setdefault(f"keeps {stream.name}", ("", 0))
    )
    monkeypatch.setattr(path, "_make_buffers", buffers)
    monkeypatch.setattr(path, "SMALLEST", 100)
    monkeypatch.setattr(path, "_lane", cache(path._lane.__wrapped__))
    yield found


def test_the_legs_of_a_staged_copy_are_in_order_and_overlap(graph: Graph) -> None:
    written, used = graph.push("source"), graph.push("target")
    src = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    dst = torch.zeros_like(src)
    path._stream_legs(dst, src)
    assert torch.equal(dst, src)
    read, overwrite = graph.push("target"), graph.push("source")

    work = graph.work
    chunks = sum(name.startswith("out") for name in work)
    assert chunks == sum(name.startswith("back") for name in work) == 10
    for number in range(chunks):
        out, back = work[f"out {number}"], work[f"back {number}"]
        assert graph.before(written, out), "the source is read before it is written"
        assert graph.before(used, back), "the target is written while earlier work uses it"
        assert graph.before(out, back), "the second leg reads a buffer that is not full"
        assert graph.before(back, read), "a read right after the call comes too early"
        assert graph.before(out, overwrite), "a write to the source right after the call comes too early"
        if number >= 2:
            assert graph.before(work[f"back {number - 2}"], out), "a buffer is overwritten before it was read"
        if number >= 1:
            assert not graph.before(work[f"back {number - 1}"], out), "the legs do not overlap"
    assert not graph.before(work[f"back {chunks - 1}"], overwrite), "the source waits for a leg that it is no part of"
    assert {"keeps out", "keeps back"} <= work.keys()


def test_a_second_copy_waits_for_the_first_ones_buffers(graph: Graph) -> None:
    for _ in range(2):
        src = torch.randint(0, 256, (300,), dtype=torch.uint8)
        path._stream_legs(torch.zeros_like(src), src)
    # The first copy's three chunks went through buffers 0, 1 and 0; the second begins with 0 and 1 again.
    assert graph.before(graph.work["back 2"], graph.work["out 3"])
    assert graph.before(graph.work["back 1"], graph.work["out 4"])


@pytest.mark.parametrize(("size", "chunk"), [(10, 1 << 20), (1 << 25, 1 << 20), (1 << 28, 1 << 23), (1 << 34, 1 << 25)])
def test_chunks_are_a_share_of_the_copy_within_limits(size: int, chunk: int) -> None:
    assert path.chunk_bytes(size) == chunk
