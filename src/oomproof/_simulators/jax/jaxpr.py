"""A jaxpr without nesting: what is called is put in the place of the call, what nobody needs is left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from oomproof._records.patience import look_at_the_clock
from oomproof._simulators.jax.cudnn import lstm_workspace
from oomproof._simulators.xla.convolutions import for_cudnn
from oomproof._simulators.xla.program import Convolution, Node, Program, Value, linked
from oomproof._simulators.xla.zeros import with_shared_zeros

# Primitives that only call another jaxpr, by the parameter it is under.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat2": "jaxpr",
    "remat": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_lin": "jaxpr",
}
# These name the same bytes anew.
_SAME_BYTES = {"reshape", "squeeze", "expand_dims", "copy", "copy_p", "stop_gradient", "optimization_barrier"}
_SAME_BYTES |= {"name", "random_wrap", "random_unwrap", "reduce_precision", "sharding_constraint", "pvary"}


def flattened(closed: Any, gpu: bool, *, compiled: bool = True) -> Program:
    """A closed jaxpr as one list of operations, each computed once, with what they need besides on a GPU.

    Args:
        closed: The jaxpr.
        gpu: Whether it runs on one.
        compiled: Whether it is one program, and not run op by op.
    """
    maker = _Maker(gpu)
    inputs = [maker.value(variable.aval) for variable in closed.jaxpr.invars]
    outputs = maker.inline(closed.jaxpr, inputs, [maker.constant(c) for c in closed.consts], "", None)
    nodes = for_cudnn(maker.nodes, shared=compiled) if gpu else maker.nodes
    return linked(with_shared_zeros(nodes) if gpu and compiled else nodes, inputs, outputs)


class _Maker:
    def __init__(self, gpu: bool) -> None:
        self.nodes: list[Node] = []
        self._gpu = gpu
        self._seen: dict[Any, list[Value]] = {}
        self._recomputed = 0

    def value(self, aval: Any) -> Value:
        dtype = aval.dtype
        # The keys of random generators are arrays of another dtype.
        itemsize = getattr(dtype, "itemsize", 8)
        shape = tuple(int(n) for n in aval.shape)
        return Value(shape, str(dtype), math.prod(shape) * itemsize)

    def constant(self, array: Any) -> Value | None:
        if not getattr(array, "shape", ()):
            return None
        value = self.value(array)
        self.nodes.append(Node("constant", [], [value]))
        value.node = self.nodes[-1]
        return value

    def inline(
        self,
        jaxpr: Any,
        given: Sequence[Value | None],
        constants: Sequence[Value | None],
        scope: str,
        apart: int | None,
    ) -> list[Value | None]:
        """Adds the operations of a jaxpr. `None` stands for a number that is known.

        Args:
            apart: Set inside a computation that is to be repeated rather than taken from where it was done before.
        """
        known: dict[Any, Value | None] = dict(zip(jaxpr.constvars, constants, strict=True))
        known.update(zip(jaxpr.invars, given, strict=True))

        def read(atom: Any) -> Value | None:
            return None if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            look_at_the_clock()
            name = equation.primitive.name
            inputs = [read(atom) for atom in equation.invars]
            where = _joined(scope, str(equation.source_info.name_stack))
            if name in _CALLS and _CALLS[name] in equation.params:
                inner = equation.params[_CALLS[name]]
                inner, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
                mark = apart
                if name in ("remat2", "remat", "checkpoint") and equation.params.get("prevent_cse", True):
                    self._recomputed += 1
                    mark = self._recomputed
                outputs = self.inline(inner, inputs, [self.constant(c) for c in consts], where, mark)
            elif _same_bytes(equation, name):
                outputs = inputs[: len(equation.outvars)]
            else:
                outputs = self._operation(equation, name, inputs, where, apart)
            known.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _operation(
        self, equation: Any, name: str, inputs: list[Value | None], scope: str, apart: int | None
    ) -> list[Value | None]:
        literals = [str(atom.val) if isinstance(atom, Literal) else None for atom in equation.invars]
        shapes = [variable.aval.shape for variable in equation.outvars]
        sources = [id(value) if value is not None else text for value, text in zip(inputs, literals, strict=True)]
        key = (name, *sources, *shapes, _hashable(equation.params), apart)
        if key in self._seen:
            return list(self._seen[key])
        arrays = [value for value in inputs if value is not None]
        zero = any(isinstance(atom, Literal) and not atom.aval.shape and atom.val == 0 for atom in equation.invars)
        node = Node(name, arrays, [], scope, zero=zero, **_facts(equation, name, arrays, self._gpu))
        for variable in equation.outvars:
            value = self.value(variable.aval)
            value.node = node
            node.outputs.append(value)
        self.nodes.append(node)
        self._seen[key] = node.outputs
        return list(node.outputs)


def _facts(equation: Any, name: str, inputs: Sequence[Value], gpu: bool) -> dict[str, Any]:
    """What is to be known of an operation, from its parameters."""
    params = equation.params
    if name.startswith("reduce"):
        return {"axes": tuple(params.get("axes", ()))}
    if name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        # As they are read here: arrays may have been made with other shapes.
        first, second, result = (tuple(atom.aval.shape) for atom in (*equation.invars, *equation.outvars))
        convolution = Convolution(
            (first, second, result),
            tuple(numbers.lhs_spec[:2]),
            tuple(numbers.rhs_spec[:2]),
            tuple(numbers.out_spec[:2]),
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            grouped=params["feature_group_count"] > 1 or params["batch_group_count"] > 1,
        )
        return {"convolution": convolution}
    if name in ("rnn_fwd", "rnn_bwd"):
        return {"scratch": lstm_workspace(params, inputs)}
    if name == "scan":
        # From JAX 0.11 on the operands are told apart as trees: what is the same in all rounds, carried, and given.
        carried = params["num_carry"] if "num_carry" in params else len(params["ft_in"].unpack()[1])
        return {"bodies": [flattened(params["jaxpr"], gpu)], "carried": carried}
    if name == "while":
        body = flattened(params["body_jaxpr"], gpu)
        return {"bodies": [body], "carried": len(body.outputs)}
    if name == "cond":
        return {"bodies": [flattened(branch, gpu) for branch in params["branches"]]}
    return {}


def _same_bytes(equation: Any, name: str) -> bool:
    """Whether the results are the operands, named anew."""
    if name in _SAME_BYTES:
        return True
    before, after = equation.invars[0].aval if equation.invars else None, equation.outvars[0].aval
    if before is None or before.dtype != after.dtype:
        return False
    if name == "broadcast_in_dim":
        return before.size == after.size and bool(before.shape)
    if name == "transpose":
        order = [axis for axis in equation.params["permutation"] if before.shape[axis] != 1]
        return order == sorted(order)
    return name == "convert_element_type"


def _hashable(params: dict[str, Any]) -> Any:
    """Parameters that tell operations apart; those with programs inside are never the same."""
    try:
        key = tuple(sorted((name, value) for name, value in params.items() if name != "sharding"))
        hash(key)
    except TypeError:
        return str(sorted((name, str(value)) for name, value in params.items()))
    return key


def _joined(outer: str, inner: str) -> str:
    return f"{outer}/{inner}" if outer and inner else outer or inner
