"""What oomproof uses of tf.data beyond the public API, whatever Keras's backend: imported by who is given such data.

Checked on TensorFlow 2.19 to 2.21.
"""

from __future__ import annotations

# Elements as lists of tensors, and back.
from tensorflow.python.data.util import structure as structure

# Whether an op keeps anything between two calls.
from tensorflow.python.framework import op_def_registry as op_def_registry

# Records of a TFRecord file by their offset.
from tensorflow.python.lib.io._pywrap_record_io import RandomRecordReader as RandomRecordReader
from tensorflow.python.util import _pywrap_util_port


def built_with_onednn() -> bool:
    """Whether kernels on the CPU are oneDNN's."""
    return bool(_pywrap_util_port.IsMklEnabled())
