"""Checks an installed oomproof from outside of the checkout: `install_smoke.py [tensorflow] [jax] [torch] [data]`.

The arguments are the extras it was installed with. `make wheel-test` builds the wheel, installs it and runs this.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import subprocess
import sys
import tempfile

BACKENDS = ("tensorflow", "jax", "torch")
# CPU seconds, so that a busy machine does not count.
IMPORT_LIMIT_S = 0.1

IMPORT = """
import sys, time
began = time.process_time()
import oomproof
print(time.process_time() - began, oomproof.__version__, oomproof.__file__)
assert not {"keras", "tensorflow", "jax", "torch"} & set(sys.modules)
"""

TRAIN = """
import keras, numpy as np, oomproof

def build():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model

estimate = oomproof.estimate(build(), 64, gpu="t4")
assert estimate.fits and estimate.low <= estimate.expected <= estimate.high, estimate

rng = np.random.default_rng(0)
x, y = rng.normal(size=(64, 8)).astype("float32"), rng.normal(size=(64, 1)).astype("float32")
plain, guarded = build(), oomproof.guard(build(), micro_batch_size=8)
plain.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
history = guarded.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
assert history.run.steps["train"] == 4 and history.run.plan.micro_batch_size == 8, history.run
apart = max(np.abs(a - b).max() for a, b in zip(plain.get_weights(), guarded.get_weights()))
assert apart < 1e-4, apart
print(f"{keras.backend.backend()}: estimated and trained in pieces, weights within {apart:.1e} of plain Keras")
"""

DATA = """
import pathlib, h5py, numpy as np, PIL.Image, pyarrow as pa, pyarrow.parquet
from oomproof import data

pa.parquet.write_table(pa.table({"a": np.arange(10.0), "y": np.arange(10) % 2}), "table.parquet")
with h5py.File("x.h5", "w") as file:
    file["x"] = np.zeros((10, 3), "float32")
pathlib.Path("images/cats").mkdir(parents=True)
PIL.Image.new("RGB", (8, 8)).save("images/cats/1.png")
assert len(data.from_table("table.parquet", label="y", batch_size=4)) == 3
assert len(data.from_arrays("x.h5:x", batch_size=4)) == 3
assert data.from_files("images", image_size=(4, 4), batch_size=1)[0][0].shape == (1, 4, 4, 3)
print("data: a table, an array file and an image read")
"""


def run(*command: str, codes: tuple[int, ...] = (0,), **environment: str) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | environment)
    if answer.returncode not in codes:
        raise SystemExit(f"{command[:2]} ended with {answer.returncode}:\n{answer.stdout}{answer.stderr}")
    return answer.stdout


def python(code: str, **environment: str) -> str:
    return run(sys.executable, "-P", "-c", code, TF_CPP_MIN_LOG_LEVEL="3", **environment)


def check_import() -> None:
    answers = [python(IMPORT).strip().split(maxsplit=2) for _ in range(3)]
    seconds, version, path = min(float(answer[0]) for answer in answers), *answers[0][1:]
    assert version == importlib.metadata.version("oomproof"), version
    assert "site-packages" in path, f"not the installed package: {path}"
    assert seconds <= IMPORT_LIMIT_S, f"import took {seconds:.3f} s"
    print(f"import: {version}, {seconds * 1000:.0f} ms")


def check_command_line() -> None:
    oomproof = str(pathlib.Path(sys.executable).with_name("oomproof"))
    assert "estimate" in run(oomproof, "--help")
    # 3 means that this machine has a problem, which is no problem of the package.
    assert "host memory" in run(oomproof, "doctor", codes=(0, 3))
    print("command line: --help, doctor")


def main(extras: list[str]) -> None:
    unknown = set(extras) - {*BACKENDS, "data"}
    assert not unknown, f"no such extras: {unknown}"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        check_import()
        check_command_line()
        backends = [extra for extra in extras if extra in BACKENDS]
        for backend in backends:
            print(python(TRAIN, KERAS_BACKEND=backend).splitlines()[-1])
        # Streams are Keras's, so they need a backend beside the extra.
        if "data" in extras and backends:
            print(python(DATA, KERAS_BACKEND=backends[0]).splitlines()[-1])
        os.chdir("/")


if __name__ == "__main__":
    main(sys.argv[1:])
