"""Everything a step depends on, in one value that can be compared, and how to go back to it.

Whatever is traced, compiled, planned, measured or proven for a model holds as long as its fingerprint is the same. It
is taken when `fit`, `evaluate`, `predict` and `*_on_batch` begin and when Keras makes its functions anew.

What plain Keras does when a model is changed and not compiled again (seen with Keras 3.15, TensorFlow 2.21, JAX 0.10,
torch 2.13):

- **TensorFlow** traces its function once for each signature of the data, and goes on with that trace: a layer that is
  frozen between two calls of `fit`, at the end of an epoch or in its middle is trained on, and a replaced optimizer is
  not used. `make_train_function(force=True)` traces anew, at once. So does data of another signature.
- **JAX** hands the values to its function as lists, when an epoch begins and after `jax_state_sync`. Lists of other
  lengths or shapes are traced anew: a frozen layer is noticed, and `fit` raises a ValueError, since the optimizer was
  built for more weights; `evaluate` and `predict` go on. A replaced optimizer is used. What no list shows (a frozen
  BatchNormalization without weights, a dtype policy) is not noticed before the function is made anew.
- **torch**, and what is run eagerly, is what the model is at each step.

Training under guard does the same. In two cases it does not, where plain Keras on JAX computes with values in the wrong
place: where two layers of the same shapes change places among the trainable ones, and where a layer is frozen in the
middle of an epoch, whose values are then put back into other variables. And a replaced optimizer of the same kind is
used with its own settings there, not with those that the old trace has as constants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

# Of the model itself. What `compile` makes anew is told by identity.
_PARTS = ("optimizer", "_compile_loss", "_compile_metrics", "_loss_tracker")
_MODES = ("_run_eagerly", "_jit_compile", "steps_per_execution")
# Of each layer: what its call, and which of its weights are trained, depend on.
_SETTINGS = ("_trainable", "_dtype_policy", "_is_quantized", "_remat_mode")
_OF_LAYER = ("_functional", *_SETTINGS)


class Fingerprint:
    """What a model is at one moment. Equal for as long as nothing has changed that a step depends on.

    It holds what it tells apart by identity, so that nothing else can come to lie in the same place.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        own = vars(model)
        parts = [own.get(name) for name in _PARTS]
        layers = list(_layers(model))
        settings = [[vars(layer).get(name) for name in _OF_LAYER] for layer in layers]
        weights = [variable for layer in layers for variable in _variables_of(layer)]
        optimizer = parts[0]
        others = [] if optimizer is None else [*optimizer.variables, *optimizer._trainable_variables]
        others += _of_metrics(parts[1:])
        self.things = (tuple(map(id, layers)), tuple(map(id, weights)), tuple(map(id, others)), tuple(map(id, parts)))
        flags = [variable._trainable for variable in weights]
        modes = [own.get(name) for name in _MODES]
        self._held = (layers, weights, others, parts, settings)
        self._flags = flags
        # Settings by identity: policies that are equal and not the same cost one trace, and no lookup.
        named = tuple(id(value) for some in settings for value in some)
        self._key = (self.things, named, tuple(flags), tuple(modes))
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fingerprint) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """The model as it was, for what has to be traced now and belongs to a trace that Keras would have kept.

        Flags, policies and the optimizer go back to what they were. Layers that were added meanwhile stay.
        """
        layers, weights, _, parts, settings = self._held
        then = [(self._model, "optimizer", parts[0])]
        then += [
            (layer, name, value)
            for layer, values in zip(layers, settings, strict=True)
            for name, value in zip(_OF_LAYER, values, strict=True)
            if name in _SETTINGS
        ]
        then += [(variable, "_trainable", flag) for variable, flag in zip(weights, self._flags, strict=True)]
        changed = [(vars(thing), name, value) for thing, name, value in then if vars(thing).get(name) is not value]
        now = [(attributes, name, attributes[name]) for attributes, name, _ in changed if name in attributes]
        try:
            _put(changed)
            yield
        finally:
            _put(now)


def _put(settings: list[tuple[dict[str, Any], str, Any]]) -> None:
    # Not through Keras's setters, which would pass a flag on to what is inside of a layer.
    for attributes, name, value in settings:
        attributes[name] = value


def _layers(model: Any) -> Iterator[Any]:
    """Every layer at any depth, each once, in the order Keras lists them: a quarter of the time of Keras's own way."""
    seen = set()
    waiting = [model]
    while waiting:
        layer = waiting.pop()
        if id(layer) not in seen:
            seen.add(id(layer))
            yield layer
            waiting.extend(reversed(layer._layers))


def _variables_of(layer: Any) -> list[Any]:
    states = [generator.state for generator in layer._seed_generators]
    return [*layer._trainable_variables, *layer._non_trainable_variables, *states]


def _of_metrics(parts: list[Any]) -> list[Any]:
    loss, metrics, tracker = parts
    shown = [] if loss is None else loss.metrics
    return [v for metric in (metrics, tracker, *shown) if metric is not None for v in metric.variables]
