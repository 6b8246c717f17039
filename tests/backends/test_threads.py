"""estimate, plan, guarded and plain training in several threads at the same time give what they give alone."""

import threading

import keras
import numpy as np
from here import USUAL, set_mode

import oomproof

X = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
Y = X[:, :2] * 2 + 1


def model(name, seed=3):
    """Draws, masks no sample, normalises nothing: exact in pieces."""
    layers = [
        keras.layers.Dense(8, activation="relu", kernel_initializer=keras.initializers.GlorotUniform(1)),
        keras.layers.Dropout(0.4, seed=seed),
        keras.layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(2)),
    ]
    made = keras.Sequential([keras.Input((6,)), *layers], name=name)
    made.compile("adam", "mse", metrics=["mae"])
    set_mode(made, USUAL)
    return made


def trained(net):
    history = net.fit(X, Y, batch_size=12, epochs=3, shuffle=False, verbose=0)
    return [*(np.asarray(losses) for losses in history.history.values()), *net.get_weights()]


def guarded(name):
    net = model(name)
    oomproof.guard(net, micro_batch_size=5, verbose=0)

    def run():
        return trained(net)

    return run


def plain(name):
    net = model(name)
    return lambda: trained(net)


def estimated(name):
    net = model(name)

    def run():
        found = [oomproof.estimate(net, size, memory="24GiB") for size in (16, 64, 16)]
        return [np.array([each.low, each.expected, each.high]) for each in found]

    return run


def planned(name):
    net = model(name)
    net.build((None, 6))
    return lambda: [oomproof.plan(net, 4096, memory="24GiB", budget=f"{mib}MiB", cache=False) for mib in (64, 256)]


MAKERS = {"guarded": guarded, "guarded again": guarded, "plain": plain, "estimated": estimated, "planned": planned}


def same(first, second):
    if not isinstance(first[0], np.ndarray):
        return first == second
    return len(first) == len(second) and all(
        np.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(first, second, strict=True)
    )


def test_threads_get_what_each_gets_alone():
    alone = {kind: make(kind.replace(" ", "_"))() for kind, make in MAKERS.items()}
    # Dropout and pieces count, or there is nothing that could mix.
    assert not same(alone["plain"], [value + 1 for value in alone["plain"]])
    runs = {kind: make(kind.replace(" ", "_")) for kind, make in MAKERS.items()}
    found, errors = {}, []
    begin = threading.Barrier(len(runs))

    def run(kind):
        begin.wait(60)
        try:
            found[kind] = runs[kind]()
        except Exception as error:
            errors.append((kind, error))

    threads = [threading.Thread(target=run, args=(kind,)) for kind in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not errors
    assert [kind for kind in MAKERS if not same(alone[kind], found[kind])] == []
