"""A configuration that fails → the smallest one found that still fails in the same way.

Pure: what "fails" means is a function that is handed in.
"""

import copy
import json

from fuzz.grammar import features

# What says nothing about the cause of a failure.
ORDINARY = {
    *("functional", "sequential", "eager", "float64", "form arrays", "act fit", "micro"),
    *("Dense", "SGD", "Input", "several outputs"),
}
PLAIN_HEAD = {"kind": "numbers", "layers": [{"call": "layers.Dense", "args": [2]}], "loss": "mse"}


def shrink(config, fails, go_on=lambda: True):
    """Takes parts away for as long as `fails(smaller)` holds. Ends when nothing can go, or `go_on()` says so."""
    tried = {key(config)}
    while go_on():
        for candidate in smaller(config):
            if key(candidate) in tried:
                continue
            tried.add(key(candidate))
            if not go_on():
                return config
            if fails(candidate):
                config = candidate
                break
        else:
            return config
    return config


def key(config):
    return json.dumps(config, sort_keys=True)


def telling(config):
    """Features of a minimal configuration that name the cause."""
    return set(features(config)) - ORDINARY


def smaller(config):
    """Configurations with one part less, the largest parts first."""
    for change in CHANGES:
        for candidate in change(config):
            if candidate != config:
                yield candidate


def changed(config, path, value):
    """A copy with another value at a path of keys and indices."""
    found = copy.deepcopy(config)
    place = found
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return found


def without(config, path):
    found = copy.deepcopy(config)
    place = found
    for step in path[:-1]:
        place = place[step]
    del place[path[-1]]
    return found


def fewer_acts(config):
    for number in range(len(config["acts"])):
        yield without(config, ["acts", number])
    for number, act in enumerate(config["acts"]):
        if act["do"] == "fit":
            yield changed(config, ["acts", number], {"do": "fit", "epochs": 1, "callbacks": []})
            yield changed(config, ["acts", number, "callbacks"], [])
            yield changed(config, ["acts", number, "epochs"], 1)
            for option in ("validate", "shuffle", "watch"):
                if option in act:
                    yield without(config, ["acts", number, option])
        if act.get("recompile"):
            yield changed(config, ["acts", number, "recompile"], False)


def less_guard(config):
    less = {"ooms": {}, "recompute": [], "head": None, "lean": False, "before_compile": False, "micro": None}
    for name, value in less.items():
        yield changed(config, ["guard", name], value)
    for point in config["guard"]["ooms"]:
        yield without(config, ["guard", "ooms", point])
    for number in range(len(config["guard"]["recompute"])):
        yield without(config, ["guard", "recompute", number])
    if config["guard"]["micro"]:
        yield changed(config, ["guard", "micro"], -(-config["batch"] // 2))


def simpler_whole(config):
    for name, value in (
        *(("weights", None), ("named", False), ("form", "arrays"), ("compile", {}), ("calm", False)),
        *(("family", "sequential"), ("family", "functional"), ("precision", "float64"), ("mode", "eager")),
        ("optimizer", {"call": "optimizers.SGD", "learning_rate": 0.05}),
    ):
        if name != "mode" or config["backend"] != "torch":
            yield changed(config, [name], value)


def fewer_outputs(config):
    for number in range(len(config["outputs"]) if len(config["outputs"]) > 1 else 0):
        yield without(config, ["outputs", number])
    for number, head in enumerate(config["outputs"]):
        yield changed(config, ["outputs", number], {**PLAIN_HEAD, "metrics": [], "weighted_metrics": []})
        yield changed(config, ["outputs", number, "metrics"], [])
        yield changed(config, ["outputs", number, "weighted_metrics"], [])
        if "loss_weight" in head:
            yield without(config, ["outputs", number, "loss_weight"])
        if len(head["layers"]) > 1:
            yield changed(config, ["outputs", number, "layers"], head["layers"][:1])


def fewer_blocks(config):
    blocks = config["blocks"]
    for number, block in enumerate(blocks):
        fewer = without(config, ["blocks", number])
        yield changed(fewer, ["inputs"], config["inputs"][:1]) if "join" in block else fewer
        for inner in inside(block):
            yield changed(config, ["blocks"], blocks[:number] + inner + blocks[number + 1 :])


def inside(block):
    """Lists of blocks that may stand in the place of one that holds others."""
    if "shared" in block:
        yield [block["shared"]]
    for kind in ("residual", "nested"):
        if kind in block:
            yield block[kind]
            yield from ([each] for each in block[kind])
    for given in block.get("args", []):
        if isinstance(given, list) and given and isinstance(given[0], dict):
            yield given
            yield from ([each] for each in given)
        elif isinstance(given, dict) and "call" in given:
            yield [given]


def fewer_options(config):
    for part in ("blocks", "outputs", "optimizer"):
        for path in options(config[part], [part]):
            yield without(config, path)
    if config["optimizer"]["call"].endswith("LossScaleOptimizer"):
        yield changed(config, ["optimizer"], config["optimizer"]["args"][0])


def options(value, path):
    """Paths of all named arguments of calls."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in items:
        if isinstance(value, dict) and "call" in value and name not in ("call", "args"):
            yield [*path, name]
        yield from options(each, [*path, name])


def less_data(config):
    batch = config["batch"]
    for samples in (batch, 2 * batch, batch + 1):
        if samples < config["samples"]:
            yield changed(config, ["samples"], samples)
    for size in (2, 4):
        if size < batch:
            micro = config["guard"]["micro"]
            less = {**config, "batch": size, "samples": max(size, config["samples"] * size // batch)}
            yield {**less, "guard": {**config["guard"], "micro": micro and max(1, min(micro, size - 1))}}


CHANGES = [fewer_acts, less_guard, fewer_outputs, fewer_blocks, simpler_whole, fewer_options, less_data]
