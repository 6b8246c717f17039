"""StableHLO as text, read into a program: what TensorFlow lowers a step to, without the libraries that read it.

Operations are given JAX's names, by which fusion knows them. Only what decides about memory is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from oomproof._records.units import DTYPE_BYTES
from oomproof._simulators.xla.convolutions import for_cudnn
from oomproof._simulators.xla.program import Convolution, Node, Program, Value, linked
from oomproof._simulators.xla.zeros import with_shared_zeros

_NAMES = {
    "multiply": "mul",
    "subtract": "sub",
    "divide": "div",
    "maximum": "max",
    "minimum": "min",
    "power": "pow",
    "exponential": "exp",
    "log_plus_one": "log1p",
    "exponential_minus_one": "expm1",
    "select": "select_n",
    "convert": "convert_element_type",
    "reverse": "rev",
    "dot": "dot_general",
    "convolution": "conv_general_dilated",
    "select_and_scatter": "select_and_scatter_add",
    "case": "cond",
    "if": "cond",
}
_SAME_BYTES = {"reshape", "copy", "optimization_barrier", "bitcast_convert"}
_REDUCED_BY = {"add": "sum", "maximum": "max", "minimum": "min", "or": "or", "and": "and", "multiply": "prod"}
_DTYPES = {"i1": 1, "i8": 1, "ui8": 1, "i16": 2, "ui16": 2, "i32": 4, "ui32": 4, "i64": 8, "ui64": 8}
_DTYPES |= {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}
_TENSOR = re.compile(r"tensor<((?:\d+x)*)([a-z]+\d+)>")
_STATEMENT = re.compile(r"\s*(?:(?P<results>%[^=]*?) = )?\"?(?P<op>[\w.]+)\"?(?P<rest>.*)")
_OPERAND = re.compile(r"%[\w.]+(?:#\d+)?")
_WHILE_OPERAND = re.compile(r"%\w+ = (%[\w.]+(?:#\d+)?)")
_FUNCTION = re.compile(r"\s*func\.func (?:private |public )?@(?P<name>[\w.\-]+)\((?P<arguments>.*)")
_ARGUMENT = re.compile(r"(%\w+): (tensor<[^>]*>)")
_PLACE = re.compile(r"loc\((#loc\d*)\)\s*$")
_LOCATION = re.compile(r" loc\((?:[^()\[\]]|\[[^\]]*\]|\([^()]*\))*\)")
_ALIAS = re.compile(r"parameter_number = (\d+) : i64\}, output_index = array<i64(?:: (\d+))?>")


# Arguments, as (name, type), and lines of each function, by its name.
_Functions = dict[str, tuple[list[tuple[str, str]], list[str]]]


def read(text: str, gpu: bool = True) -> tuple[Program, set[int]]:
    """The program of the function `main`, and its results, by `id`, that take the place of arguments.

    On a GPU with what cuDNN needs besides.
    """
    lines = text.splitlines()
    functions = dict(_functions(lines))
    reader = _Reader(functions, _named_places(lines), gpu)
    arguments, body = functions["main"]
    inputs = [_value(kind) for _, kind in arguments]
    known: dict[str, Value | None] = dict(zip((name for name, _ in arguments), inputs, strict=True))
    outputs = reader.run(body, known)
    program = reader.linked(inputs, outputs)
    aliased = {int(output or 0) for _, output in _ALIAS.findall(text[: text.find("func.func")])}
    return program, {id(value) for index, value in enumerate(outputs) if index in aliased and value is not None}


class _Reader:
    """Turns statements into operations, calls included."""

    def __init__(self, functions: _Functions, places: dict[str, str], gpu: bool) -> None:
        self._nodes: list[Node] = []
        self._gpu = gpu
        self._seen: dict[Any, list[Value | None]] = {}
        self._functions = functions
        self._places = places
        # Names of zeros, each with the function it is known in.
        self._zeros: set[tuple[int, str]] = set()

    def linked(self, inputs: list[Value], outputs: Sequence[Value | None]) -> Program:
        return linked(with_shared_zeros(for_cudnn(self._nodes)) if self._gpu else self._nodes, inputs, outputs)

    def run(self, lines: Sequence[str], known: dict[str, Value | None]) -> list[Value | None]:
        """Adds the operations of these lines, and returns what they return."""
        for statement in _statements(lines):
            found = _STATEMENT.match(statement[0])
            if found is None:
                continue
            op = found["op"].rpartition(".")[2]
            if op == "return":
                return [known.get(name) for name in _OPERAND.findall(found["rest"].split(" : ")[0])]
            if found["results"]:
                self._statement(op, found["results"], found["rest"], statement, known)
        return []

    def _statement(
        self, op: str, results: str, rest: str, statement: Sequence[str], known: dict[str, Value | None]
    ) -> None:
        # Without an arrow operands may stand before: the results come last.
        made = _result_names(results)
        kinds = _result_types(statement)[-len(made) :]
        names = _WHILE_OPERAND.findall(rest) if op == "while" else _OPERAND.findall(rest.split(" : ")[0])
        inputs = [known.get(name) for name in names]
        scope = self._scope(statement[-1])
        if op == "call":
            called = re.search(r"@([\w.\-]+)", rest)
            assert called is not None
            arguments, body = self._functions[called[1]]
            inner = dict(zip((argument for argument, _ in arguments), inputs, strict=True))
            outputs = self.run(body, inner)
        elif op == "constant":
            if re.search(r"dense<-?0\.0+e[+-]00>", rest):
                self._zeros.add((id(known), made[0]))
            # One number repeated is written into whatever reads it.
            outputs = [None] if "dense<" in rest and not re.search(r'dense<(\[|"0x)', rest) else [_value(kinds[0])]
            if outputs[0] is not None:
                self._add(Node("constant", [], [outputs[0]], scope))
        elif op in _SAME_BYTES or _is_renamed(op, rest, inputs, kinds):
            outputs = inputs[: len(kinds)]
        elif op == "while":
            outputs = self._loop(rest, statement, inputs, kinds, scope)
        else:
            zero = any((id(known), name) in self._zeros for name in names)
            outputs = self._operation(op, rest, statement, inputs, kinds, scope, zero)
        for name, value in zip(made, outputs, strict=True):
            known[name] = value

    def _operation(
        self,
        op: str,
        rest: str,
        statement: Sequence[str],
        inputs: Sequence[Value | None],
        kinds: Sequence[str],
        scope: str,
        zero: bool,
    ) -> list[Value | None]:
        text = _OPERAND.sub("%", rest.partition(" loc(")[0])
        key = (op, text, tuple(id(value) for value in inputs), tuple(kinds), zero)
        if key in self._seen:
            return self._seen[key]
        if op == "select_and_scatter":
            # What is scattered comes first in JAX.
            inputs = [inputs[1], inputs[0], *inputs[2:]]
        node = Node(_name(op, rest, statement), [v for v in inputs if v is not None], [], scope, zero=zero)
        if op == "reduce" and (axes := re.search(r"dimensions = \[([\d, ]*)\]", rest)):
            node.axes = tuple(int(axis) for axis in axes[1].split(",") if axis.strip())
        if op == "convolution":
            node.convolution = _convolution(rest)
        outputs: list[Value | None] = []
        for kind in kinds:
            value = _value(kind)
            node.outputs.append(value)
            outputs.append(value)
        self._add(node)
        self._seen[key] = outputs
        return outputs

    def _loop(
        self, rest: str, statement: Sequence[str], inputs: Sequence[Value | None], kinds: Sequence[str], scope: str
    ) -> list[Value | None]:
        names = re.findall(r"(%\w+) = %", rest)
        start = next(i for i, line in enumerate(statement) if line.strip().startswith("} do {"))
        inside = _Reader(self._functions, self._places, self._gpu)
        carried = [_value(kind) for kind in kinds]
        known: dict[str, Value | None] = dict(zip(names, carried, strict=True))
        outputs = inside.run(statement[start + 1 :], known)
        # What a round hands on unchanged is read where it is, and takes nothing.
        changed = [output is not given for output, given in zip(outputs, carried, strict=True)]
        body = inside.linked(carried, outputs)
        node = Node("while", [v for v in inputs if v is not None], [], scope, bodies=[body], carried=len(carried))
        results: list[Value | None] = []
        for kind, value, moves in zip(kinds, inputs, changed, strict=True):
            if not moves:
                results.append(value)
                continue
            result = _value(kind)
            node.outputs.append(result)
            results.append(result)
        self._add(node)
        return results

    def _add(self, node: Node) -> None:
        for value in node.outputs:
            value.node = node
        self._nodes.append(node)

    def _scope(self, line: str) -> str:
        found = _PLACE.search(line)
        return self._places.get(found[1], "") if found else ""


def _functions(lines: Sequence[str]) -> Iterator[tuple[str, tuple[list[tuple[str, str]], list[str]]]]:
    for start, line in enumerate(lines):
        if found := _FUNCTION.match(line):
            end = next(i for i in range(start + 1, len(lines)) if re.match(r"  \}", lines[i]))
            arguments = _ARGUMENT.findall(found["arguments"].split(") -> ")[0])
            yield found["name"], (arguments, list(lines[start + 1 : end]))


def _statements(lines: Sequence[str]) -> Iterator[list[str]]:
    """The lines of each statement, with everything inside of it."""
    depth, current = 0, []
    for line in lines:
        if line.strip().startswith("^bb"):
            continue
        current.append(line)
        bare = _LOCATION.sub("", line)
        depth += bare.count("{") - bare.count("}")
        # The location comes last, behind all that is inside.
        if depth <= 0 and line.rstrip().endswith(")") and " loc(" in line:
            yield current
            depth, current = 0, []


def _named_places(lines: Sequence[str]) -> dict[str, str]:
    """What each location is called: a name of the framework's, behind however many others."""
    said = {}
    for line in lines:
        if line.startswith("#loc") and " = loc(" in line:
            name, _, content = line.partition(" = ")
            said[name] = content
    found: dict[str, str] = {}

    def look(name: str) -> str:
        if name not in found:
            found[name] = ""
            content = said.get(name, "")
            quoted = re.search(r'"([^"]*)"', content)
            texts = [quoted[1]] if quoted else [look(other) for other in re.findall(r"#loc\d*", content)]
            found[name] = max(texts, key=lambda text: "/" in text, default="")
        return found[name]

    return {name: look(name) for name in said}


