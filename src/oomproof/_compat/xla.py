"""What the process that compiles for a GPU uses of JAX beyond its public API. It has no Keras.

Checked on JAX 0.10.
"""

from __future__ import annotations

# The options of a compilation, and lists of devices.
from jax._src import compiler as compiler

# The context that StableHLO is parsed in, and what parses it.
from jax._src.interpreters import mlir as mlir
from jaxlib.mlir import ir as ir
