"""docs/backends.md names what a backend does not run: every `only` of the suite is a row there, and no row is idle."""

import ast
import pathlib

import pytest

HERE = pathlib.Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "backends.md"
NAMES = {"TensorFlow": "tensorflow", "JAX": "jax", "PyTorch": "torch"}


def calls():
    """(file, backends, reason) of every call of `only`."""
    for path in sorted(HERE.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "only":
                (because,) = (keyword.value.value for keyword in node.keywords if keyword.arg == "because")
                yield path.name, {argument.value for argument in node.args}, because


def rows():
    """{reason: backends} of the table."""
    table = PAGE.read_text().split("| what | runs on | elsewhere |")[1]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return {what: {NAMES[name] for name in where.split(", ")} for what, where, _ in cells[1:]}


def test_every_reason_is_a_row_and_every_row_is_used():
    table, used = rows(), list(calls())
    assert {because for _, _, because in used} == set(table)
    wrong = [(name, because) for name, backends, because in used if backends != table[because]]
    assert not wrong


@pytest.mark.parametrize("path", sorted(HERE.glob("test_*.py")), ids=lambda path: path.name)
def test_there_is_no_other_way_to_skip_on_a_backend(path):
    """Other skips are for what this Keras or this machine does not have, whatever the backend."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in ("skip", "skipif", "importorskip"):
            reason = ast.unparse(node)
            assert any(words in reason for words in ("this Keras has no", "takes Linux", "gpu-compile extra")), reason
