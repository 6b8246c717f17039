"""Outputs: their layers, targets, losses and metrics."""

REDUCTIONS = ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight"]
# Losses by the kind of targets, with options that may be given to each.
LOSSES = {
    "classes": {"SparseCategoricalCrossentropy": [{}, {"ignore_class": 1}]},
    "onehot": {
        "CategoricalCrossentropy": [{}, {"label_smoothing": 0.1}],
        "CategoricalFocalCrossentropy": [{}],
        "KLDivergence": [{}],
        "Dice": [{}, {"axis": [1]}],
        "Tversky": [{}],
    },
    "numbers": {
        "MeanSquaredError": [{}],
        "MeanAbsoluteError": [{}],
        "Huber": [{}, {"delta": 0.5}],
        "LogCosh": [{}],
        "CosineSimilarity": [{}],
    },
    "binary": {
        "BinaryCrossentropy": [{}, {"label_smoothing": 0.1}],
        "BinaryFocalCrossentropy": [{}, {"apply_class_balancing": True}],
        "SquaredHinge": [{}],
        "Poisson": [{}],
        "Dice": [{}],
        "Tversky": [{}],
    },
}
SHORT_NAMES = {
    "classes": ["sparse_categorical_crossentropy"],
    "onehot": ["categorical_crossentropy", "kl_divergence"],
    "numbers": ["mse", "mae", "huber"],
    "binary": ["binary_crossentropy", "hinge"],
}
OWN = {
    "classes": ["own_classes"],
    "onehot": ["own_by_sample", "own_mean", "own_spread"],
    "numbers": ["own_by_sample", "own_mean", "own_spread"],
    "binary": ["own_by_sample", "own_mean"],
}
METRICS = {
    "classes": ["accuracy", {"call": "metrics.SparseTopKCategoricalAccuracy", "k": 2}],
    "onehot": ["accuracy", "categorical_crossentropy", {"call": "metrics.F1Score"}],
    "numbers": ["mae", {"call": "metrics.RootMeanSquaredError"}, {"call": "metrics.CosineSimilarity"}],
    "binary": ["accuracy", {"call": "metrics.AUC", "num_thresholds": 11}, {"call": "metrics.Precision"}, "mse"],
}
ACTIVATIONS = {"classes": "softmax", "onehot": "softmax", "numbers": None, "binary": "sigmoid"}


def heads(dice, place, family):
    """One output or several."""
    several = family != "sequential" and dice.chance(0.25)
    return [head(dice, place) for _ in range(dice.between(2, 3) if several else 1)]


def head(dice, place):
    kind = dice.weighted({"classes": 3, "onehot": 2, "numbers": 4, "binary": 2})
    flat = place == "flat" and kind in ("numbers", "binary") and dice.chance(0.15)
    units = 1 if flat else dice.between(2, 4)
    layer = {"call": "layers.Dense", "args": [units]}
    layer |= {"activation": ACTIVATIONS[kind]} if ACTIVATIONS[kind] else {}
    own = [] if flat else [{"code": name} for name in OWN[kind]]
    found = {
        "kind": kind,
        "layers": [layer, {"call": "Squeezed"}] if flat else [layer],
        "loss": loss(dice, kind, own),
        "metrics": some_metrics(dice, kind, flat or place != "flat"),
        "weighted_metrics": some_metrics(dice, kind, flat or place != "flat") if dice.chance(0.4) else [],
    }
    return found | ({"loss_weight": dice.choice([0.3, 2.0])} if dice.chance(0.3) else {})


def loss(dice, kind, own):
    way = dice.weighted({"name": 2, "class": 5, "own": 1.2 if own else 0})
    if way == "name":
        return dice.choice(SHORT_NAMES[kind])
    if way == "own":
        return dice.choice(own)
    name = dice.choice(list(LOSSES[kind]))
    found = {"call": f"losses.{name}", **dice.choice(LOSSES[kind][name])}
    # "none" is for TensorFlow alone, and there for few: elsewhere Keras's own step raises.
    reduction = dice.weighted({None: 4, "none": 0.3, **dict.fromkeys(REDUCTIONS, 1)})
    return found | ({"reduction": reduction} if reduction else {})


def some_metrics(dice, kind, odd):
    """Few of Keras's metric classes take predictions that are not of rank 2."""
    known = [m for m in METRICS[kind] if not odd or isinstance(m, str)]
    found = [dice.choice(known)] if dice.chance(0.5) else []
    found += [{"call": "Count"}] if dice.chance(0.15) else []
    found += [{"code": "own_metric"}] if dice.chance(0.08) else []
    return found
