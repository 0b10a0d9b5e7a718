"""Save and restore what else a loop needs: `mw.checkpoint(extra=)`.

Restored values are written back into the objects that held them.

Tensors, lists, dicts and objects with a state_dict are updated in place, so that the loop's variables for them have the
restored values. A plain number can only be put into the dict that it was given in.

Tested in tests/script/test_lost_in_a_loop.py.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def state_of_extra(extra: Any) -> Any:
    """Return a copy of `extra` to save, in which each object that has a state_dict is replaced by its state_dict."""
    if isinstance(extra, dict):
        return {name: state_of_extra(value) if hasattr(value, "state_dict") else value for name, value in extra.items()}
    return None if extra is None else extra.state_dict()


def restore_extra(extra: Any, saved: Any) -> None:
    """Write the saved values into `extra`. Entries of `extra` that were not saved stay as they are."""
    if not isinstance(extra, dict):
        if extra is not None and saved is not None:
            extra.load_state_dict(saved)
        return
    for name, value in (saved or {}).items():
        extra[name] = _filled(extra.get(name), value)


def _filled(own: Any, value: Any) -> Any:
    """Restore one value. If `own`, the program's object, can be updated in place, write `value` into it and return it.
    Otherwise return `value`."""
    if hasattr(own, "load_state_dict"):
        own.load_state_dict(value)
        return own
    if isinstance(own, Tensor) and isinstance(value, Tensor) and own.shape == value.shape:
        own.data.copy_(value)
        return own
    if type(own) is list and type(value) is list:
        own[:] = [_filled(a, b) for a, b in zip(own, value, strict=True)] if len(own) == len(value) else value
        return own
    if type(own) is dict and type(value) is dict:
        filled = {name: _filled(own.get(name), each) for name, each in value.items()}
        own.clear()
        own.update(filled)
        return own
    return value


def unread_numbers(*, held: int, extra: Any) -> str:
    """Return a warning if the program keeps no reference to the dict `extra`, so that it can never read or change the
    dict's numbers. An example is `mw.checkpoint(…, extra={"best": best})`. Return an empty string otherwise.

    held: `sys.getrefcount(extra)`, as counted by the caller. A larger count means that the program keeps the dict."""
    names = [str(n) for n, v in extra.items() if isinstance(v, int | float)] if type(extra) is dict else []
    if not names or held > _HELD_ONCE:
        return ""
    return (
        f"mw.checkpoint: the script keeps no reference to the dict of extra=. Each save writes the first value of "
        f"{', '.join(names)}, and the script cannot read a restored value. Write state = {{…}} and "
        f"mw.checkpoint(…, extra=state), and read and change state[{names[0]!r}] in the loop."
    )


class _Holder:
    def __init__(self) -> None:
        self.extra: Any = {}


_HOLDER = _Holder()
_HELD_ONCE = sys.getrefcount(_HOLDER.extra)  # what Python says of a dict that one attribute holds
