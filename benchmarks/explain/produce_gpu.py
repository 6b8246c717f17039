"""Produces failures for real on a GPU, each in a child process, and writes what they print to FOLDER.

    python benchmarks/explain/produce_gpu.py FOLDER torch jax

What is expected follows from how a failure is made: more than the card has in one piece; one piece after another until
no more fits a limit; holes that are large enough together only; a card that another process has filled. Needs the card
to itself, because it fills it. The cases that were kept are in cases-produced-gpu.jsonl.
"""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from explain.produce import Case, produce

GIB = 2**30
_DEVICE: dict[str, Any] = {"is_memory": True, "memory": "device"}
_TOO_BIG = {**_DEVICE, "cause": "too-big-single-tensor", "requested_bytes": 400 * GIB}
_STEADY = {**_DEVICE, "cause": "steady-exhaustion"}
_HELD = {**_DEVICE, "cause": "held-elsewhere"}

# Takes all but about 2 GiB of the card and keeps it until its standard input is closed.
_HOLDER = """
import sys, torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(free - 2 * 2**30, dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""
_KERAS = """
import keras, numpy as np
model = keras.Sequential([keras.Input((64, 64, 3)), keras.layers.Conv2D(64, 3, activation="relu", name="wide_conv"),
                          keras.layers.Conv2D(64, 3, activation="relu", name="second_conv"),
                          keras.layers.Flatten(), keras.layers.Dense(4, name="head")])
model.compile("sgd", "mse")
model.fit(np.zeros((4096, 64, 64, 3), "float32"), np.zeros((4096, 4), "float32"), batch_size=4096, verbose=2)
"""
_TF_CAP = """
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("GPU")[0], [tf.config.LogicalDeviceConfiguration(memory_limit=2048)])
"""


def case(code: str, expected: dict[str, Any], **environment: str) -> Case:
    # Everything a framework says by itself, whatever this process was told to pass over.
    return (textwrap.dedent(code).lstrip(), "", {"TF_CPP_MIN_LOG_LEVEL": "0", **environment}, None, expected)


CASES: dict[str, dict[str, Case]] = {
    "torch": {
        "torch-too-big": case("import torch\ntorch.empty(100, 2**30, device='cuda')\n", _TOO_BIG),
        "torch-steady": case(
            """
            import torch
            torch.cuda.set_per_process_memory_fraction(0.02)
            kept = [torch.zeros(2**26, device="cuda") for _ in range(100)]
            """,
            {**_STEADY, "requested_bytes": 2**28},
        ),
        "torch-fragmentation": case(
            """
            import torch
            torch.cuda.set_per_process_memory_fraction(0.02)
            blocks = []
            try:
                while True:
                    blocks.append(torch.zeros(9 * 2**20, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                del blocks[::2]
            torch.zeros(2**30, dtype=torch.uint8, device="cuda")
            """,
            {**_DEVICE, "cause": "fragmentation", "requested_bytes": GIB},
        ),
        "torch-keras-fit": case(
            "import torch\ntorch.cuda.set_per_process_memory_fraction(0.02)\n" + _KERAS,
            # The first activation is larger than the limit.
            {**_DEVICE, "cause": "too-big-single-tensor"},
            KERAS_BACKEND="torch",
        ),
    },
    "jax": {
        "jax-too-big": case(
            "import jax.numpy as jnp\njnp.ones((100, 1024, 1024, 1024)).block_until_ready()\n",
            _TOO_BIG,
            XLA_PYTHON_CLIENT_MEM_FRACTION="0.02",
        ),
        "jax-steady": case(
            "import jax.numpy as jnp\nkept = [jnp.ones(2**26).block_until_ready() for _ in range(100)]\n",
            {**_STEADY, "requested_bytes": 2**28},
            XLA_PYTHON_CLIENT_MEM_FRACTION="0.02",
        ),
        "jax-keras-fit": case(_KERAS, _STEADY, KERAS_BACKEND="jax", XLA_PYTHON_CLIENT_MEM_FRACTION="0.02"),
    },
    "tensorflow": {
        "tensorflow-too-big": case(_TF_CAP + "tf.ones((100, 1024, 1024, 1024))\n", _TOO_BIG),
        "tensorflow-steady": case(
            _TF_CAP + "kept = [tf.ones((2**26,)) for _ in range(100)]\n",
            {**_STEADY, "requested_bytes": 2**28},
        ),
        "tensorflow-keras-fit": case(_TF_CAP + _KERAS, _STEADY, KERAS_BACKEND="tensorflow"),
    },
}
# On a card that another process has filled.
HELD: dict[str, dict[str, Case]] = {
    "torch": {"torch-held": case("import torch\ntorch.zeros(2**31, device='cuda')\n", _HELD)},
    "jax": {
        "jax-held": case("import jax.numpy as jnp\nprint(jnp.ones(2**31).sum())\n", _HELD),
        "jax-keras-held": case(_KERAS, _HELD, KERAS_BACKEND="jax"),
    },
    "tensorflow": {"tensorflow-held": case("import tensorflow as tf\ntf.ones((2**31,))\n", _HELD)},
}


def main() -> None:
    folder, backends = pathlib.Path(sys.argv[1]), sys.argv[2:]
    cases = {name: each for backend in backends for name, each in CASES[backend].items()}
    held = {name: each for backend in backends for name, each in HELD[backend].items()}
    with (
        (folder / f"cases-produced-gpu-{'-'.join(backends)}.jsonl").open("w") as file,
        concurrent.futures.ThreadPoolExecutor(5) as pool,
    ):

        def several(wanted: dict[str, Case]) -> None:
            for found in pool.map(lambda name: produce(name, wanted[name]), wanted):
                file.write(json.dumps({**found, "source": "produced on an H200"}) + "\n")
                file.flush()

        several(cases)
        # torch is what holds the card, whoever fails on it.
        with subprocess.Popen([sys.executable, "-c", _HOLDER], stdin=-1, stdout=-1, text=True) as holder:
            assert holder.stdin is not None
            assert holder.stdout is not None
            holder.stdout.readline()
            several(held)
            holder.stdin.close()


if __name__ == "__main__":
    main()
