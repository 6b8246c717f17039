"""Records which op makes which storage, and when it is freed. Eager torch frees by counting references, so running the
step is planning its memory."""

from __future__ import annotations

import bisect
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from keras import Layer

from oomproof._compat.keras import global_state
from oomproof._compat.torch import tree_leaves
from oomproof._compat.torch_tracing import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    TorchDispatchMode,
    current_autograd_node,
    next_sequence_number,
    users_of,
)
from oomproof._records.patience import look_at_the_clock
from oomproof._records.trace import Buffer, Category, Op, Stage
from oomproof._simulators.torch.garbage import Garbage
from oomproof.errors import UnsupportedModelError

# How much a kernel takes besides its results: (op, its arguments, its results) -> bytes.
Workspace = Callable[[Any, Any, Any], int]

_DEVICE_OF = torch.ops.prim.device.default
_ADD = torch.ops.aten.add.Tensor
_READ = torch.ops.aten._local_scalar_dense.default
# So many values read on the way mean a loop that waits for data.
_READS = 100_000


class Storage:
    """One allocation.

    Attributes:
        size: Bytes.
        start: The op that made it, or -1.
        end: The op after which it was freed; `None` while it is there.
        category: What it is for, where that is known from the start or was found out.
        layer: The layer it belongs to.
        forward: Whether the forward pass made it.
    """

    __slots__ = ("category", "end", "forward", "layer", "size", "start")

    def __init__(self, size: int, start: int, layer: str, forward: bool, category: Category | None = None) -> None:
        self.size = size
        self.start = start
        self.end: int | None = None
        self.layer = layer
        self.forward = forward
        self.category = category


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Sees every op below autograd, forward and backward.

    Attributes:
        begun: The op the recorded step begins with; what was before is history that left things behind.
        running: Whether an op is running just now, rather than code between ops.
        before_update: Called when the backward pass is over.
    """

    def __init__(self, model: Any, workspace: Workspace) -> None:
        super().__init__()
        self.begun = 0
        self.running = False
        self.before_update: Callable[[], None] = lambda: None
        self._model = model
        self._workspace = workspace
        self._ops: list[Op] = []
        self._live: dict[int, Storage] = {}
        self._watches: dict[int, Any] = {}
        self._host: set[int] = set()
        self._storages: list[Storage] = []
        self._stage: Stage = "forward"
        self._first_backward = 0
        self._reads = 0
        self._garbage = Garbage()
        self._paths: dict[int, str] = {}
        # Autograd numbers its nodes as they are made: up to which number they were made by which layer.
        self._numbers: list[int] = []
        self._layers: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:
            return args[0].fake_device
        look_at_the_clock()
        outer, self.running = self.running, True
        try:
            return self._run(func, args, kwargs or {})
        finally:
            self.running = outer

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        layer = self._locate()
        if self._stage != "backward":
            self._garbage.op()
        here = len(self._ops)
        self._ops.append(Op(_name(func), self._stage, layer))
        if func is _ADD and self._stage == "backward" and not kwargs and _is_alone(args[0]):
            # As autograd adds a further gradient to one that nobody else has. To a fake one it never does.
            return args[0]
        try:
            results = func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not _READ:
                raise self._depends_on_data(func, layer) from None
            return self._made_up(args[0], func, layer)
        except DynamicOutputShapeException:
            raise self._depends_on_data(func, layer) from None
        self._note(args, results, layer)
        if size := self._workspace(func, args, results):
            self._storages.append(workspace := Storage(size, here, layer, False, "temporary"))
            workspace.end = here
        return results

    def _locate(self) -> str:
        """The layer of the op that comes. Notices where the backward pass begins and ends."""
        node = current_autograd_node()
        if node is None:
            if self._stage == "backward":
                self._stage = "update"
                self.before_update()
                self._mark_gradients()
            if self._stage == "update":
                return ""
            layer = self._scope()
            self._numbers.append(next_sequence_number())
            self._layers.append(layer)
            return layer
        if self._stage == "forward":
            self._stage, self._first_backward = "backward", len(self._ops)
        # A layer that is called in the backward pass is computed again.
        again = self._scope()
        if again:
            self._garbage.op()
            return again
        # A node is made right before its op is run, so it is of the first op that saw a higher number.
        place = bisect.bisect_right(self._numbers, node._sequence_nr())
        return self._layers[place] if place < len(self._layers) else ""

    def _scope(self) -> str:
        """Path of the layer that is being called, or the name of the loss."""
        scopes = global_state.get_global_attribute("name_scope_stack") or ()
        if not scopes:
            return ""
        called = [scope.caller for scope in scopes if isinstance(scope.caller, Layer)]
        path = "/".join(layer.name for layer in called if layer is not self._model)
        if called:
            self._paths.setdefault(id(called[-1]), path)
        return path if called or scopes[-1].caller is not None else str(scopes[-1].name)

    def path_of(self, layer: Any) -> str:
        """Path under which a layer was first called; empty if it was not."""
        return self._paths.get(id(layer), "")

    def _mark_gradients(self) -> None:
        for variable in self._model.trainable_variables:
            gradient = variable._value.grad
            if gradient is not None:
                known = self.storage_of(gradient)
                known.category = "gradients"
                known.layer = self.storage_of(variable._value).layer

    def _note(self, args: Any, results: Any, layer: str) -> None:
        made = tree_leaves(results)
        sources = args[0] if self._stage == "update" and args and isinstance(args[0], list | tuple) else args[:1]
        for place, result in enumerate(made):
            if not isinstance(result, torch.Tensor) or self._key(result) in self._live:
                continue
            if self._stage == "update" and place < len(sources) and isinstance(sources[place], torch.Tensor):
                # What an optimizer makes of a gradient or a slot belongs where that does.
                layer = self.storage_of(sources[place]).layer
            self._watch(result, Storage(0, len(self._ops) - 1, layer, self._stage == "forward"))

    def _watch(self, tensor: Any, storage: Storage) -> Storage:
        """Follows the storage of a tensor until it is freed."""
        untyped = tensor.untyped_storage()
        key = untyped._cdata
        storage.size = untyped.nbytes()
        self._live[key] = storage
        self._watches[key] = weakref.ref(untyped, functools.partial(self._freed, key))
        self._storages.append(storage)
        return storage

    def _freed(self, key: int, _: Any) -> None:
        self._watches.pop(key, None)
        storage = self._live.pop(key, None)
        if storage is not None:
            storage.end = max(storage.start, len(self._ops) - 1)

    def storage_of(self, tensor: Any) -> Storage:
        known = self._live.get(self._key(tensor))
        return known if known is not None else self._watch(tensor, Storage(0, -1, "", False))

    def add(self, tensor: Any, category: Category, on_host: bool = False) -> None:
        """Tells of a tensor that is there before any step. One in the host's memory does not count."""
        if self._key(tensor) in self._live:
            return
        storage = self._watch(tensor, Storage(0, -1, "", False, category))
        if on_host:
            self._storages.remove(storage)
            self._host.add(self._key(tensor))

    def is_on_host(self, tensor: Any) -> bool:
        return self._key(tensor) in self._host

    def copied_to_device(self, tensor: Any) -> Any:
        """A copy, on the device, of a tensor on the host."""
        copy = torch.empty_like(tensor)
        self.storage_of(copy).category = "input"
        return copy

    @staticmethod
    def _key(tensor: Any) -> int:
        return int(tensor.untyped_storage()._cdata)

    def begin(self) -> None:
        """What comes now is the step that is recorded."""
        self._mark_gradients()
        # How much is left over from the step before is chance.
        self._garbage.collect()
        self.begun = len(self._ops)
        self._stage = "forward"
        self._numbers.clear()
        self._layers.clear()

    def _made_up(self, tensor: Any, func: Any, layer: str) -> Any:
        """The answer where code asks for a value: yes, or one. Conditions then take the way that is usual, and a step
        that updates."""
        self._reads += 1
        if self._reads > _READS:
            raise self._depends_on_data(func, layer)
        return True if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1

    def _depends_on_data(self, func: Any, layer: str) -> UnsupportedModelError:
        where = f"Layer {layer!r}" if layer else "The step"
        return UnsupportedModelError(
            f"{where} does something whose size depends on the data ({_name(func)}), so its memory cannot be known "
            "before it runs. Use operations with fixed shapes there, such as `keras.ops.where` with three arguments."
        )

    def finish(self) -> tuple[tuple[Op, ...], tuple[Buffer, ...]]:
        """The ops of the recorded step, and every allocation that was there meanwhile."""
        ops, begun = tuple(self._ops[self.begun :]), self.begun
        buffers = []
        for storage in self._storages:
            end = len(self._ops) if storage.end is None else storage.end
            if end >= begun and storage.size:
                start = max(storage.start - begun, -1)
                buffers.append(Buffer(storage.size, start, end - begun, self._category(storage, end), storage.layer))
        return ops, tuple(buffers)

    def _category(self, storage: Storage, end: int) -> Category:
        if storage.category is not None:
            return storage.category
        kept = storage.forward and storage.start >= self.begun and self._stage != "forward"
        return "activations" if kept and end >= self._first_backward else "temporary"


def _is_alone(tensor: Any) -> bool:
    """Whether a tensor has all of its storage, and nobody else has any of it."""
    storage = tensor.untyped_storage()
    # One for the tensor, one for the Python object here.
    alone = users_of(storage) <= 2
    return alone and bool(storage.nbytes() == tensor.numel() * tensor.element_size())


@functools.cache
def _name(func: Any) -> str:
    return str(func.overloadpacket)
