"""Facts about a Keras model that decide how its batches may be cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import tree

from oomproof._backends.common.call_graph import graphs
from oomproof._compat.keras import Trainer, compute_output_spec, global_state
from oomproof._compat.names import is_kerass
from oomproof.errors import UnsupportedModelError

# Functions of Keras that mix the samples of a batch unless they are told an axis.
_MIXING = (keras.losses.circle, keras.losses.dice, keras.losses.tversky)

_OWN_LOOP = """\
{kind} has its own `{method}`, so oomproof cannot tell what a step of it computes and cannot take it over.
Either put the loss into `compute_loss(self, x, y, y_pred, sample_weight, training=True)` and the metrics into
`compute_metrics(...)`, and remove `{method}`; or keep it and take the gradients inside it from
`oomproof.gradients(loss_fn, self.trainable_variables, data, micro_batch_size=...)`, without `guard`."""


def check_is_model(model: Any) -> None:
    # All that Keras asks of what it trains: a model is a layer with a trainer.
    if not (isinstance(model, Trainer) and isinstance(model, keras.Layer)):
        raise TypeError(f"Expected a keras.Model. Received: model={model!r} (of type {type(model).__name__})")


def check_has_no_own_step(model: Any) -> None:
    """Raises UnsupportedModelError when the class of the model replaces Keras's training step."""
    check_is_model(model)
    if overrides(model, "train_step"):
        raise UnsupportedModelError(_OWN_LOOP.format(kind=type(model).__name__, method="train_step"))


def overrides(model: Any, method: str) -> bool:
    """Whether the model's class, or the instance itself, replaces a method of Keras's trainer."""
    return method in vars(model) or getattr(type(model), method) is not getattr(Trainer, method)


def layers(model: Any) -> Iterator[Any]:
    """Every layer at any depth, the model itself first."""
    yield from model._flatten_layers(include_self=True, recursive=True)


def call(model: Any, x: Any, training: bool) -> Any:
    """Calls the model as Keras's own steps do."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def unpack(data: Any) -> tuple[Any, Any, Any]:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    return x, y, sample_weight


def first_tensor(x: Any) -> Any:
    """The tensor whose first dimension Keras takes for the batch size."""
    return next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)


def seed_variables(model: Any) -> list[Any]:
    """States of the random generators, which advance with every draw."""
    # Layers that were given no seed and keep no generator draw from a global one.
    shared = global_state.get_global_attribute("global_seed_generator")
    found = [generator for layer in layers(model) for generator in getattr(layer, "_seed_generators", ())]
    # Keras on JAX refuses that one in compiled steps and forgets its draws in others.
    found += [shared] if shared is not None and keras.backend.backend() != "jax" else []
    return list({id(generator.state): generator.state for generator in found}.values())


def draws_numbers(model: Any) -> bool:
    """Whether random numbers may be drawn when it is called: it has generators, or code of its own."""
    return bool(seed_variables(model)) or not all(is_kerass(type(layer)) for layer in layers(model))


def statistics_layers(model: Any) -> list[Any]:
    """Layers that normalise with statistics of the batch while training."""
    return [layer for layer in layers(model) if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable]


def statistics_caveat(model: Any) -> tuple[str, ...]:
    """What cutting a batch changes for layers that normalise with its statistics, in words; empty without any."""
    found = statistics_layers(model)
    if not found:
        return ()
    names = ", ".join(layer.path or layer.name for layer in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return (caveat_of_statistics(f"BatchNormalization ({names}{more})"),)


def caveat_of_statistics(layer: str) -> str:
    return f"{layer} normalises with the statistics of each piece"


def own_modules(thing: Any) -> Iterator[str]:
    """Names of the modules that a function, or the class of an object and what it inherits from, is written in."""
    if thing is None:
        return
    for code in [thing] if hasattr(thing, "__qualname__") else type(thing).__mro__:
        module = str(getattr(code, "__module__", ""))
        if module.split(".")[0] not in ("keras", "builtins", "abc", "tensorflow", "jax", "torch", "functools"):
            yield module


def has_own_code(model: Any) -> bool:
    """Whether anything but Keras's own layers decides what the model computes."""
    return any(not is_kerass(type(layer)) or isinstance(layer, keras.layers.Lambda) for layer in layers(model))


def may_mix(model: Any) -> bool:
    """Whether samples of a batch may be mixed in inference. Keras's layers do not, but operations may."""
    operations = (call.operation for graph in graphs(model) for call in graph.calls)
    return has_own_code(model) or any(not isinstance(operation, keras.Layer) for operation in operations)


