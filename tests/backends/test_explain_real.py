"""What each framework prints when it really runs out of memory, explained. One child process each."""

import os
import subprocess
import sys

from here import BACKEND

import oomproof

GIB = 2**30
BFC = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "200", "TF_ENABLE_ONEDNN_OPTS": "0"}
CHILDREN = {
    "tensorflow": ("import tensorflow as tf\ntf.ones((4096, 4096)); tf.ones((8192, 8192))", BFC, None),
    "jax": ("import jax.numpy as jnp\njnp.ones((400, 1024, 1024, 1024)).block_until_ready()", {}, 8 * GIB),
    "torch": ("import torch\ntorch.empty(400, 1024, 1024, 1024)", {}, 8 * GIB),
}


def test_what_a_framework_prints():
    code, extra, limit = CHILDREN[BACKEND]
    if limit is not None:
        code = f"import resource\nresource.setrlimit(resource.RLIMIT_DATA, ({limit}, {limit}))\n{code}"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **extra},
        timeout=120,
        check=False,
    )
    found = oomproof.explain(answer.stdout)
    assert (found.is_memory, found.memory, found.raised_by, found.cause) == (True, "host", BACKEND, "host-ram")
    assert found.requested_bytes == (2**28 if BACKEND == "tensorflow" else 400 * GIB * 4)
    if BACKEND == "tensorflow":
        assert (found.tensor_shape, found.dtype, found.op) == ((8192, 8192), "float32", "Fill")
