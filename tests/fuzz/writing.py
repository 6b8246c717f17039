"""A configuration → a script that needs nothing but Keras, NumPy and oomproof.

The script holds a copy of every definition it uses, so that a failure can be handed on as one file.
"""

import ast
import functools
import pathlib

from fuzz.grammar import is_random

HERE = pathlib.Path(__file__).parent
# Where definitions are looked up, in the order in which they stand in a script.
SOURCES = [
    HERE.parent / "backends" / "here.py",
    HERE.parent / "backends" / "hooks.py",
    HERE / "parts.py",
    HERE / "changing.py",
    HERE / "feeding.py",
    HERE / "comparing.py",
]
# Names that more than one of them has: where the script's is.
CHOSEN = {"Faults": HERE / "changing.py"}
HEADER = '''\
"""{title}"""

import dataclasses
import os
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "{backend}")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers, losses, metrics, ops, optimizers

import oomproof
'''
MODES = {
    "tensorflow": {"graph": (False, False), "eager": (True, False), "xla": (False, True)},
    "jax": {"graph": (False, True), "eager": (True, False), "uncompiled": (False, False)},
    "torch": {"graph": (False, False)},
}


def script(config, title="A training, plain and guarded."):
    body = "\n\n".join([build(config), arrays(config), train(config), case(config)])
    parts = [HEADER.format(title=title, backend=config["backend"]), *definitions(body), body]
    return "\n\n".join(parts) + "\n"


# Expressions


def expression(value):
    """A value of a configuration as Python writes it."""
    if isinstance(value, dict) and "code" in value:
        return value["code"]
    if isinstance(value, dict) and "call" in value:
        given = [expression(each) for each in value.get("args", [])]
        given += [f"{key}={expression(each)}" for key, each in value.items() if key not in ("call", "args")]
        return f"{value['call']}({', '.join(given)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {expression(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(expression, value)) + "]"
    return repr(value)


def function(head, lines):
    return "\n".join([f"def {head}:", *(f"    {line}" for line in lines)])


# The model


def build(config):
    """`build()`, which makes the model, and `compiled(model)`."""
    lines = {"sequential": sequential, "subclassed": subclassed}.get(config["family"], functional)(config)
    after = ["return model" if config["guard"]["before_compile"] else "return compiled(model)"]
    return function("build()", lines + after) + "\n\n\n" + function("compiled(model)", compile_lines(config))


def layers_of(config):
    """Expressions of blocks that are all single layers."""
    return [expression(block).replace("h.shape[-1]", "3") for block in config["blocks"] if "call" in block]


def input_dtype(entry):
    return ', dtype="int32"' if entry["kind"] == "words" else ""


def sequential(config):
    entry = config["inputs"][0]
    first = f"layers.Input({tuple(entry['shape'])}{input_dtype(entry)})"
    inner = [first, *layers_of(config), *(expression(each) for each in config["outputs"][0]["layers"])]
    return ["model = keras.Sequential([", *(f"    {each}," for each in inner), "])"]


def subclassed(config):
    heads = [expression(each["layers"]) for each in config["outputs"]]
    named = [f"    named={names_of(config)},"] if config["named"] else []
    inner = [f"        {each}," for each in layers_of(config)]
    return ["model = Chain(", "    [", *inner, "    ],", f"    [{', '.join(heads)}],", *named, ")"]


def functional(config):
    kind = {"own loss": "OwnLoss", "own metrics": "OwnMetrics"}.get(config["family"], "keras.Model")
    lines = []
    for number, entry in enumerate(config["inputs"]):
        lines.append(f"x{number} = layers.Input({tuple(entry['shape'])}, name='x{number}'{input_dtype(entry)})")
    lines.append("h = x0")
    for block in config["blocks"]:
        lines += block_lines(block, 1)
    outputs = []
    for number, head in enumerate(config["outputs"]):
        value = "h"
        for each in head["layers"]:
            value = f"{expression(each)}({value})"
        lines.append(f"y{number} = {value}")
        outputs.append(f"y{number}")
    inputs = [f"x{number}" for number in range(len(config["inputs"]))]
    return [*lines, f"model = {kind}({structure(config, inputs, inputs=True)}, {structure(config, outputs)})"]


