"""How functions of Keras and the frameworks are replaced: entered and left, and only for threads that ask for it.

A patch is in its place for as long as anybody wants it; whoever leaves last puts back what was there. In between,
threads that have not asked see what they would see without. Should somebody else have patched over ours meanwhile,
theirs stays, and ours, underneath it, does what the original does.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

_lock = threading.Lock()
# Patches that a finaliser has given up. It may run in the middle of what holds the lock, even in the same thread.
_given_up: collections.deque[Patch] = collections.deque()
_NOTHING = object()


class Patch:
    """One attribute of a module or class, or one entry of a mapping, with something else in its place.

    Args:
        owner: What has it.
        name: Its name in there.
        make: Makes what replaces it from what is there. Asked once for each thing that it finds.
        create: Whether it may be missing, and is then taken away again.

    Raises:
        AttributeError: The owner has no such attribute.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any], *, create: bool = False) -> None:
        self._owner = owner
        self._name = name
        self._make = make
        self._wanted = 0
        self._original: Any = _NOTHING
        self._replacement: Any = _NOTHING
        if not create and self._current() is _NOTHING:
            raise AttributeError(f"{owner!r} has no attribute {name!r}")

    def __enter__(self) -> None:
        with _lock:
            self._enter()
        if _given_up:
            _settle()

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._leave()
        if _given_up:
            _settle()

    def give_up(self) -> None:
        """As leaving, from a finaliser."""
        _given_up.append(self)
        _settle()

    def _enter(self) -> None:
        self._wanted += 1
        if self._wanted > 1:
            return
        current = self._current()
        # Somebody who patched over ours may have put it back when we were gone.
        if self._replacement is not _NOTHING and current is self._replacement:
            return
        if self._replacement is _NOTHING or current is not self._original:
            self._original, self._replacement = current, self._make(None if current is _NOTHING else current)
        self._put(self._replacement)

    def _leave(self) -> None:
        self._wanted -= 1
        if not self._wanted and self._current() is self._replacement:
            self._put(self._original)

    def _current(self) -> Any:
        # As the class has it: a property or static method itself, and not what it gives.
        entries = self._owner if isinstance(self._owner, MutableMapping) else vars(self._owner)
        return entries.get(self._name, _NOTHING)

    def _put(self, value: Any) -> None:
        if isinstance(self._owner, MutableMapping):
            if value is _NOTHING:
                del self._owner[self._name]
            else:
                self._owner[self._name] = value
        elif value is _NOTHING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, value)


def _settle() -> None:
    """Leaves what finalisers gave up. Whoever holds the lock does it when they are done."""
    while _given_up and _lock.acquire(blocking=False):
        try:
            while _given_up:
                _given_up.popleft()._leave()
        finally:
            _lock.release()


class Together:
    """Patches that are entered and left together. One object serves any number of threads."""

    def __init__(self, *patches: Patch) -> None:
        self._patches = patches

    def __enter__(self) -> None:
        with _lock:
            for patch in self._patches:
                patch._enter()
        if _given_up:
            _settle()

    def __exit__(self, *_: object) -> None:
        with _lock:
            for patch in reversed(self._patches):
                patch._leave()
        if _given_up:
            _settle()


class Current(Protocol):
    """A value that each thread has its own of, `None` at first."""

    value: Any


class OfThread(threading.local):
    """A value of the thread."""

    value: Any = None


class Redirect:
    """A function of somebody else's that can be answered by another one, in a thread that asks for it.

    Args:
        owner: As for `Patch`.
        name: Likewise.
        current: Where to keep who answers.
        create: As for `Patch`.
    """

    def __init__(self, owner: Any, name: str, current: Current | None = None, *, create: bool = False) -> None:
        self._current = OfThread() if current is None else current
        self._patch = Patch(owner, name, self._redirected, create=create)

    def to(self, answer: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
        """While it lasts, calls in this thread are answered by `answer(original, *args, **kwargs)`."""
        return _Answered(self._patch, self._current, answer)

    def _redirected(self, original: Any) -> Any:
        current = self._current
        if isinstance(original, property):
            return property(self._redirected(original.fget), original.fset, original.fdel, original.__doc__)

        # A class that is called like a function has no attributes of its own to hand on.
        @functools.wraps(original, updated=() if isinstance(original, type) else ("__dict__",))
        def redirected(*args: Any, **kwargs: Any) -> Any:
            answer = current.value
            return original(*args, **kwargs) if answer is None else answer(original, *args, **kwargs)

        return redirected


class _Answered:
    """As short as can be: some are entered in every step."""

    def __init__(self, patch: Patch, current: Current, answer: Callable[..., Any]) -> None:
        self._patch = patch
        self._current = current
        self._answer = answer
        self._before: Any = None

    def __enter__(self) -> None:
        self._patch.__enter__()
        self._before, self._current.value = self._current.value, self._answer

    def __exit__(self, *_: object) -> None:
        self._current.value = self._before
        self._patch.__exit__()


def redirects(owner: Any, *names: str, current: Current | None = None) -> dict[str, Redirect]:
    """Those of the functions that the owner has: versions differ."""
    return {name: Redirect(owner, name, current) for name in names if name in vars(owner)}
