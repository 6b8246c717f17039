"""What of Keras and the framework is other than it was, after all of oomproof was imported and used. Prints JSON."""

import gc
import importlib
import json
import pkgutil
import sys

import keras
import numpy as np

OURS = {
    "tensorflow": ("tensorflow.python.framework.ops", "tensorflow.python.eager.context"),
    "jax": ("jax.experimental.rnn", "jax._src.cudnn.fused_attention_stablehlo"),
    "torch": ("torch.autograd", "torch.utils.checkpoint", "torch._subclasses.fake_tensor"),
}[keras.backend.backend()]


def is_code(thing):
    return callable(thing) or isinstance(thing, property | classmethod | staticmethod)


def functions():
    """Every function and class of Keras and what else is patched, and what is in the classes, by name."""
    found = {}
    for name, module in list(sys.modules.items()):
        if module is None or not (name.split(".")[0] == "keras" or name in OURS):
            continue
        for key, value in list(vars(module).items()):
            if callable(value):
                found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                found.update(((name, key, inner), thing) for inner, thing in vars(value).items() if is_code(thing))
            if key == "_allowed_determinism_checks_to_fns":
                found.update(((name, key, inner), thing) for inner, thing in value.items())
    return found


def changed(before):
    now = functions()
    return sorted(".".join(key) for key, value in before.items() if now.get(key) is not value)


def model():
    layers = [
        keras.layers.Dense(16, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3, seed=1),
        keras.layers.Dense(1),
    ]
    made = keras.Sequential([keras.Input((8,)), *layers])
    made.compile("adam", "mse", metrics=["mae"])
    return made


def main():
    for name in OURS:
        importlib.import_module(name)
    for path in ("keras.src.backend.torch.trainer", "keras.src.tree.torchtree_impl"):
        if keras.backend.backend() == "torch":
            importlib.import_module(path)
    before = functions()
    found = {"compared": len(before)}

    import oomproof
    import oomproof.data

    for module in pkgutil.walk_packages(oomproof.__path__, "oomproof."):
        # Those of other backends are not for this process, nor what runs as a program.
        others = {"tensorflow", "jax", "torch"} - {keras.backend.backend()}
        parts = set(module.name.replace("torch_tracing", "torch").split("."))
        if parts & others or "xla" in parts or module.name.endswith(("__main__", ".child", "tf_data")):
            continue
        try:
            importlib.import_module(module.name)
        except ImportError:
            continue
    found["import"] = changed(before)
    x, y = np.ones((24, 8), "float32"), np.ones((24, 1), "float32")
    net = model()
    found["estimate seen"] = int(oomproof.estimate(net, 24, memory="24GiB").expected > 0)
    found["estimate"] = changed(before)
    oomproof.plan(net, 24, memory="24GiB", cache=False)
    found["plan"] = changed(before)
    oomproof.guard(net, micro_batch_size=8, allow={"microbatch", "recompute", "batch_statistics"})
    net.fit(x, y, batch_size=24, verbose=0)
    net.evaluate(x, y, batch_size=24, verbose=0)
    net.predict(x, batch_size=24, verbose=0)
    oomproof.unguard(net)
    found["unguard"] = changed(before)
    stream = oomproof.data.from_arrays(x, y, batch_size=8)
    found["stream"] = changed(before)
    net.fit(stream, verbose=0)
    del stream, net
    gc.collect()
    found["stream gone"] = changed(before)
    print(json.dumps(found))


main()
