"""Where samples are looked at that a device may have no room for: a piece of a batch fits there, they need not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

from oomproof._records.patience import TookTooLongError
from oomproof.errors import OomproofError

_T = TypeVar("_T")

logger = logging.getLogger("oomproof")


class BesideDevice:
    """Runs on the host what need not run on the device.

    Not every model can run there: what XLA compiles, such as Keras's grouped convolutions, reads variables only where
    they are, and some kernels of CPUs know channels last alone. Such a model is looked at on its device.

    Attributes:
        on_host: Whether the host is tried, or tried no more.
    """

    def __init__(self) -> None:
        # Where there is no other device, there is nothing to choose.
        self.on_host = len(tf.config.list_logical_devices()) > 1

    def __call__(self, look: Callable[[], _T]) -> _T:
        if self.on_host:
            try:
                with tf.device("CPU:0"):
                    return look()
            except (OomproofError, TookTooLongError, tf.errors.ResourceExhaustedError):
                raise
            except Exception as error:
                logger.debug(f"oomproof: not on the host: {error!r}")
                self.on_host = False
        return look()
