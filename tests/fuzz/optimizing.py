"""Optimizers with their options."""

OPTIMIZERS = {
    # Name, options that are always given, and options that may be.
    "SGD": ({"learning_rate": 0.05}, [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}]),
    "Adam": ({"learning_rate": 0.01}, [{"amsgrad": True}]),
    "AdamW": ({"learning_rate": 0.01}, []),
    "RMSprop": ({"learning_rate": 0.01}, [{"centered": True}, {"momentum": 0.9}]),
    "Adagrad": ({"learning_rate": 0.05}, []),
    "Adadelta": ({"learning_rate": 0.5}, []),
    "Adamax": ({"learning_rate": 0.01}, []),
    "Adafactor": ({"learning_rate": 0.01}, [{"relative_step": False}]),
    "Lion": ({"learning_rate": 0.003}, []),
    "Nadam": ({"learning_rate": 0.01}, []),
    "Ftrl": ({"learning_rate": 0.05}, [{"l1_regularization_strength": 0.01}]),
    "Lamb": ({"learning_rate": 0.01}, []),
}
LIKELY = {"SGD": 4, "Adam": 6, "AdamW": 1.5, "RMSprop": 2}
CLIPPING = [{"clipnorm": 0.1}, {"global_clipnorm": 0.1}, {"clipvalue": 0.02}]
AVERAGES = [{"use_ema": True, "ema_momentum": 0.9}, {"use_ema": True, "ema_overwrite_frequency": 2}]
SCHEDULES = [
    {"call": "optimizers.schedules.ExponentialDecay", "args": [0.05, 2, 0.7]},
    {"call": "optimizers.schedules.CosineDecay", "args": [0.05, 6]},
    {"call": "optimizers.schedules.PiecewiseConstantDecay", "args": [[2, 3], [0.05, 0.02, 0.01]]},
]


def optimizer(dice):
    name = dice.weighted({each: LIKELY.get(each, 1) for each in OPTIMIZERS})
    always, may_be = OPTIMIZERS[name]
    found = {"call": f"optimizers.{name}", **always}
    found |= dice.choice(may_be) if may_be and dice.chance(0.5) else {}
    found |= dice.choice(CLIPPING) if dice.chance(0.25) else {}
    found |= {"weight_decay": 0.02} if dice.chance(0.15) else {}
    found |= dice.choice(AVERAGES) if dice.chance(0.12) else {}
    found |= {"gradient_accumulation_steps": 2} if dice.chance(0.1) else {}
    found |= {"loss_scale_factor": 4.0} if dice.chance(0.04) else {}
    found |= {"learning_rate": dice.choice(SCHEDULES)} if dice.chance(0.15) else {}
    if dice.chance(0.06):
        return {"call": "optimizers.LossScaleOptimizer", "args": [found], "initial_scale": 8.0}
    return found
