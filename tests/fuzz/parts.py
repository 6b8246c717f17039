"""Layers, models, losses and metrics of one's own, as users write them. Scripts hold a copy of those they use.

Definitions here use what writing.py imports for every script, and each other.
"""

import keras
from keras import layers, ops


class Positions(layers.Layer):
    """Adds a learned position to each step: looked up with arange, as in every transformer of Keras's examples."""

    def __init__(self, **options):
        super().__init__(**options)
        self.supports_masking = True

    def build(self, shape):
        self.steps = shape[1]
        self.table = layers.Embedding(shape[1], shape[2], dtype=self.dtype_policy)
        self.table.build((None,))

    def call(self, x):
        return x + self.table(ops.arange(self.steps))


class SelfAttention(layers.Layer):
    """Attention of a sequence to itself."""

    def __init__(self, heads=2, causal=False, dropout=0.0, **options):
        super().__init__(**options)
        self.attention = layers.MultiHeadAttention(heads, 2, dropout=dropout, dtype=self.dtype_policy)
        self.causal, self.supports_masking = causal, True

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x, use_causal_mask=self.causal)


class Residual(layers.Layer):
    """Layers inside of a layer, and the way around them."""

    def __init__(self, inner, **options):
        super().__init__(**options)
        self.inner, self.supports_masking = inner, True

    def build(self, shape):
        self.last = layers.Dense(shape[-1], dtype=self.dtype_policy)

    def call(self, x):
        h = x
        for layer in self.inner:
            h = layer(h)
        return x + self.last(h)


class Penalty(layers.Layer):
    """Adds a loss of one of these kinds and passes its input on."""

    def __init__(self, kind, **options):
        super().__init__(**options)
        self.kind, self.supports_masking = kind, True

    def call(self, x, training=None):
        self.add_loss(0.1 * self.penalty(x, training))
        return x

    def penalty(self, x, training):
        by_sample = ops.mean(ops.square(ops.reshape(x, (ops.shape(x)[0], -1))), axis=-1)
        if self.kind == "sum":
            return ops.sum(by_sample)
        if self.kind == "masked mean":
            valid = ops.cast(by_sample > 0.3, x.dtype)
            return ops.sum(by_sample * valid) / (ops.sum(valid) + 1e-3)
        if self.kind == "hinge sum":
            return ops.sum(ops.relu(by_sample - 1.0))
        if self.kind == "sum in training":
            return ops.sum(by_sample) if training else ops.mean(by_sample)
        if self.kind == "balance":
            return ops.sum(ops.square(ops.mean(ops.tanh(x), axis=0)))
        return ops.mean(by_sample)


class Sampling(layers.Layer):
    """The sampling layer of a variational autoencoder, with its divergence by add_loss."""

    def __init__(self, divergence="mean", **options):
        super().__init__(**options)
        self.divergence = divergence
        self.seed_generator = keras.random.SeedGenerator(5)

    def call(self, x):
        spread = 0.1 * ops.tanh(x)
        apart = -0.5 * (1 + spread - ops.square(x) - ops.exp(spread))
        self.add_loss(0.1 * getattr(ops, self.divergence)(apart))
        noise = keras.random.normal(ops.shape(x), dtype=x.dtype, seed=self.seed_generator)
        return x + ops.exp(0.5 * spread) * noise


class Noted(layers.Layer):
    """Keeps a running mean of what it sees, and how often it was called, in variables of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.supports_masking = True

    def build(self, shape):
        self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False, name="mean")

    def call(self, x, training=None):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.cast(ops.mean(x), self.mean.dtype))
        return x


class Squeezed(layers.Layer):
    """One number for each sample, without an axis for it."""

    def call(self, x):
        return ops.squeeze(x, -1)


class Chain(keras.Model):
    """A model with code of its own: layers one behind the other, then one head for each output."""

    def __init__(self, inner, heads, named=()):
        super().__init__()
        self.inner, self.heads, self.named = inner, heads, list(named)

    def call(self, x):
        for layer in self.inner:
            x = layer(x)
        outputs = []
        for head in self.heads:
            h = x
            for layer in head:
                h = layer(h)
            outputs.append(h)
        if self.named:
            return dict(zip(self.named, outputs, strict=True))
        return outputs[0] if len(outputs) == 1 else outputs


class OwnLoss(keras.Model):
    """Its loss is Keras's and something of its own."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * sum(ops.cast(ops.mean(ops.square(p)), loss.dtype) for p in keras.tree.flatten(y_pred))


class OwnMetrics(keras.Model):
    """Reports something of its own beside Keras's metrics."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**found, "largest": ops.max(ops.stack([ops.max(p) for p in keras.tree.flatten(y_pred)]))}


def own_by_sample(y_true, y_pred):
    return ops.mean(ops.abs(ops.cast(y_true, y_pred.dtype) - y_pred) ** 1.5, axis=-1)


def own_mean(y_true, y_pred):
    return ops.mean(ops.square(ops.cast(y_true, y_pred.dtype) - y_pred))


def own_spread(y_true, y_pred):
    """Mixes samples: what each adds depends on the others."""
    apart = ops.cast(y_true, y_pred.dtype) - y_pred
    return ops.mean(ops.square(apart - ops.mean(apart, axis=0, keepdims=True))) + ops.mean(ops.square(apart))


def own_classes(y_true, y_pred):
    """For class numbers, whatever the predictions are: distance to the one-hot vector."""
    wanted = ops.one_hot(ops.cast(y_true, "int32"), y_pred.shape[-1], dtype=y_pred.dtype)
    return ops.sum(ops.square(wanted - y_pred), axis=-1)


def own_metric(y_true, y_pred):
    return ops.mean(ops.abs(y_pred), axis=-1)


class Count(keras.metrics.Metric):
    """Samples seen."""

    def __init__(self, name="count", **options):
        super().__init__(name=name, **options)
        self.total = self.add_variable(shape=(), initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.cast(ops.shape(y_pred)[0], self.total.dtype))

    def result(self):
        return ops.convert_to_tensor(self.total)
