"""A seed and a number → a configuration: a random training as a plain dict of dicts, lists and numbers.

Pure: no framework is imported. {"call": "layers.Dense", "units": 3} stands for the expression `layers.Dense(units=3)`,
{"args": […]} in it for positional arguments, {"code": "…"} for an expression as it is.
"""

from fuzz.acting import acts
from fuzz.dice import Dice
from fuzz.heads import heads
from fuzz.optimizing import optimizer

MODES = {
    # Op by op, JAX compiles every operation for every shape. torch.compile takes half a minute for a model.
    "tensorflow": {"eager": 5, "graph": 5, "xla": 0.5},
    "jax": {"graph": 8, "eager": 1, "uncompiled": 0.5},
    "torch": {"graph": 1},
}
PRECISIONS = {"float64": 14, "float32": 3, "mixed_bfloat16": 1, "mixed_float16": 1}
RANDOM_LAYERS = ("Dropout", "Noise", "Sampling")


def configuration(seed, index, backend):
    """The configuration with this number of the sequence that a seed begins. The same each time."""
    dice = Dice(f"{seed}/{index}/{backend}")
    batch = 1 if dice.chance(0.04) else dice.between(4, 10)
    mode = dice.weighted(MODES[backend])
    family = dice.weighted({"functional": 6, "sequential": 2, "subclassed": 2, "own loss": 1, "own metrics": 0.5})
    inputs, blocks, place = body(dice, nests=family not in ("sequential", "subclassed"))
    config = {
        "origin": [seed, index],
        "backend": backend,
        "precision": dice.weighted(PRECISIONS),
        "mode": mode,
        "family": family,
        "inputs": inputs,
        "blocks": blocks,
        "outputs": heads(dice, place, family),
        "named": dice.chance(0.4),
        "optimizer": optimizer(dice),
        "compile": {"steps_per_execution": 2} if backend != "torch" and dice.chance(0.06) else {},
        "weights": dice.weighted({None: 5, "sample": 3, "class": 1}),
        "samples": batch * dice.between(1, 2) + (dice.below(batch) if dice.chance(0.6) else 0),
        "batch": batch,
        "calm": dice.chance(0.3),
        "form": dice.weighted({"arrays": 6, "generator": 1, "sequence": 1, "dataset": 1}),
    }
    if family == "sequential":
        config["outputs"] = config["outputs"][:1]
        config["named"] = False
    if len(config["outputs"]) > 1 or config["outputs"][0]["kind"] != "classes" or place != "flat":
        config["weights"] = "sample" if config["weights"] == "class" else config["weights"]
    config["acts"] = acts(dice, config)
    config["guard"] = guard(dice, config)
    if config["guard"]["ooms"]:
        leave_room(config)
        config["blocks"].insert(dice.below(len(blocks) + 1), {"call": "Faulty", "args": [{"code": "FAULTS"}]})
        if inputs[0]["kind"] == "words":
            # Not in front of the Embedding: there is nothing to differentiate.
            config["blocks"].sort(key=lambda block: block.get("call") != "layers.Embedding")
    return config


def is_random(config):
    """Whether training draws random numbers."""
    return any(part in str(config["blocks"]) for part in RANDOM_LAYERS) or "dropout" in str(config["blocks"])


def guard(dice, config):
    """How the guarded side runs: pieces, recomputation, parts of the head, in-place updates, where memory runs out."""
    batch, xla = config["batch"], config["backend"] == "tensorflow" and config["mode"] == "xla"
    micro = dice.between(1, batch - 1) if batch > 1 and dice.chance(0.85) else None
    recompute = []
    if dice.chance(0.35):
        ends = sorted(round(dice.uniform(), 2) for _ in range(2 * dice.between(1, 2)))
        recompute = [list(pair) for pair in zip(ends[::2], ends[1::2], strict=True)]
    ooms = {}
    # No Python runs inside of TensorFlow's XLA programs, and steps that are several batches fail as one.
    if not xla and dice.chance(0.3):
        points = [dice.weighted({"forward": 2, "backward": 2, "update": 1}) for _ in range(dice.between(1, 2))]
        for point in dict.fromkeys(points):
            ooms[point] = [dice.between(0, 12)]
    return {
        "micro": micro,
        "recompute": recompute,
        "lean": dice.chance(0.15),
        "ooms": ooms,
        "before_compile": dice.chance(0.1),
        "head": [round(dice.uniform(), 2), dice.between(2, 4)] if dice.chance(0.35) else None,
    }


def leave_room(config):
    """Makes every batch and piece large enough to be halved as often as memory runs out."""
    least = 2 ** len(config["guard"]["ooms"])
    config["batch"] = max(config["batch"], least)
    config["samples"] += (
        max(0, least - config["samples"] % config["batch"]) if config["samples"] % config["batch"] else 0
    )
    if config["guard"]["micro"]:
        config["guard"]["micro"] = max(config["guard"]["micro"], least)


