"""A tf.data pipeline built again, stage by stage, with other settings or without some stages.

Through TensorFlow's public methods, and with the functions as they were traced: tracing again could draw other seeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from oomproof.data.pipelines.tf_stages import AUTOTUNE, Function, Node


class CannotRebuildError(Exception):
    """A stage that cannot be built again; the message says why."""


@dataclasses.dataclass(frozen=True)
class Changes:
    """What is to be different at a stage.

    Attributes:
        size: Another buffer size (shuffle, prefetch).
        parallel_calls: Calls of its function in flight (map), or `AUTOTUNE`.
        file: Where a cache is to be instead of in memory.
    """

    size: int | None = None
    parallel_calls: int | None = None
    file: str | None = None


def rebuilt(node: Node, without: tuple[str, ...] = ()) -> Any:
    """The pipeline without the stages of these kinds."""
    if not node.inputs:
        return node.dataset
    inputs = [rebuilt(each, without) for each in node.inputs]
    if node.kind in without and not (node.kind == "cache" and node.on_disk):
        return inputs[0]
    return again(node, inputs)


def again(node: Node, inputs: list[Any], changes: Changes | None = None) -> Any:
    """The stage on top of other inputs. The very same object where nothing is different.

    Raises:
        CannotRebuildError: Where that cannot be done without changing what comes out.
    """
    changes = changes or Changes()
    unchanged = all(new is old.dataset for new, old in zip(inputs, node.inputs, strict=True))
    if unchanged and changes == Changes():
        return node.dataset
    if node.kind not in _BUILDERS:
        raise CannotRebuildError(f"{node.name}: this stage cannot be rebuilt")
    return _BUILDERS[node.kind](node, inputs, changes)


def _shuffle(node: Node, inputs: list[Any], changes: Changes) -> Any:
    old = node.dataset
    seeds = [int(old._seed), int(old._seed2)]
    size = changes.size or node.number("_buffer_size")
    again = bool(old._reshuffle_each_iteration)
    new = inputs[0].shuffle(size, seed=seeds[1] if any(seeds) else None, reshuffle_each_iteration=again)
    # TensorFlow makes two seeds of the one it is given and tf.random.set_seed's: they have to come out as they were.
    if [int(new._seed), int(new._seed2)] != seeds:
        raise CannotRebuildError(f"{node.name}: tf.random.set_seed was called after it, so its order would change")
    return new


def _batch(node: Node, inputs: list[Any], changes: Changes) -> Any:
    old = node.dataset
    calls = node.parallel_calls
    options = {} if calls is None else {"num_parallel_calls": calls, "deterministic": _deterministic(old)}
    return inputs[0].batch(node.number("_batch_size", 1), drop_remainder=bool(old._drop_remainder), **options)


def _padded_batch(node: Node, inputs: list[Any], changes: Changes) -> Any:
    old = node.dataset
    return inputs[0].padded_batch(
        node.number("_batch_size", 1),
        padded_shapes=old._padded_shapes,
        padding_values=old._padding_values,
        drop_remainder=bool(old._drop_remainder),
    )


def _cache(node: Node, inputs: list[Any], changes: Changes) -> Any:
    if changes.file is not None:
        return inputs[0].cache(changes.file)
    return inputs[0].cache(node.dataset._filename)


def _prefetch(node: Node, inputs: list[Any], changes: Changes) -> Any:
    return inputs[0].prefetch(changes.size or node.number("_buffer_size"))


def _map(node: Node, inputs: list[Any], changes: Changes) -> Any:
    assert node.function is not None
    calls = changes.parallel_calls or node.parallel_calls
    function = _as_traced(node.function, node.inputs[0].dataset.element_spec, node.dataset.element_spec)
    if calls is None:
        return inputs[0].map(function)
    deterministic = _deterministic(node.dataset) if node.parallel_calls else None
    return inputs[0].map(function, num_parallel_calls=calls, deterministic=deterministic)


def _filter(node: Node, inputs: list[Any], changes: Changes) -> Any:
    import tensorflow as tf

    assert node.function is not None
    spec = node.inputs[0].dataset.element_spec
    return inputs[0].filter(_as_traced(node.function, spec, tf.TensorSpec([], tf.bool)))


def _as_traced(function: Function, spec: Any, out: Any) -> Callable[..., Any]:
    """The function as it was traced, taking and returning elements."""
    from oomproof._compat.tf_data import structure

    concrete = function.concrete

    def call(*element: Any) -> Any:
        # TensorFlow takes a tuple apart for the function, and nothing else.
        whole = element if type(spec) is tuple else element[0]
        flat = concrete(*structure.to_tensor_list(spec, whole))
        flat = list(flat) if isinstance(flat, list | tuple) else [flat]
        return structure.from_compatible_tensor_list(out, flat)

    import tensorflow as tf

    return tf.autograph.experimental.do_not_convert(call)  # type: ignore[no-any-return]


def _deterministic(dataset: Any) -> bool | None:
    kept = getattr(dataset, "_deterministic", "default")
    word = kept.decode() if isinstance(kept, bytes) else str(kept).lower()
    return {"true": True, "false": False}.get(word)


_BUILDERS: dict[str, Callable[[Node, list[Any], Changes], Any]] = {
    "shuffle": _shuffle,
    "batch": _batch,
    "padded_batch": _padded_batch,
    "cache": _cache,
    "prefetch": _prefetch,
    "map": _map,
    "filter": _filter,
    "repeat": lambda node, inputs, _: inputs[0].repeat(node.number("_count", AUTOTUNE)),
    "take": lambda node, inputs, _: inputs[0].take(node.number("_count")),
    "skip": lambda node, inputs, _: inputs[0].skip(node.number("_count")),
    "shard": lambda node, inputs, _: inputs[0].shard(node.number("_num_shards"), node.number("_index")),
    "options": lambda node, inputs, _: inputs[0].with_options(node.dataset._options_attr),
    "zip": lambda node, inputs, _: _zipped(node, inputs),
    "concatenate": lambda node, inputs, _: inputs[0].concatenate(inputs[1]),
    "unbatch": lambda node, inputs, _: inputs[0].unbatch(),
}


def _zipped(node: Node, inputs: list[Any]) -> Any:
    import tensorflow as tf

    order = iter(inputs)
    return tf.data.Dataset.zip(tf.nest.map_structure(lambda _: next(order), node.dataset._datasets))