def _value(kind: str) -> Value:
    found = _TENSOR.search(kind)
    if found is None:
        return Value((), kind, 0)
    shape = tuple(int(n) for n in found[1].split("x") if n)
    return Value(shape, found[2], math.prod(shape) * _DTYPES.get(found[2], DTYPE_BYTES.get(found[2], 8)))


def _result_types(statement: Sequence[str]) -> list[str]:
    # Behind the regions where they come before the types, else in the first line.
    text = statement[-1] if statement[-1].strip().startswith("})") else statement[0]
    types = _LOCATION.sub("", text).rpartition(" : ")[2]
    types = types.rpartition(" -> ")[2]
    return [found[0] for found in re.finditer(r"tensor<[^>]*>|!\S+", types)]


def _result_names(results: str) -> list[str]:
    names = []
    for part in results.split(","):
        name, _, count = part.strip().partition(":")
        names += [f"{name}#{index}" for index in range(int(count))] if count else [name]
    return names


def _name(op: str, rest: str, statement: Sequence[str]) -> str:
    if op in ("reduce", "reduce_window"):
        inside = " ".join(statement)
        applied = re.search(r"applies stablehlo\.(\w+)", inside) or re.search(r"= stablehlo\.(\w+) ", inside)
        return f"{op}_{_REDUCED_BY.get(applied[1], applied[1]) if applied else 'sum'}"
    return _NAMES.get(op, op)


