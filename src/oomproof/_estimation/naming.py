"""What a user names on the command line as module:function."""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any

# Keras puts what a layer raised between these, with the arguments of the call after it.
_RAISED_IN_A_LAYER = re.compile(r"Exception encountered when calling .*?\x1b\[1m(.*?)\x1b\[0m", re.DOTALL)


def called(source: str) -> Any:
    """What the function returns that is named as `"module:function"`, of a module here or installed.

    Raises:
        ValueError: With what is wrong, in words.
    """
    module_name, _, function_name = source.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"Expected a function as module:function, such as train:build_model. Received: {source!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name == module_name.split(".")[0]:
            raise ValueError(f"There is no module {module_name!r} here or among what is installed.") from error
        raise ValueError(f"{module_name} could not be imported: {first_line(error)}") from error
    except Exception as error:
        raise ValueError(f"{module_name} could not be imported: {described(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"Module {module_name!r} has no function {function_name!r}.")
    try:
        return function()
    except Exception as error:
        raise ValueError(f"{source} failed: {described(error)}") from error


def said(error: BaseException) -> str:
    """What an error says, without what Keras says about the call it came from."""
    inner = _RAISED_IN_A_LAYER.search(str(error))
    return inner[1] if inner else str(error)


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its name."""
    lines = said(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def described(error: BaseException) -> str:
    """Its type and the first line of what it says."""
    return f"{type(error).__name__}: {first_line(error)}"