def block_lines(block, depth):
    """Lines that go on from `h`."""
    if "residual" in block:
        inner = [line for each in block["residual"] for line in block_lines(each, depth + 1)]
        return [f"k{depth} = h", *inner, f"h = layers.Add()([k{depth}, layers.Dense(k{depth}.shape[-1])(h)])"]
    if "nested" in block:
        inner = [line for each in block["nested"] for line in block_lines(each, depth + 1)]
        entry = [f"k{depth} = h", f"i{depth} = h = layers.Input(h.shape[1:])"]
        return [*entry, *inner, f"h = keras.Model(i{depth}, h)(k{depth})"]
    if "shared" in block:
        return [f"shared = {expression(block['shared'])}", *["h = shared(h)"] * block["times"]]
    if "join" in block:
        return [f"h = layers.Concatenate()([h, layers.Dense(2)(x{block['join']})])"]
    return [f"h = {expression(block)}(h)"]


def names_of(config):
    return [f"out{number}" for number in range(len(config["outputs"]))]


def structure(config, values, inputs=False):
    """One value, or all of them as a list, or as a dict where a configuration names them."""
    if config["named"] and not (inputs and config["family"] == "subclassed"):
        keys = [f"x{number}" for number in range(len(values))] if inputs else names_of(config)
        return "{" + ", ".join(f"'{key}': {value}" for key, value in zip(keys, values, strict=True)) + "}"
    return values[0] if len(values) == 1 else "[" + ", ".join(values) + "]"


def compile_lines(config):
    run_eagerly, jit_compile = MODES[config["backend"]][config["mode"]]
    optimizer = expression(config["optimizer"])
    options = {
        "optimizer": f"failing({optimizer}, FAULTS)" if "update" in config["guard"]["ooms"] else optimizer,
        "loss": structure(config, [expression(head["loss"]) for head in config["outputs"]]),
    }
    for kind in ("metrics", "weighted_metrics"):
        if any(head[kind] for head in config["outputs"]):
            options[kind] = structure(config, [expression(head[kind]) for head in config["outputs"]])
    if any("loss_weight" in head for head in config["outputs"]):
        options["loss_weights"] = structure(
            config, [expression(head.get("loss_weight", 1.0)) for head in config["outputs"]]
        )
    options |= {"run_eagerly": run_eagerly, "jit_compile": jit_compile}
    options |= {key: expression(value) for key, value in config["compile"].items()}
    return ["model.compile(", *(f"    {key}={value}," for key, value in options.items()), ")", "return model"]


# The data


def arrays(config):
    """`arrays()`, which makes x, y and perhaps weights."""
    samples = config["samples"]
    lines = ["rng = np.random.default_rng(1)"]
    inputs = [inputs_of(entry, samples, config["calm"]) for entry in config["inputs"]]
    lines += [f"x{number} = {each}" for number, each in enumerate(inputs)]
    lines.append(f"x = {structure(config, [f'x{number}' for number in range(len(inputs))], inputs=True)}")
    lines.append("shapes = output_shapes(build, x)")
    targets = [f"targets(rng, {head['kind']!r}, shapes[{n}])" for n, head in enumerate(config["outputs"])]
    lines.append(f"y = {structure(config, targets)}")
    if config["weights"] != "sample":
        return function("arrays()", [*lines, "return x, y"])
    weights = [f"weights(rng, {head['kind']!r}, shapes[{n}])" for n, head in enumerate(config["outputs"])]
    return function("arrays()", [*lines, f"return x, y, {structure(config, weights)}"])


def inputs_of(entry, samples, calm):
    shape = ", ".join(map(str, entry["shape"]))
    if entry["kind"] == "words":
        return f"words(rng, {samples}, {shape}, 7)"
    if entry["kind"] == "series":
        return f"series(rng, {samples}, {shape})"
    return f"numbers(rng, {samples}, {shape}, calm={calm})"


# The training


