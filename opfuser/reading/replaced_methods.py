"""Methods of classes that are others for a time, in one thread alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .reads import MISSING


class _InThisThread:
    """A method that a class has in one thread, while others find the one that it had."""

    def __init__(self, function: Any, original: Any) -> None:
        self._functions = function, original
        self._owner = threading.get_ident()

    def __get__(self, instance: Any, kind: Any) -> Any:
        elsewhere = threading.get_ident() != self._owner
        return self._functions[elsewhere].__get__(instance, kind)


@contextmanager
def replaced(kind: type, name: str, function: Any) -> Iterator[None]:
    """The time in which a method of a class is another one; other threads see nothing of it."""
    own = vars(kind).get(name, MISSING)
    setattr(kind, name, _InThisThread(function, getattr(kind, name)))
    try:
        yield
    finally:
        if own is MISSING:
            delattr(kind, name)
        else:
            setattr(kind, name, own)
