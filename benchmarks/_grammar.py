"""Random models that nobody tuned for: sensible architectures, each drawn from a seed and a number.

Twenty families take turns, so that twenty models in a row have one of each. Depth, width, sizes, normalisation,
activation, dropout, precision, optimizer and batch are drawn. The batch is as large as the layers' outputs, counted by
hand, let the step be: no estimate of ours has a say.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import keras
from keras import layers

import _grammar_images as images
import _grammar_tokens as tokens
from _grammar_parts import Draw, Parts
from _plan_zoo import Case

# What the outputs of all layers and their gradients are to take, and the largest batch.
_BYTES = {"cpu": (40 * 2**20, 160 * 2**20), "gpu": (1536 * 2**20, 5 * 2**30)}
_BATCHES = (2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 100, 128, 192, 200, 256, 384, 500, 512, 1000)
_LARGE_BATCHES = (1024, 2048, 4096, 8192)
_MOST = {"cpu": 1024, "gpu": 8192}


def case(seed: int, number: int, device: str) -> Case:
    """Model `number` of a seed, compiled, with the batch it is asked for."""
    draw = Draw(seed, number, device)
    order = list(FAMILIES)
    random.Random(f"{seed}/{number // len(order)}").shuffle(order)
    family = order[number % len(order)]
    precision = draw.random.choice(("float32",) * 4 + ("mixed_bfloat16", "mixed_float16"))
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    try:
        parts = FAMILIES[family](draw)
        outputs = [layers.Activation("linear", dtype="float32")(head) for head, *_ in parts.heads]
    finally:
        keras.config.set_dtype_policy(before)
    name = f"{family}_{seed}_{number}"
    model = keras.Model(parts.inputs, outputs if len(outputs) > 1 else outputs[0], name=name)
    losses = [loss for *_, loss in parts.heads]
    model.compile(_optimizer(draw), losses if len(losses) > 1 else losses[0])
    batch = _batch(draw, model)
    return Case(model, batch, parts.data, 0, tuple(target for _, target, _ in parts.heads))


def described(made: Case) -> dict[str, Any]:
    """What a reader of results wants to know of a model."""
    optimizer = made.model.optimizer
    return {
        "optimizer": type(getattr(optimizer, "inner_optimizer", optimizer)).__name__,
        "precision": sorted({layer.dtype_policy.name for layer in made.model._flatten_layers(include_self=False)}),
        "normalisation": sorted(
            {type(layer).__name__ for layer in made.model._flatten_layers() if "Normalization" in type(layer).__name__}
        ),
        "batch": made.batch,
        "parameters": made.model.count_params(),
    }


def _batch(draw: Draw, model: Any) -> int:
    low, high = _BYTES[draw.device]
    wanted = math.exp(draw.random.uniform(math.log(low), math.log(high)))
    each = 2 * sum(_bytes(tensor) for tensor in _tensors(model))
    fitting = [batch for batch in (*_BATCHES, *_LARGE_BATCHES) if batch <= _MOST[draw.device]]
    return min(fitting, key=lambda batch: abs(math.log(batch * each / wanted)))


def _tensors(model: Any) -> list[Any]:
    return [
        tensor
        for layer in model.layers
        for node in layer._inbound_nodes
        for tensor in node.outputs
        if not isinstance(layer, keras.Model)
    ]


def _bytes(tensor: Any) -> int:
    item = 2 if "16" in str(tensor.dtype) else 4
    return int(item * math.prod(size or 1 for size in tensor.shape))


def _optimizer(draw: Draw) -> Any:
    made = keras.optimizers
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: made.Adam(1e-4),
        lambda: made.Adam(1e-4, clipnorm=1.0),
        lambda: made.AdamW(1e-4, weight_decay=0.01),
        lambda: made.SGD(1e-3),
        lambda: made.SGD(1e-3, momentum=0.9, nesterov=True),
        lambda: made.RMSprop(1e-4),
        lambda: made.Lion(1e-5),
        lambda: made.Adafactor(1e-4),
        lambda: made.Nadam(1e-4),
    )
    return draw.random.choice(kinds)()


FAMILIES: dict[str, Callable[[Draw], Parts]] = {
    make.__name__: make
    for make in (
        images.plain_conv,
        images.residual,
        images.separable,
        images.unet,
        images.dilated,
        images.sequence_conv,
        images.volumes,
        tokens.recurrent,
        tokens.encoder,
        tokens.language_model,
        tokens.translation,
        tokens.vision_transformer,
        tokens.windows,
        tokens.one_layer,
        tokens.mixer,
        tokens.recommender,
        tokens.several,
        tokens.tabular,
        images.autoencoder,
        images.dense_net,
    )
}
