"""explain: what is known of a failure → a Diagnosis."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import IO, Any

from oomproof._explain.judging import judge
from oomproof._explain.scan import Scan
from oomproof._records.diagnosis import Diagnosis


def explain(
    error: BaseException | str | bytes | os.PathLike[str] | IO[str] | IO[bytes] | Iterable[str], *, model: Any = None
) -> Diagnosis:
    """Explains why training failed: whether memory ran out, which, what requested how much, and what to do.

    Reads text only. Nothing runs, and no framework is loaded.

    Args:
        error: An exception (with its causes), the text of a log, a path, an open file, or lines.
        model: The Keras model, to name one of its layers.

    Returns:
        A `Diagnosis`. Print it, or read its fields.

    Raises:
        OSError: The path cannot be read.
        ValueError: A string that names a file. Pass `pathlib.Path(name)`.
        TypeError: Anything else.

    Example:

    ```python
    try:
        model.fit(x, y, batch_size=4096)
    except Exception as error:
        print(oomproof.explain(error, model=model))
    ```
    """
    if isinstance(error, BaseException):
        return judge(Scan().read(_told(error)), model)
    if isinstance(error, str):
        _check_no_name(error)
    elif isinstance(error, os.PathLike):
        with pathlib.Path(error).open("rb") as file:
            return judge(Scan().read(file), model)
    elif not (isinstance(error, bytes) or hasattr(error, "read") or hasattr(error, "__iter__")):
        raise TypeError(
            "Expected an exception, the text of a log, a path, an open file or lines. "
            f"Received: {error!r} (of type {type(error).__name__})"
        )
    return judge(Scan().read(error), model)


def _check_no_name(text: str) -> None:
    if 0 < len(text) < 256 and "\n" not in text and "\0" not in text and pathlib.Path(text).is_file():
        raise ValueError(f"Expected the text of a log. Received the name of a file: write pathlib.Path({text!r})")


def _told(error: BaseException) -> Iterator[str]:
    """What an exception and those it came from say, the first one first."""
    chain: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in chain and len(chain) < 20:
        chain.append(found)
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    for each in reversed(chain):
        kind = type(each)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        try:
            text = str(each)
        except Exception:
            text = ""
        yield from f"{name}: {text}".splitlines() if text else [name]
        for note in getattr(each, "__notes__", ()):
            yield from str(note).splitlines()
