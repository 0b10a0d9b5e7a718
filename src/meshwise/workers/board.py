"""Keep the values of launchers in torch's TCPStore on machine 0.

If MESHWISE_KEY is set, each value has a code of this key, and a value without one is refused.
"""

from __future__ import annotations

import hmac
import json
import os
import uuid
from typing import Any

from meshwise.spec.errors import UsageError, WorkerFailed
from meshwise.spec.exit_codes import AGAIN, under_scheduler
from meshwise.workers.places.place import Place
from meshwise.workers.rendezvous import reached, served

KEY = "MESHWISE_KEY"
"""Environment variable: a text that only the launchers of this run know."""
PREFIX, CODE = "meshwise/", 64


class Board:
    """The store in which the launchers meet. Only one thread may use it."""

    def __init__(self, place: Place) -> None:
        assert place.address is not None
        self._key = os.environ.get(KEY, "").encode()
        start = f"{place.key or 'a run'} on {place.nodes} machines"
        if place.node == 0:
            self._store = served(place.address, start)
        else:
            self._store = reached(place.address, start, f"machine {place.node} of {place.nodes}")

    def claim(self, node: int) -> None:
        """Take the place of machine `node` in this attempt.
        Raises WorkerFailed if another launcher has taken it."""
        mine = uuid.uuid4().hex
        if self.first(f"who/{node}", mine) != mine:
            code = AGAIN if under_scheduler() else UsageError.exit_code
            raise WorkerFailed(f"machine {node} is there already: an earlier start has not ended.", exit_code=code)

    def set(self, name: str, value: object) -> None:
        self._store.set(PREFIX + name, self._sealed(name, value))

    def first(self, name: str, value: object) -> Any:
        """Set a value unless there is one. Return the value that is there."""
        return self._opened(name, self._store.compare_set(PREFIX + name, "", self._sealed(name, value)))

    def has(self, *names: str) -> bool:
        return bool(self._store.check([PREFIX + name for name in names]))

    def get(self, *names: str) -> list[Any]:
        """Return values that are there."""
        told = self._store.multi_get([PREFIX + name for name in names])
        return [self._opened(name, text) for name, text in zip(names, told, strict=True)]

    def _sealed(self, name: str, value: object) -> str:
        text = json.dumps(value)
        return self._code(name, text) + text

    def _opened(self, name: str, told: bytes) -> Any:
        text = told.decode()
        length = CODE if self._key else 0
        code, text = text[:length], text[length:]
        if not hmac.compare_digest(code, self._code(name, text)):
            raise WorkerFailed(f"a value of another process, which does not know {KEY}.", exit_code=AGAIN)
        return json.loads(text)

    def _code(self, name: str, text: str) -> str:
        if not self._key:
            return ""
        return hmac.digest(self._key, f"{name} {text}".encode(), "sha256").hex()
