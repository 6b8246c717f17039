"""The models the estimates are judged on, as a table: names, families and batch sizes. Imports no framework.

How each is built is in zoo.py. A family is a way of building nets; no family is in both halves of the design, so that
what was tuned on one half is scored on nets of other kinds.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Kind = Literal["convolutional", "attention", "recurrent", "dense"]
Level = Literal["small", "medium", "large"]

LEVELS: tuple[Level, ...] = ("small", "medium", "large")
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
OPTIMIZERS = ("adam", "sgd")
STACKS = ("jax", "tensorflow-xla", "tensorflow-graph", "torch")


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A model of the zoo.

    Attributes:
        name: What zoo.py builds it by.
        family: The way it is built; the unit that goes to one half of the design or the other.
        kind: What most of its time and memory goes to; each half has some of every kind.
        batches: Batch sizes, small, medium and large: from about half a gigabyte to some 20 GB in float32 with Adam.
    """

    name: str
    family: str
    kind: Kind
    batches: tuple[int, int, int]

    def batch(self, level: Level) -> int:
        return self.batches[LEVELS.index(level)]


@dataclasses.dataclass(frozen=True, slots=True)
class Trouble:
    """What is known to go wrong on a stack: such runs get a time limit and count as not finished when they reach it."""

    kind: Kind
    stack: str
    limit_s: int
    reason: str


ZOO = (
    Entry("cifar_cnn", "plain-cnn", "convolutional", (256, 1024, 4096)),
    Entry("layernorm_cnn", "plain-cnn", "convolutional", (64, 192, 512)),
    Entry("resnet50", "residual", "convolutional", (16, 64, 160)),
    Entry("resnet_small", "residual", "convolutional", (128, 512, 2048)),
    Entry("mobilenet_v2", "depthwise", "convolutional", (16, 64, 160)),
    Entry("efficientnet_b0", "depthwise", "convolutional", (16, 64, 128)),
    Entry("densenet121", "densely-connected", "convolutional", (8, 32, 80)),
    Entry("unet", "u-net", "convolutional", (1, 4, 12)),
    Entry("dilated_segmentation", "dilated", "convolutional", (8, 32, 96)),
    Entry("autoencoder", "transposed", "convolutional", (128, 512, 2048)),
    Entry("generator", "transposed", "convolutional", (64, 256, 1024)),
    Entry("vae", "variational", "convolutional", (256, 1024, 4096)),
    Entry("audio_cnn", "audio", "convolutional", (32, 128, 384)),
    Entry("video_cnn", "volumetric", "convolutional", (4, 16, 64)),
    Entry("multi_output", "multi-output", "convolutional", (32, 128, 384)),
    Entry("siamese", "shared-layers", "convolutional", (64, 256, 768)),
    Entry("encoder", "encoder", "attention", (4, 16, 64)),
    Entry("encoder_small", "encoder", "attention", (128, 512, 2048)),
    Entry("decoder", "decoder", "attention", (2, 8, 32)),
    Entry("vit", "vit", "attention", (16, 64, 160)),
    Entry("mixer", "mixer", "attention", (32, 128, 384)),
    Entry("image_text", "multi-input", "attention", (64, 256, 768)),
    Entry("lstm", "lstm", "recurrent", (64, 256, 512)),
    Entry("gru", "gru", "recurrent", (64, 256, 768)),
    Entry("bidirectional", "bidirectional", "recurrent", (64, 256, 768)),
    Entry("convlstm", "conv-recurrent", "recurrent", (8, 24, 64)),
    Entry("mlp", "mlp", "dense", (4096, 16384, 49152)),
    Entry("recommender", "recommender", "dense", (8192, 65536, 524288)),
)

TROUBLES = (
    Trouble(
        "convolutional",
        "tensorflow-xla",
        240,
        "XLA in TensorFlow may autotune convolutions for minutes: ResNet50 had not finished its first step after 330 s",
    ),
)


def entry(name: str) -> Entry:
    """The entry of a name.

    Raises:
        KeyError: For a name that is not in the table.
    """
    return {found.name: found for found in ZOO}[name]