# The model


def body(dice, nests):
    """Inputs, blocks, and the place where they end: what an output sees."""
    place = dice.weighted({"flat": 4, "sequence": 5, "image": 3, "volume": 0.5})
    inputs, blocks = [entrance(dice, place)], []
    if inputs[0]["kind"] == "words":
        masked = {"mask_zero": True} if dice.chance(0.6) else {}
        blocks.append({"call": "layers.Embedding", "args": [7, 4], **masked, **some_regularizer(dice, "embeddings")})
    elif place == "sequence" and dice.chance(0.4):
        blocks.append({"call": "layers.Masking"})
    if place == "sequence" and dice.chance(0.35):
        blocks.append({"call": "Positions"})
    for _ in range(dice.between(1, 3)):
        blocks.append(block(dice, place, nests))
    if place == "sequence" and dice.chance(0.5):
        blocks.append(dice.weighted_call(TO_FLAT["sequence"]))
        place = "flat"
    elif place in ("image", "volume") and (place == "volume" or dice.chance(0.75)):
        blocks.append(dice.weighted_call(TO_FLAT[place]))
        place = "flat"
    if nests and place == "flat" and dice.chance(0.25):
        inputs.append({"kind": "numbers", "shape": [3]})
        blocks.append({"join": 1})
        blocks.append(dense(dice))
    return inputs, blocks, place


def entrance(dice, place):
    if place == "flat":
        return {"kind": "numbers", "shape": [4]}
    if place == "sequence":
        return dice.choice([{"kind": "words", "shape": [4]}, {"kind": "series", "shape": [4, 3]}])
    return {"kind": "numbers", "shape": [6, 6, 2] if place == "image" else [4, 4, 4, 2]}


def block(dice, place, nests, depth=0):
    """A layer that leaves the place as it is, or several of them in one of the ways that models hold others."""
    kinds = {"layer": 8, "Residual": 0.7}
    kinds |= {"residual": 1, "shared": 0.7, "nested": 0.7} if nests else {}
    kind = dice.weighted(kinds) if depth == 0 else "layer"
    if kind == "layer":
        return layer(dice, place)
    if kind == "shared":
        options = {"activation": "tanh", "trainable": dice.chance(0.8)}
        return {"shared": {"call": "layers.Dense", "args": [{"code": "h.shape[-1]"}], **options}, "times": 2}
    inner = [block(dice, place, nests, depth + 1) for _ in range(dice.between(1, 2))]
    if kind == "Residual":
        return {"call": "Residual", "args": [[each for each in inner if not shrinks(each)] or [dense(dice)]]}
    if kind == "residual":
        return {"residual": [each for each in inner if not shrinks(each)] or [dense(dice)]}
    return {"nested": inner}


def shrinks(block):
    return "Pooling" in block["call"]


def dense(dice):
    found = {"call": "layers.Dense", "args": [dice.between(2, 5)]}
    found |= {"activation": dice.choice(["tanh", "relu", "gelu", "sigmoid"])} if dice.chance(0.7) else {}
    found |= some_regularizer(dice, "kernel")
    found |= {"activity_regularizer": dice.choice(["l1", "l2"])} if dice.chance(0.12) else {}
    found |= {"kernel_constraint": dice.choice(["max_norm", "unit_norm", "non_neg"])} if dice.chance(0.08) else {}
    found |= {"use_bias": False} if dice.chance(0.1) else {}
    return found


def some_regularizer(dice, of):
    return {f"{of}_regularizer": dice.choice(["l1", "l2"])} if dice.chance(0.12) else {}


def penalty(dice):
    kinds = {"mean": 3, "sum": 3, "masked mean": 2, "hinge sum": 2, "sum in training": 1, "balance": 2}
    return {"call": "Penalty", "args": [dice.weighted(kinds)]}


def recurrent(dice):
    name = dice.choice(["LSTM", "GRU", "SimpleRNN"])
    found = {"call": f"layers.{name}", "args": [dice.between(2, 4)], "return_sequences": True}
    found |= {"recurrent_dropout": 0.3} if dice.chance(0.05) else {}
    found |= {"unroll": True} if dice.chance(0.2) else {}
    if dice.chance(0.2):
        return {"call": "layers.Bidirectional", "args": [found]}
    return found | ({"go_backwards": True} if dice.chance(0.1) else {})


def convolution(dice, rank):
    options = {"padding": "same", **({"activation": "tanh"} if dice.chance(0.5) else {})}
    kind = dice.weighted({"Conv": 4, "DepthwiseConv": 1, "SeparableConv": 1}) if rank < 3 else "Conv"
    args = [3] if kind == "DepthwiseConv" else [dice.between(2, 4), 3]
    return {"call": f"layers.{kind}{rank}D", "args": args, **options}


