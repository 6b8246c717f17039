"""What is done with a model: fits, and what users do before, between and after them."""

CHANGES = {
    "freeze": 3,
    "unfreeze": 1,
    "rate": 1,
    "scale weights": 1,
    "restore weights": 1,
    "recompile": 1,
    "new optimizer": 1,
}
CALLBACKS = {"ChangeRate": 2, "ScaleWeights": 1, "EvaluateInside": 1}


def callbacks_allowed(config):
    """Which callbacks have a meaning: a graph that is traced does not see that a layer was frozen, and on JAX Keras
    raises when the number of trainable variables changes in the middle of a fit."""
    known = {name: n for name, n in CALLBACKS.items() if name != "ChangeRate" or may_set_rate(config)}
    known |= {"FreezeAndRemake": 1} if config["backend"] != "jax" else {}
    return known | ({"Freeze": 2} if sees_freezing(config) else {})


def sees_freezing(config):
    """Whether plain Keras's next step is one without a layer that was just frozen."""
    return config["backend"] == "torch" or (config["backend"] == "tensorflow" and config["mode"] == "eager")


def may_set_rate(config):
    """Keras refuses to set the learning rate of an optimizer that has a schedule."""
    inner = config["optimizer"].get("args", [config["optimizer"]])[0]
    return not isinstance(inner["learning_rate"], dict)


def acts(dice, config):
    found = [other(dice)] if dice.chance(0.25) else []
    found.append(fit(dice, config))
    if dice.chance(0.4):
        how = dice.weighted({name: n for name, n in CHANGES.items() if name != "rate" or may_set_rate(config)})
        freezes = how in ("freeze", "unfreeze")
        compiled = freezes and dice.chance(0.5)
        found.append({"do": "change", "how": how, "layer": dice.below(4), "recompile": compiled})
        # A traced program goes on as it was unless the model is compiled anew. Whether plain Keras traces again depends
        # on the next batch's shape, so there is nothing to compare a fit with.
        trains = compiled or not freezes or sees_freezing(config)
        found.append(fit(dice, config) if trains else {"do": dice.choice(["evaluate", "predict"])})
    found += [{"do": "evaluate"}] if dice.chance(0.4) else []
    found += [{"do": "predict"}] if dice.chance(0.3) else []
    return found


def other(dice):
    return {"do": dice.choice(["evaluate", "predict", "train_on_batch", "test_on_batch"])}


def fit(dice, config):
    found = {"do": "fit", "epochs": dice.weighted({1: 4, 2: 1}), "callbacks": []}
    found |= {"validate": True} if dice.chance(0.15) else {}
    found |= {"shuffle": True} if config["form"] == "arrays" and dice.chance(0.12) else {}
    if dice.chance(0.25):
        found["callbacks"].append({"at": dice.below(3), "name": dice.weighted(callbacks_allowed(config))})
    found |= {"watch": True} if dice.chance(0.5) else {}
    return found
