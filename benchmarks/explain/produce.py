"""Produces failures for real, each in a child process, and writes what they print to cases-produced.jsonl.

    python benchmarks/explain/produce.py

Takes some minutes: TensorFlow waits ten seconds before it says that memory is out. What a child prints is kept as it
came, except for the paths of this machine.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from typing import Any

HERE = pathlib.Path(__file__).parent
GIB = 2**30
Case = tuple[str, str, dict[str, str], Callable[[], None] | None, dict[str, Any]]


def _limited(which: int, size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(which, (size, size))


# TensorFlow's own allocator with a hard limit, on the CPU.
_BFC = {
    "TF_CPU_ALLOCATOR_USE_BFC": "true",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": "200",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "KERAS_BACKEND": "tensorflow",
}
_HOST: dict[str, Any] = {"is_memory": True, "memory": "host", "cause": "host-ram"}
_NOT: dict[str, Any] = {"is_memory": False, "memory": "none", "cause": "not-memory"}
_KERAS = """
import keras, numpy as np
model = keras.Sequential([keras.Input((64, 64, 3)), keras.layers.Conv2D(64, 3, name="wide_conv"),
                          keras.layers.Flatten(), keras.layers.Dense(4, name="head")])
model.compile("sgd", "mse")
model.fit(np.zeros((256, 64, 64, 3), "float32"), np.zeros((256, 4), "float32"), batch_size=256, verbose=2)
"""

CASES: dict[str, Case] = {
    "tensorflow-eager": (
        "import tensorflow as tf\nx = tf.ones((4096, 4096))\ny = tf.ones((8192, 8192))\n",
        "",
        _BFC,
        None,
        {**_HOST, "raised_by": "tensorflow", "requested_bytes": 268435456, "tensor_shape": [8192, 8192]}
        | {"dtype": "float32", "op": "Fill"},
    ),
    "tensorflow-keras-fit": (_KERAS, "", _BFC, None, {**_HOST, "raised_by": "tensorflow", "layer": "wide_conv_1"}),
    "tensorflow-graph-matmul": (
        "import tensorflow as tf\n@tf.function\ndef step(a):\n    with tf.name_scope('dense_2'):\n"
        "        return tf.linalg.matmul(a, a, transpose_b=True)\nstep(tf.ones((10000, 16)))\n",
        "",
        _BFC,
        None,
        {**_HOST, "raised_by": "tensorflow", "requested_bytes": 400000000, "tensor_shape": [10000, 10000]}
        | {"dtype": "float32", "op": "dense_2/MatMul", "layer": "dense_2"},
    ),
    "torch-cpu": (
        "import torch\nx = torch.empty(400, 1024, 1024, 1024)\n",
        "",
        {},
        _limited(resource.RLIMIT_DATA, 8 * GIB),
        {**_HOST, "raised_by": "torch", "requested_bytes": 400 * GIB * 4},
    ),
    "torch-cpu-forward": (
        "import torch\nnet = torch.nn.Conv2d(3, 64, 3)\nnet(torch.zeros(2048, 3, 256, 256))\n",
        "",
        {},
        _limited(resource.RLIMIT_DATA, 6 * GIB),
        {**_HOST, "raised_by": "torch"},
    ),
    "jax-cpu": (
        "import jax, jax.numpy as jnp\nx = jnp.ones((400, 1024, 1024, 1024)).block_until_ready()\n",
        "",
        {"JAX_PLATFORMS": "cpu"},
        _limited(resource.RLIMIT_DATA, 8 * GIB),
        {**_HOST, "raised_by": "jax", "requested_bytes": 400 * GIB * 4},
    ),
    "jax-cpu-jit": (
        "import jax, jax.numpy as jnp\n@jax.jit\ndef step(a):\n    return a @ a.T\n"
        "step(jnp.ones((200000, 2))).block_until_ready()\n",
        "",
        {"JAX_PLATFORMS": "cpu"},
        _limited(resource.RLIMIT_DATA, 8 * GIB),
        {**_HOST, "raised_by": "jax"},
    ),
    "numpy": (
        "import numpy as np\nx = np.ones((1000, 1024, 1024, 64))\n",
        "",
        {},
        _limited(resource.RLIMIT_AS, 4 * GIB),
        {**_HOST, "raised_by": "python", "requested_bytes": 500 * GIB, "tensor_shape": [1000, 1024, 1024, 64]}
        | {"dtype": "float64"},
    ),
    "numpy-float32": (
        "import numpy as np\nx = np.zeros((65536, 65536), 'float32')\n",
        "",
        {},
        _limited(resource.RLIMIT_AS, 4 * GIB),
        {**_HOST, "raised_by": "python", "requested_bytes": 16 * GIB, "tensor_shape": [65536, 65536]}
        | {"dtype": "float32"},
    ),
    "python-memory-error": (
        "data = bytearray(8 * 2**30)\n",
        "",
        {},
        _limited(resource.RLIMIT_AS, GIB),
        {**_HOST, "raised_by": "python"},
    ),
    "python-list": (
        "rows = []\nwhile True:\n    rows.append([0.0] * 100000)\n",
        "",
        {},
        _limited(resource.RLIMIT_DATA, GIB // 4),
        {**_HOST, "raised_by": "python"},
    ),
    "fork-cannot-allocate": (
        "import mmap\nmmap.mmap(-1, 64 * 2**30)\n",
        "",
        {},
        _limited(resource.RLIMIT_AS, GIB),
        {**_HOST, "raised_by": "python"},
    ),
    "killed-by-signal-9": (
        "import os, signal\nprint('Epoch 1/3', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n",
        "shell",
        {},
        None,
        {**_HOST, "raised_by": "kernel"},
    ),
    "exit-137": (
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
        "status",
        {},
        None,
        {**_HOST, "raised_by": "kernel"},
    ),
    "disk-full": (
        "with open('/dev/full', 'w') as file:\n    file.write('x' * 100000)\n",
        "",
        {},
        None,
        {**_NOT, "raised_by": "python"},
    ),
    "file-too-large": (
        "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "with open('model.keras', 'wb') as file:\n    file.write(bytes(2**20))\n",
        "",
        {},
        _limited(resource.RLIMIT_FSIZE, 4096),
        {**_NOT, "raised_by": "python"},
    ),
    "too-many-open-files": (
        "files = [open('/dev/null') for _ in range(100)]\n",
        "",
        {},
        _limited(resource.RLIMIT_NOFILE, 32),
        {**_NOT, "raised_by": "python"},
    ),
    "shapes-do-not-match": (
        "import numpy as np\nnp.ones((2, 3)) @ np.ones((2, 3))\n",
        "",
        {},
        None,
        {**_NOT, "raised_by": "python"},
    ),
    "segmentation-fault": (
        "import ctypes\nctypes.string_at(0)\n",
        "shell",
        {},
        None,
        {**_NOT},
    ),
    "exceeds-ten-percent": (
        "import numpy as np, tensorflow as tf\nx = tf.constant(np.zeros((3 * 2**28,), 'float32'))\n"
        "print('Epoch 1/1')\nprint('1/1 - 1s - loss: 0.5')\n",
        "",
        {"KERAS_BACKEND": "tensorflow"},
        None,
        {**_NOT},
    ),
}


def _without_paths(text: str) -> str:
    for path in {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"], sys.prefix, sys.base_prefix}:
        text = text.replace(path, "lib")
    text = re.sub(r"/tmp/\w+/", "", text)
    return re.sub(r"\S*/bin/python3?(?:\.\d+)?", "python", text)


def produce(name: str, case: Case) -> dict[str, Any]:
    code, through, extra, limit, expected = case
    environment = {**os.environ, **extra}
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "train.py"
        script.write_text(code)
        command = [sys.executable, "train.py"]
        if through:
            line = f"{sys.executable} train.py" + ('; echo "exit code: $?"' if through == "status" else "; true")
            command = ["bash", "-c", line]
        answer = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=limit,
            timeout=300,
            check=False,
        )
    text = _without_paths(answer.stdout.decode("utf-8", "replace"))
    return {"name": name, "source": "produced here", "command": code.strip(), "text": text, "expected": expected}


def main() -> None:
    wanted = sys.argv[1:] or list(CASES)
    path = HERE / "cases-produced.jsonl"
    kept = {}
    if path.exists():
        kept = {case["name"]: case for case in map(json.loads, path.read_text().splitlines())}
    for name in wanted:
        kept[name] = produce(name, CASES[name])
        print(f"{name}: {len(kept[name]['text'])} characters", flush=True)
        path.write_text("".join(json.dumps(kept[each]) + "\n" for each in CASES if each in kept))


if __name__ == "__main__":
    main()