def train(config):
    """`train(model, data, log)`."""
    form, batch = config["form"], config["batch"]
    lines = ["compiled(model)"] if config["guard"]["before_compile"] else []
    lines.append("few = keras.tree.map_structure(lambda a: a[: %d], data)" % batch)  # noqa: UP031
    for act in config["acts"]:
        lines += {"fit": fit_lines, "change": change_lines}.get(act["do"], call_lines)(act, form, batch, config)
    return function("train(model, data, log)", lines)


def fit_lines(act, form, batch, config):
    options = [f"epochs={act['epochs']}", f"shuffle={act.get('shuffle', False)}", "verbose=0"]
    callbacks = [callback(each) for each in act["callbacks"]] + (["Watch(log)"] if act.get("watch") else [])
    options += [f"callbacks=[{', '.join(callbacks)}]"] if callbacks else []
    options += ["validation_data=data", f"validation_batch_size={batch}"] if act.get("validate") else []
    options += ["class_weight={0: 0.5, 1: 2.0, 2: 1.0, 3: 0.0}"] if config["weights"] == "class" else []
    return [f"log.fit(model.fit(**fed({form!r}, data, {batch}), {', '.join(options)}))"]


def callback(each):
    more = ", few[0]" if each["name"] == "EvaluateInside" else ""
    return f"{each['name']}({each['at']}{more})"


def call_lines(act, form, batch, config):
    do = act["do"]
    given = {
        "evaluate": f"**fed('arrays', data, {batch}), verbose=0, return_dict=True",
        "predict": f"data[0], batch_size={batch}, verbose=0",
        "train_on_batch": "*few, return_dict=True",
        "test_on_batch": "*few, return_dict=True",
    }
    return [f"log({do!r}, model.{do}({given[do]}))"]


def change_lines(act, form, batch, config):
    lines = {
        "freeze": [f"freeze(model, {act['layer']})"],
        "unfreeze": [f"freeze(model, {act['layer']}, trainable=True)"],
        "rate": ["model.optimizer.learning_rate = 0.002"],
        "scale weights": ["scale_weights(model, 0.9)"],
        "restore weights": ["kept = model.get_weights()", "model.train_on_batch(*few)", "model.set_weights(kept)"],
        "recompile": ["compiled(model)"],
        "new optimizer": [
            "model.optimizer = optimizers.Adam(0.02)",
            "model.optimizer.build(model.trainable_variables)",
            # On JAX, Keras would go on with the old optimizer's program where the new one has as many variables.
            "model.make_train_function(force=True)",
        ],
    }
    return lines[act["how"]] + (["compiled(model)"] if act["recompile"] else [])


# The case


def case(config):
    guard = config["guard"]
    options = {"micro_batch_size": guard["micro"]} if guard["micro"] else {}
    given = {
        "precision": config["precision"],
        "batch": config["batch"],
        **({"random": True} if is_random(config) else {}),
        "guard": options,
        **({"recompute": guard["recompute"]} if guard["recompute"] else {}),
        **({"head": guard["head"]} if guard.get("head") else {}),
        **({"lean": True} if guard["lean"] else {}),
        **({"ooms": guard["ooms"], "faults": {"code": "FAULTS"}} if guard["ooms"] else {}),
    }
    lines = [f"    {key}={expression(value)}," for key, value in given.items()]
    made = "\n".join(["CASE = Case(", "    build=build,", "    train=train,", "    arrays=arrays,", *lines, ")"])
    return f'{made}\n\nif __name__ == "__main__":\n    report(outcome(CASE))'


# Definitions


def definitions(body):
    """Source of all that a body uses of the sources, and of what that uses, in their order."""
    known, wanted, found = index(), names_in(body), {}
    while wanted:
        name = wanted.pop()
        if name in known and name not in found:
            found[name] = known[name]
            wanted |= names_in(known[name][1])
    return [text for _, text in sorted(set(found.values()))]


def names_in(source):
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


@functools.cache
def index():
    """{name: (place, source)} of what is defined at the top of the sources."""
    found = {}
    for number, path in enumerate(SOURCES):
        text = path.read_text()
        for node in ast.parse(text).body:
            for name in defined_names(node):
                if CHOSEN.get(name, path) == path:
                    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
                    lines = text.splitlines()[first - 1 : node.end_lineno]
                    found[name] = ((number, first), "\n".join(lines))
    return found


def defined_names(node):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []
