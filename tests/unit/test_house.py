"""Files and functions stay small: at most 400 lines a file, and 60 a function without its docstring."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
MOST_IN_A_FILE, MOST_IN_A_FUNCTION = 400, 60

# Each with its reason. What is small enough again must leave the list.
LARGE_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}


def sources() -> Iterator[tuple[str, str]]:
    """Each file of the house with its text."""
    for folder in ("src", "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring and decorators."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    docstring = function.body[0]
    return lines - ((docstring.end_lineno or 0) - docstring.lineno + 1)


def long_functions(text: str) -> set[str]:
    functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if lines_of(function) > MOST_IN_A_FUNCTION}


def test_files_are_small() -> None:
    assert {name for name, text in sources() if len(text.splitlines()) > MOST_IN_A_FILE} == set(LARGE_FILES)


def test_functions_are_short() -> None:
    found = {f"{name}::{function}" for name, text in sources() for function in long_functions(text)}
    assert found == set(LONG_FUNCTIONS)


def test_the_rule_can_fail() -> None:
    def function(lines: int) -> str:
        return 'def named():\n    """Says\n    what."""\n' + "    pass\n" * (lines - 1)

    assert long_functions(function(MOST_IN_A_FUNCTION)) == set()
    assert long_functions(function(MOST_IN_A_FUNCTION + 1)) == {"named"}
    assert len(dict(sources())) > 300