def _is_renamed(op: str, rest: str, inputs: Sequence[Value | None], kinds: Sequence[str]) -> bool:
    """Whether the result is the operand seen differently."""
    if len(inputs) != 1 or inputs[0] is None or len(kinds) != 1:
        return False
    # As it is read here: the array may have been made with another shape.
    before, after = _value(rest.rpartition(" : ")[2].partition(" -> ")[0]), _value(kinds[0])
    if op == "broadcast_in_dim":
        return before.elements == after.elements
    if op == "transpose":
        dims = re.search(r"dims = \[([\d, ]*)\]", rest)
        order = [int(axis) for axis in dims[1].split(",") if axis.strip()] if dims else []
        order = [axis for axis in order if before.shape[axis] != 1]
        return order == sorted(order)
    return op == "convert" and before.dtype == after.dtype


def _convolution(rest: str) -> Convolution | None:
    numbers = re.search(r"dim_numbers = \[([^\]]*)\]x\[([^\]]*)\]->\[([^\]]*)\]", rest)
    # As they are read here: arrays may have been made with other shapes.
    shapes = [_value(found[0]).shape for found in _TENSOR.finditer(rest.rpartition(" : ")[2])]
    if numbers is None or len(shapes) != 3:
        return None
    first, second, result = ([label.strip() for label in labels.split(",")] for labels in numbers.groups())
    plain = (1,) * (len(shapes[0]) - 2)

    def sizes(name: str) -> tuple[int, ...]:
        found = re.search(rf"{name} = \[([\d, ]*)\]", rest)
        return tuple(int(n) for n in found[1].split(",") if n.strip()) if found else plain

    pads = re.search(r"pad = \[(\[.*?\])\]", rest)
    padding = tuple((int(a), int(b)) for a, b in re.findall(r"\[(-?\d+), (-?\d+)\]", pads[1])) if pads else ()
    return Convolution(
        (shapes[0], shapes[1], shapes[2]),
        (first.index("b"), first.index("f")),
        (second.index("o"), second.index("i")),
        (result.index("b"), result.index("f")),
        sizes("stride"),
        padding or ((0, 0),) * len(plain),
        sizes("lhs_dilate"),
        sizes("rhs_dilate"),
        any(int(count) > 1 for count in re.findall(r"(?:batch|feature)_group_count = (\d+)", rest)),
    )