def attention(dice):
    options = {"causal": True} if dice.chance(0.4) else {}
    return {"call": "SelfAttention", **options, **({"dropout": 0.2} if dice.chance(0.1) else {})}


POOLING = ["layers.MaxPooling2D", "layers.AveragePooling2D"]
ANYWHERE = {
    dense: 5,
    penalty: 1.5,
    lambda dice: {"call": "layers.LayerNormalization"}: 1.5,
    lambda dice: {"call": "layers.BatchNormalization", "momentum": 0.8}: 0.7,
    lambda dice: {"call": "layers.GroupNormalization", "groups": dice.choice([1, -1])}: 0.7,
    lambda dice: {"call": "layers.UnitNormalization"}: 0.3,
    lambda dice: {"call": "layers.Dropout", "args": [0.4], "seed": 3}: 0.7,
    lambda dice: {"call": "layers.GaussianNoise", "args": [0.2], "seed": 4}: 0.3,
    lambda dice: {"call": "layers.GaussianDropout", "args": [0.3]}: 0.15,
    lambda dice: {"call": "layers.ActivityRegularization", "l2": 0.01}: 0.4,
    lambda dice: {"call": "layers.PReLU"}: 0.3,
    lambda dice: {"call": "Noted"}: 0.2,
}
LAYERS = {
    "flat": ANYWHERE | {lambda dice: {"call": "Sampling", "divergence": dice.choice(["mean", "sum"])}: 0.7},
    "sequence": ANYWHERE
    | {
        recurrent: 4,
        attention: 3,
        lambda dice: convolution(dice, 1): 1,
        lambda dice: {"call": "layers.TimeDistributed", "args": [dense(dice)]}: 0.5,
        lambda dice: {"call": "layers.SpatialDropout1D", "args": [0.3]}: 0.2,
    },
    "image": ANYWHERE
    | {
        lambda dice: convolution(dice, 2): 7,
        lambda dice: {"call": dice.choice(POOLING), "args": [2], "padding": "same"}: 2,
        lambda dice: {"call": "layers.SpatialDropout2D", "args": [0.3]}: 0.2,
    },
    "volume": ANYWHERE
    | {
        lambda dice: convolution(dice, 3): 4,
        lambda dice: {"call": "layers.MaxPooling3D", "args": [2], "padding": "same"}: 1,
    },
}
TO_FLAT = {
    "sequence": {
        "layers.Flatten": 1,
        "layers.GlobalAveragePooling1D": 2,
        "layers.GlobalMaxPooling1D": 1,
    },
    "image": {"layers.Flatten": 1, "layers.GlobalAveragePooling2D": 2},
    "volume": {"layers.Flatten": 1, "layers.GlobalAveragePooling3D": 2},
}


def layer(dice, place):
    return dice.weighted(LAYERS[place])(dice)


# What a configuration is made of


def features(config):
    """Names of what a configuration holds, for counting and for leaving out."""
    found = {config["family"], config["mode"], config["precision"], f"form {config['form']}", *config["compile"]}
    found |= {f"weights {config['weights']}"} if config["weights"] else set()
    found |= {f"act {act['do']}" for act in config["acts"]}
    found |= {f"changes {act['how']}" for act in config["acts"] if "how" in act}
    found |= {f"oom {point}" for point in config["guard"]["ooms"]}
    found |= {name for name in ("micro", "recompute", "lean", "before_compile", "head") if config["guard"][name]}
    found |= {"several outputs"} if len(config["outputs"]) > 1 else set()
    found |= {"several inputs"} if len(config["inputs"]) > 1 else set()
    return sorted(found | set(names([config["blocks"], config["outputs"], config["optimizer"], config["acts"]])))


def names(value):
    """Names of all calls in a value and of the options they are given, and of blocks that hold others."""
    if isinstance(value, list):
        return [name for each in value for name in names(each)]
    if not isinstance(value, dict):
        return []
    call = [value["call"].rpartition(".")[2]] if "call" in value else []
    own = [f"{call[0]} {value['args'][0]}"] if call == ["Penalty"] else []
    own += [kind for kind in ("residual", "nested", "shared", "join") if kind in value]
    own += [key for key in value if call and key in OPTIONS]
    own += [f"reduction {value['reduction']}"] if "reduction" in value else []
    return call + own + [name for each in value.values() for name in names(each)]


OPTIONS = {
    *("clipnorm", "global_clipnorm", "clipvalue", "weight_decay", "use_ema", "gradient_accumulation_steps"),
    *("mask_zero", "causal", "activity_regularizer", "kernel_regularizer", "kernel_constraint", "amsgrad", "centered"),
    *("loss_scale_factor", "ignore_class", "unroll", "recurrent_dropout", "return_sequences"),
}