def has_own_state(model: Any) -> bool:
    """Whether code that is not Keras's keeps a state, and may do something else later on."""
    own = [layer for layer in layers(model) if not is_kerass(type(layer))]
    return any(layer._non_trainable_variables for layer in own)


def has_known_sizes(model: Any) -> bool:
    """Whether all sizes of its outputs but the number of samples are known before it is called."""
    outputs = [tensor for tensor in tree.flatten(getattr(model, "outputs", None)) if tensor is not None]
    return bool(outputs) and all(None not in tensor.shape[1:] for tensor in outputs)


def has_fixed_batch(model: Any) -> bool:
    """Whether the model takes batches of one size only, as recurrent layers do that keep their state.

    That its inputs have a size is not enough: a Sequential model that is built by its first batch keeps that batch's.
    """
    # A model with code of its own has no inputs until it is called, and an optional one may be left out.
    inputs = [tensor for tensor in tree.flatten(getattr(model, "inputs", None)) if tensor is not None]
    sizes = {tensor.shape[0] for tensor in inputs if len(tensor.shape)} - {None}
    if not sizes:
        return False
    if any(getattr(layer, "stateful", False) for layer in layers(model)):
        return True
    # No multiple of what is there, nor 1, so that nothing is broadcast.
    others = 2 * max(sizes) + 1

    def resized(tensor: Any) -> Any:
        shape = (others, *tensor.shape[1:]) if len(tensor.shape) and tensor.shape[0] in sizes else tensor.shape
        return keras.KerasTensor(shape, tensor.dtype, sparse=tensor.sparse)

    try:
        compute_output_spec(model, tree.map_structure(resized, inputs), training=False)
    except Exception:
        return True  # Whatever a layer says to another size.
    return False


def may_add_losses(model: Any) -> bool:
    """Whether layers may add losses of their own. Keras's layers only do so for activity regularisers."""
    return has_own_code(model) or any(layer.activity_regularizer is not None for layer in layers(model))


def may_be_sparse(model: Any) -> bool:
    """Whether gradients may come as rows of a table."""
    return has_own_code(model) or any(isinstance(layer, keras.layers.Embedding) for layer in layers(model))


def depends_on_data(model: Any, data: Any) -> bool:
    """Whether how a batch goes together from pieces may depend on what is in it: masks, added losses, own code."""
    if may_add_losses(model) or not losses_stream(model) or not metrics_stream(model):
        return True
    return may_mask(model, data)


def overwritten(variables: Sequence[Any]) -> frozenset[int]:
    """Positions of variables whose "gradient" is their new value, as float8 layers have them.

    Those are scales, which are the same in every piece, and the largest values seen: the largest of all pieces is that
    of the whole batch.
    """
    return frozenset(i for i, v in enumerate(variables) if getattr(v, "overwrite_with_gradient", False))


def tracker_variables(model: Any) -> list[Any]:
    """Variables of the metrics that show losses. They are fed once a batch, with the loss of all of it."""
    trackers = [model._loss_tracker, *(model._compile_loss.metrics if model._compile_loss is not None else ())]
    return [variable for tracker in trackers if tracker is not None for variable in tracker.variables]


def losses_stream(model: Any) -> bool:
    """Whether the loss of the batch is a sum of shares that each piece can compute by itself.

    Only Keras's own losses are trusted to be one: anything else is computed on the whole batch's predictions.
    """
    if overrides(model, "compute_loss") or model._compile_loss is None:
        return False
    flat = model._compile_loss._flat_losses
    return bool(flat) and all(_loss_streams(loss) for _, loss, _, _ in flat)


def will_stream(model: Any) -> bool:
    """The same, as far as can be told, before Keras has looked at the losses that the model was compiled with."""
    compiled = model._compile_loss
    if overrides(model, "compute_loss") or compiled is None or compiled._flat_losses is not None:
        return False
    given = [loss for loss in tree.flatten(compiled._user_loss) if loss is not None]
    found = [keras.losses.get(loss) if isinstance(loss, str) else loss for loss in given]
    return bool(found) and all(
        _loss_streams(loss) if isinstance(loss, keras.losses.Loss) else _by_sample(loss, {}) for loss in found
    )


def _loss_streams(loss: Any) -> bool:
    if loss.reduction in (None, "none") or not is_kerass(type(loss)):
        return False
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return False  # It reduces in its own way, wherever it comes from.
    return _by_sample(getattr(loss, "fn", None), getattr(loss, "_fn_kwargs", {}))


