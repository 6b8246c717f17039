"""One run in one process: a model of the zoo, some steps of plain `fit`, and what memory they took.

    python benchmarks/estimate/worker.py '{"model": "mlp", "batch": 64, "stack": "torch", ...}'

Started by collect.py. What is known is printed at once, line by line, so that a run that is killed leaves it.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import time
import traceback
from typing import Any

from meters import Meter, driver_bytes, meter

MARK = "@@ "
# How the frameworks and the libraries under them say that memory ran out.
OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|ResourceExhausted|\bOOM\b|out of memory|failed to allocate|OutOfMemoryError"
    r"|(CUDNN|CUBLAS)_STATUS_ALLOC_FAILED|Dst tensor is not initialized",
    re.IGNORECASE,
)


def tell(**facts: Any) -> None:
    print(MARK + json.dumps(facts), flush=True)


def run(case: dict[str, Any]) -> None:
    began = time.perf_counter()
    tell(stage="importing")
    gauge = meter(case["stack"], case["device"], case["room"])
    from zoo import compiled

    tell(stage="building", before=gauge.read(), bytes_limit=gauge.limit)
    model, data = compiled(
        case["model"],
        precision=case["precision"],
        optimizer=case["optimizer"],
        stack=case["stack"],
        scale=case["scale"],
    )
    batches = repeated(data.arrays(case["batch"]), case["steps"])
    tell(stage="first step", jit_compile=bool(model.jit_compile), parameters=model.count_params(), built=gauge.read())
    gauge.reset()
    history = model.fit(batches, verbose=0, shuffle=False, callbacks=[reader(gauge)])
    loss = history.history["loss"][-1]
    tell(
        outcome="finished",
        stage="done",
        loss=loss if math.isfinite(loss) else None,
        seconds=round(time.perf_counter() - began, 2),
        variable_bytes=sum(math.prod(v.shape) * 4 for v in [*model.variables, *model.optimizer.variables]),
    )
    # The run is over and told; what else can be learnt must not spoil it.
    with contextlib.suppress(Exception):
        tell(driver=driver_bytes() if case["device"] == "gpu" else None)
        tell(programs=gauge.programs())


def repeated(batch: Any, steps: int) -> Any:
    """The same batch again and again, from the host.

    Arrays are no good here: TensorFlow would put all of them on the device, and a peak is to be that of a step.
    """
    import keras

    class Repeated(keras.utils.PyDataset):  # type: ignore[misc]  # Keras is seen as untyped.
        def __len__(self) -> int:
            return steps

        def __getitem__(self, index: int) -> Any:
            return batch

    return Repeated()


def reader(gauge: Meter) -> Any:
    """A callback that tells the memory after the first step, and after every other step the largest since."""
    import keras

    class Reader(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is seen as untyped.
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            # Steps return before they are done; their loss does not.
            float(logs["loss"])
            tell(stage="later steps", **{"first" if batch == 0 else "later": gauge.read()})
            if batch == 0:
                gauge.reset()

    return Reader()


def main() -> None:
    try:
        run(json.loads(sys.argv[1]))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        tell(outcome="out of memory" if OUT_OF_MEMORY.search(text) else "failed", error=text[:600])
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    main()
