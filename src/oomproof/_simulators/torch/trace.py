"""A training step traced with fake tensors: Keras's own step is run, with shapes in the place of data.

torch runs op by op and frees what nobody refers to any more, so a run without data allocates and frees in the order in
which a real one does. It is the second step that is traced: Keras keeps the gradients of the one before through the
forward pass. `guard` does not, unless they are those of other pieces of the batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from keras import tree

from oomproof._backends.common.model import check_is_model, layers
from oomproof._backends.torch import expandable
from oomproof._backends.torch.engine import TorchEngine
from oomproof._backends.torch.kernels import faster_kernels
from oomproof._backends.torch.tree_walks import without_cycles
from oomproof._compat.torch import device_scope, to_torch_dtype
from oomproof._compat.torch_tracing import FakeTensorMode
from oomproof._records.trace import Allocator, Buffer, Spec, Target, Trace, Workload
from oomproof._simulators.torch.fake_values import fake_values
from oomproof._simulators.torch.garbage import collecting_by_hand
from oomproof._simulators.torch.gpu_behaviour import on_gpu, unseeded
from oomproof._simulators.torch.recording import Recorder
from oomproof._simulators.torch.workspaces import Workspaces

_COMPILED = (
    "The step was traced op by op. torch.compile fuses ops and may keep less between the passes, which is not modelled."
)


def trace(model: Any, workload: Workload) -> Trace:
    """Traces one step of plain Keras. Nothing is computed, nothing large is allocated, the model is left as it was.

    Args:
        model: A model that is built and compiled. Its optimizer need not be built.
        workload: The step.

    Raises:
        TypeError: If the model is no Keras model.
        ValueError: If the model is not built or not compiled.
        UnsupportedModelError: If memory depends on values.
    """
    _check(model, workload)
    workspaces = Workspaces(workload.target)
    recorder = Recorder(model, workspaces)
    with FakeTensorMode(allow_non_fake_inputs=True), fake_values(model) as snapshot, collecting_by_hand():
        data = tree.map_structure(_empty, _data(workload))
        for leaf in tree.flatten(data):
            if leaf is not None:
                recorder.add(leaf, "input", on_host=workload.target.gpu)
        for variable in snapshot.variables:
            if variable._value is not None:
                recorder.add(variable._value, "weights")
        as_guarded = workload.guarded or bool(workload.recompute)
        again = TorchEngine(model).rewired(workload.recompute) if as_guarded else contextlib.nullcontext()
        tidy = without_cycles() if as_guarded else contextlib.nullcontext()
        quick = faster_kernels() if as_guarded and not workload.jit else contextlib.nullcontext()
        with _place(workload.target, recorder), recorder, again, tidy, quick:
            alone = as_guarded and workload.phase == "train" and not workload.later_piece
            (_run_once if alone else _run_twice)(model, workload, data, recorder)
            ops, buffers = recorder.finish()
    if workload.later_piece:
        shared = {recorder.path_of(layer) for layer in layers(model) if len(getattr(layer, "_inbound_nodes", ())) > 1}
        buffers = tuple(_added_up(buffer, len(ops), shared) for buffer in buffers)
    notes = (_COMPILED,) if workload.jit else ()
    paged = as_guarded and workload.target.gpu and expandable.grow()
    allocator: Allocator = "expandable" if paged else "caching"
    return Trace(allocator, ops, (*buffers, *workspaces.lasting(len(ops))), notes)


def _added_up(buffer: Buffer, ops: int, shared: set[str]) -> Buffer:
    """A gradient as that of a later piece: the sum is there all the time, and what is added to it for a moment.

    Of a layer that is called more than once, the parts are added up first.
    """
    if buffer.category != "gradients":
        return buffer
    if buffer.start < 0:
        return dataclasses.replace(buffer, end=ops)
    outer = ("/".join(buffer.layer.split("/")[:depth]) for depth in range(1, buffer.layer.count("/") + 2))
    return buffer if any(path in shared for path in outer) else dataclasses.replace(buffer, end=buffer.start + 1)


def _check(model: Any, workload: Workload) -> None:
    check_is_model(model)
    if not model.built:
        raise ValueError(
            f"Expected a model that is built. Received: model={model.name!r}, whose weights are not there yet. "
            "Call it on a batch, or `model.build(input_shape)`, first."
        )
    if workload.phase != "predict" and not model.compiled:
        raise ValueError(
            f"Expected a model that is compiled. Received: model={model.name!r}. Call `model.compile(...)` first."
        )
    for leaf in tree.flatten(_data(workload)):
        if leaf is not None and not isinstance(leaf, Spec):
            raise TypeError(
                f"Expected a `Spec` in the place of each tensor of the batch. Received: {leaf!r} "
                f"(of type {type(leaf).__name__})"
            )


def _data(workload: Workload) -> tuple[Any, ...]:
    return (workload.x,) if workload.phase == "predict" else (workload.x, workload.y)


def _empty(spec: Spec | None) -> Any:
    return None if spec is None else torch.empty(spec.shape, dtype=to_torch_dtype(spec.dtype))


def _place(target: Target, recorder: Recorder) -> contextlib.AbstractContextManager[Any]:
    return on_gpu(target, recorder) if target.gpu else device_scope("cpu")


def _run_once(model: Any, workload: Workload, data: Any, recorder: Recorder) -> None:
    """Runs a training step as if others had been before that left nothing behind but the optimizer's slots."""
    model.train(True)
    with torch.enable_grad(), unseeded():
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        recorder.begin()
        # Gradients and what the update makes are named for their weights.
        recorder.before_update = lambda: _name_state(model, recorder)
        model.train_step(data)


def _run_twice(model: Any, workload: Workload, data: Any, recorder: Recorder) -> None:
    """Runs a step as `fit`, `evaluate` and `predict` do, and then the one that counts.

    The first one makes what only a first step makes (optimizer slots, the variables of metrics) and leaves behind
    what a step leaves behind.
    """
    training = workload.phase == "train"
    model.train(training)
    step = getattr(model, f"{workload.phase}_step")
    with torch.enable_grad() if training else torch.no_grad(), unseeded():
        logs = step(data)
        _name_state(model, recorder)
        recorder.begin()
        # As in Keras's loops, the old result is let go of when there is a new one.
        logs = step(data)
        del logs


def _name_state(model: Any, recorder: Recorder) -> None:
    """Says of weights and optimizer slots whose they are, now that every layer has been called."""
    names: dict[str, str] = {}
    for layer in layers(model):
        path = recorder.path_of(layer)
        for variable in (*layer._trainable_variables, *layer._non_trainable_variables):
            known = recorder.storage_of(variable._value)
            known.layer = known.layer or path
            # Keras names the slots of a variable like this.
            names[variable.path.replace("/", "_")] = known.layer
    if getattr(model, "optimizer", None) is None:
        return
    by_length = sorted(names, key=len, reverse=True)
    for slot in model.optimizer.variables:
        known = recorder.storage_of(slot._value)
        known.category = "optimizer"
        known.layer = next((names[name] for name in by_length if slot.name.startswith(name)), "")