def mixing_losses(model: Any) -> list[str]:
    """Names of the losses that are computed on the whole batch's predictions."""
    if overrides(model, "compute_loss"):
        return [f"{type(model).__name__}.compute_loss"]
    flat = model._compile_loss._flat_losses if model._compile_loss is not None else None
    return [loss.name for _, loss, _, _ in flat or () if not _loss_streams(loss)]


def mixes_samples(model: Any, y_pred: Any, samples: Any) -> bool:
    """Whether an output is such that Keras's losses of it, in this piece, may not be by sample.

    One of nothing but samples is reduced over its last axis: that of the samples. One without a row for each sample is
    spread over all targets.
    """
    if any(leaf is not None and len(leaf.shape) < 2 for leaf in keras.tree.flatten(y_pred)):
        return True
    known = [leaf.shape[0] for leaf in _outputs_with_loss(model, y_pred)]
    return isinstance(samples, int) and any(isinstance(rows, int) and rows != samples for rows in known)


def _outputs_with_loss(model: Any, y_pred: Any) -> list[Any]:
    found = []
    for path, *_ in model._compile_loss._flat_losses or ():
        output = y_pred
        for key in path:
            output = output[key]
        found.append(output)
    return found


def written_by_update(optimizer: Any) -> list[Any]:
    """Variables that an update may write, also those that Keras does not list.

    `LossScaleOptimizer` does not know of the product that Nadam keeps.
    """
    holders = [optimizer, getattr(optimizer, "inner_optimizer", optimizer)]
    kept = [value for holder in holders for value in vars(holder).values() if isinstance(value, keras.Variable)]
    return list({id(variable): variable for variable in [*optimizer.variables, *kept]}.values())


def uses_kept_tensor(model: Any) -> UnsupportedModelError:
    """What to raise for a loss that uses more than it is given."""
    names = ", ".join(mixing_losses(model))
    return UnsupportedModelError(
        f"A loss of this model ({names}) uses a tensor that it is not given, perhaps one that `call` has kept. In "
        "pieces it is computed on the predictions of the whole batch, when what a piece computed is gone, so a batch "
        "of it cannot be cut. Return that tensor as an output of the model, or give its loss to `add_loss` in `call`."
    )


def metrics_stream(model: Any) -> bool:
    """Whether every metric adds up over pieces. Keras's own do; others get the whole batch's predictions."""
    if overrides(model, "compute_metrics"):
        return False
    compiled = model._compile_metrics
    return compiled is None or all(_metric_streams(metric) for metric in compiled.metrics)


def _metric_streams(metric: Any) -> bool:
    function = getattr(metric, "_fn", None)
    if isinstance(function, keras.losses.Loss):
        return False  # A mean over the piece it is given.
    return is_kerass(type(metric)) and _by_sample(function, getattr(metric, "_fn_kwargs", {}))


def _by_sample(function: Any, options: dict[str, Any]) -> bool:
    """Whether a function of targets and predictions is known to treat each sample by itself."""
    if function is None:
        return True
    axis = options.get("axis", None if function in _MIXING else -1)
    axes = axis if isinstance(axis, list | tuple) else [axis]
    # Counted from the end, an axis before the last may be that of the samples.
    return is_kerass(function) and all(a is not None and (a == -1 or a > 0) for a in axes)


def may_mask(model: Any, data: Any) -> bool:
    """Whether normalisers of losses are expected to depend on more than the number of samples."""
    *_, sample_weight = unpack(data)
    masked = any(layer.supports_masking and _makes_mask(layer) for layer in model._flatten_layers())
    flat = [loss for _, loss, _, _ in model._compile_loss._flat_losses]
    weighted = sample_weight is not None and any(loss.reduction == "mean_with_sample_weight" for loss in flat)
    return masked or weighted or any(getattr(loss, "ignore_class", None) is not None for loss in flat)


def _makes_mask(layer: Any) -> bool:
    """Whether a layer may bring a mask into the model. Layers of unknown kind may."""
    if isinstance(layer, keras.layers.Embedding):
        return bool(layer.mask_zero)
    if isinstance(layer, keras.layers.Masking | keras.layers.Lambda):
        return True
    return not is_kerass(type(layer))


def fixed_regularisers(model: Any) -> list[Any]:
    """Weights with a regulariser: their penalty counts once a batch, however many pieces it has."""
    return [variable for variable in model.trainable_weights if variable.regularizer is not None]
