"""The arguments of a call, to be read and changed by name, and passed on the way they were given."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class CallArguments(dict[str, Any]):
    """The arguments that were given, by name.

    What was given by name stays so: tools that wrap `fit` (MLflow's autologging is one) add a keyword to those they are
    called with, and must not find that argument among the others.

    Args:
        method: What is called.
        args: Arguments given by place.
        kwargs: Arguments given by name.

    Raises:
        TypeError: Python's own, where the method does not take these arguments.
    """

    def __init__(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        signature = inspect.signature(method)
        signature.bind(*args, **kwargs)
        parameters = signature.parameters.values()
        self._by_place = [each.name for each in parameters if each.kind in _BY_PLACE][: len(args)]
        self._rest = args[len(self._by_place) :]
        self._names = {each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD}
        self._takes_more = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
        super().__init__({**dict(zip(self._by_place, args, strict=False)), **kwargs})

    def may_have(self, name: str) -> bool:
        """Whether the method takes an argument of this name."""
        return name in self._names or self._takes_more

    def passed_to(self, method: Callable[..., Any]) -> Any:
        """Calls the method with them."""
        by_name = dict(self)
        by_place = [by_name.pop(name) for name in itertools.takewhile(self.__contains__, self._by_place)]
        return method(*by_place, *self._rest, **by_name)
