"""A model that is changed and not compiled again trains under guard as it does under plain Keras.

What that is differs between backends, and is written down in common/fingerprint.py. Here each script runs plain and
guarded, and what comes out is compared: weights, losses, or the error.
"""

import keras
import numpy as np
import pytest
from changes import (
    SCRIPTS,
    another_kind_of_optimizer,
    another_layer,
    another_optimizer,
    another_policy,
    fit,
    frozen_and_made_anew_in_an_epoch,
    frozen_at_an_epochs_end,
    frozen_before_other_data,
    frozen_between_evaluations,
    frozen_between_fits,
    frozen_compiled_and_thawed,
    frozen_in_an_epoch,
    network,
    with_statistics,
)
from here import modes, only, representative
from models import force_pieces, made, snapshot

import oomproof

pytestmark = pytest.mark.usefixtures("float64")


def outcome(script, model):
    """What a script returns and leaves behind, or the error it ends in."""
    try:
        found = script(model)
    except ValueError as error:
        return str(error).split(":")[0], None
    return keras.tree.flatten(found), snapshot(model)


def check_same_outcome(plain, guarded):
    (expected, variables), (received, ours) = plain, guarded
    if variables is None or ours is None:
        assert received == expected
        return
    for one, other in zip(expected, received, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-9)
    for name, value in variables.items():
        np.testing.assert_allclose(value, ours[name], rtol=0, atol=1e-9, err_msg=name)


def check_as_plain(script, build=network, mode="graph", **guard):
    plain = outcome(script, made(build, mode))
    check_same_outcome(plain, outcome(script, oomproof.guard(made(build, mode), **guard)))


# Of those that are seen in the same way, one.
ESSENTIAL = [
    frozen_between_fits,
    frozen_and_made_anew_in_an_epoch,
    frozen_in_an_epoch,
    frozen_before_other_data,
    frozen_between_evaluations,
    frozen_compiled_and_thawed,
    another_optimizer,
    another_layer,
    another_policy,
]


@pytest.mark.parametrize("script", representative(SCRIPTS, *ESSENTIAL), ids=lambda script: script.__name__)
def test_changed_models_train_as_under_plain_keras(script):
    check_as_plain(script)


IN_PIECES = [frozen_between_fits, frozen_and_made_anew_in_an_epoch, another_kind_of_optimizer]


@pytest.mark.parametrize("script", IN_PIECES, ids=lambda script: script.__name__)
def test_changed_models_train_in_pieces_as_under_plain_keras(script):
    check_as_plain(script, micro_batch_size=3)


@pytest.mark.parametrize("mode", modes("eager"))
def test_changed_models_train_op_by_op_as_under_plain_keras(mode):
    for script in (frozen_between_fits, frozen_at_an_epochs_end, another_optimizer):
        check_as_plain(script, mode=mode)


def test_a_frozen_layer_that_no_weight_shows():
    def script(model):
        first = fit(model)
        model.layers[1].trainable = False
        return first, fit(model)

    check_as_plain(script, build=with_statistics)


def test_batches_that_are_cut_for_the_first_time_after_a_layer_was_frozen():
    """Where Keras goes on with its trace, what is traced now is traced for the model as it was then."""

    def script(model, pieces=None):
        first = fit(model)
        model.layers[0].trainable = False
        model.optimizer = keras.optimizers.SGD(0.3)
        model.optimizer.build(model.trainable_variables)
        if pieces:
            force_pieces(model, pieces)
        second = fit(model)
        # And the model itself is as the user left it.
        assert not model.layers[0].trainable
        assert not any(variable.trainable for variable in model.layers[0].variables)
        assert model.optimizer.momentum == 0
        return first, second

    plain = outcome(script, made(network))
    check_same_outcome(plain, outcome(lambda model: script(model, 3), oomproof.guard(made(network))))


@only("jax", because="layers that change places in the lists of values")
def test_values_stay_with_their_variables_when_layers_change_places():
    """Plain Keras computes with the values of one layer in the place of the other. Under guard it is a new program."""

    def swapped(model, anew):
        model.layers[0].trainable = False
        fit(model)
        model.layers[0].trainable, model.layers[2].trainable = True, False
        if anew:
            model.make_train_function(force=True)
        return fit(model)

    plain = outcome(lambda model: swapped(model, True), made(network))
    check_same_outcome(plain, outcome(lambda model: swapped(model, False), oomproof.guard(made(network))))
