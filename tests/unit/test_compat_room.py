"""Private names of Keras and the frameworks stand in `_compat`, and nowhere else. Read from the source."""

from __future__ import annotations

import ast
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from test_imports import FILES, SOURCE, imported_modules, module_of, room_of

# A module whose name, or the name of a package it is in, begins with an underscore or is one of these.
PRIVATE = re.compile(
    r"(keras\.src|tensorflow\.python|jaxlib|(?:keras|tensorflow|tf|jax|torch)(?:\.\w+)*?\._[A-Za-z]\w*)\b"
)
# Operators have names like that, and are called by them.
OPERATORS = re.compile(r"torch\.ops\.")
# Strings that are text and not a name to import: rooms whose job they are.
TEXT = {
    "_explain": "lines of logs, and patterns for them",
    "_doctor": "names of distributions, as pip has them",
}
OUTSIDE = [file for file in FILES if room_of(module_of(file)) != "_compat"]


def private_modules(source: str, strings: bool = True) -> Iterator[str]:
    """Private names of frameworks in imports, in accesses to attributes, and in strings that are names of modules."""
    for name in imported_modules(source):
        if PRIVATE.match(name):
            yield name
    for node in ast.walk(ast.parse(source)):
        text = ""
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
        elif strings and isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        if " " not in text and PRIVATE.match(text) and not OPERATORS.match(text):
            yield text


@pytest.mark.parametrize("file", OUTSIDE, ids=module_of)
def test_private_modules_stand_in_compat_alone(file: pathlib.Path) -> None:
    found = list(private_modules(file.read_text(), strings=room_of(module_of(file)) not in TEXT))
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "from keras.src.backend import config",
        "import tensorflow.python.eager as eager",
        "from torch.utils._pytree import tree_flatten",
        "from jax._src import core",
        "import jaxlib",
        "keras.src.utils.thing()",
        "torch._C._current_autograd_node()",
        "torch._foreach_copy_(a, b)",
        "torch.autograd._get_sequence_nr()",
        "importlib.import_module('keras.src.backend.torch.rnn')",
        "importlib.import_module(f'keras.src.backend.{name}')",
    ],
)
def test_the_rule_can_fail(line: str) -> None:
    assert list(private_modules(line))


def test_operators_and_public_names_are_free() -> None:
    assert not list(private_modules("torch.ops.aten._local_scalar_dense.default\nfrom torch.utils import checkpoint"))


def test_mocks_are_for_tests() -> None:
    assert not [
        file for file in FILES if "unittest" in {name.split(".")[0] for name in imported_modules(file.read_text())}
    ]


# What is private on objects of the frameworks themselves, and of tf.data's classes, whose options nothing else tells.
NOT_KERAS = {
    # tensors, storages, modules and nodes of torch
    "_buffers", "_parameters", "_cdata", "_sequence_nr",
    # graphs and operations of TensorFlow
    "_create_op_internal", "_functions", "_unique_id", "_handle_data",
}  # fmt: skip
TF_DATA = "oomproof.data.pipelines.tf_"


def attributes() -> dict[str, set[str]]:
    """By name of a private attribute that is no own one, the modules that use it."""
    trees = {module_of(file): ast.parse(file.read_text()) for file in OUTSIDE}
    own = {name for tree in trees.values() for name in _defined(tree)}
    found: dict[str, set[str]] = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
                of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                called_on_super = ast.unparse(node.value) == "super()"
                is_operator = OPERATORS.match(ast.unparse(node)) or ast.unparse(node).startswith("_aten.")
                if node.attr not in own and not of_self and not called_on_super and not is_operator:
                    found.setdefault(node.attr, set()).add(module)
    return found


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self")):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name


def table() -> dict[str, dict[str, str]]:
    """`ATTRIBUTES`, without Keras."""
    tree = ast.parse((SOURCE / "oomproof" / "_compat" / "keras.py").read_text())
    (value,) = (n.value for n in tree.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "ATTRIBUTES")
    found: Any = ast.literal_eval(value)  # type: ignore[arg-type]
    return found


def test_attributes_of_keras_are_in_its_table() -> None:
    known = {name for names in table().values() for name in names}
    unknown = {
        name: sorted(modules)
        for name, modules in attributes().items()
        if name not in known | NOT_KERAS and not all(module.startswith(TF_DATA) for module in modules)
    }
    assert not unknown


def test_the_table_has_nothing_that_is_not_used() -> None:
    text = "\n".join(file.read_text() for file in OUTSIDE)
    idle = [name for names in table().values() for name in names if not re.search(rf"\b{name}\b", text)]
    assert not idle


@pytest.mark.parametrize("name", ["patches", "versions", "names"])
def test_what_needs_no_framework_imports_none(name: str) -> None:
    modules = imported_modules((SOURCE / "oomproof" / "_compat" / f"{name}.py").read_text())
    assert {module.split(".")[0] for module in modules} <= {"oomproof", *sys.stdlib_module_names}
