"""Fixtures of the backend suites."""

import os

import keras
import oom_memory
import pytest
from forks import Forks
from here import BACKEND
from keras import ops
from keras.src.backend.common import dtypes
from keras.src.losses import loss as keras_loss
from shortages import EXHAUSTIVE, SCENARIOS, Answers

from oomproof._records.exactness import Exactness
from oomproof._training.proving import Proving

if BACKEND == "jax":
    import jax

    # Nearly all of a test's time is compiling programs that run once: less than half of it is left like this. What they
    # compute stays the same. XLA reads its flags once; child processes, whose memory is measured, are to see none.
    jax.config.update("jax_disable_most_optimizations", True)
    # Older ones end the process over a flag that they do not know.
    if jax.__version_info__ >= (0, 10):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false")
            jax.jit(lambda: 1)()


@pytest.fixture
def float64():
    """Double precision, so that what is not exact cannot hide behind rounding."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    if BACKEND == "jax":
        # JAX has no double precision unless asked. Not for the whole process: most users never ask.
        jax.config.update("jax_enable_x64", True)
    # Off TensorFlow, Keras turns what it promotes to double precision into single: most of a model's arithmetic.
    narrowed = dtypes.BIT64_TO_BIT32_DTYPE["float64"]
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    yield
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = narrowed
    if BACKEND == "jax":
        jax.config.update("jax_enable_x64", False)
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)


@pytest.fixture(autouse=True, scope="session")
def no_plans_of_yesterday(tmp_path_factory):
    """Plans are remembered on disk. Every run of the tests makes its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def weights_as_given():
    """Keras masks sample weights in place on torch, so plain training's weighted metrics see other weights than it was
    given (docs/backends.md). Repaired here, or there would be no right History to compare with."""
    if BACKEND != "torch":
        yield
        return
    original = keras_loss.apply_mask
    keras_loss.apply_mask = lambda sample_weight, *rest, **options: original(
        None if sample_weight is None else ops.copy(sample_weight), *rest, **options
    )
    yield
    keras_loss.apply_mask = original


# Where proofs are made as they are for a user. Elsewhere what is proven is what the tests themselves compare.
_PROVING = {"test_docs", "test_proof_found", "test_fuzz", "test_keras_own", "test_proof", "test_verify"}


@pytest.fixture(autouse=True)
def proofs_taken_for_granted(request, monkeypatch):
    """A proof takes longer than most of the trainings it is for. `@pytest.mark.proven` asks for it."""
    if request.module.__name__ in _PROVING or request.node.get_closest_marker("proven"):
        return

    def granted(proving, data, pieces):
        caveats = proving._step.caveats() if pieces > 1 else ()
        return Exactness("not exact", caveats) if caveats else Exactness()

    monkeypatch.setattr(Proving, "__call__", granted)


@pytest.fixture(scope="session")
def forks(no_plans_of_yesterday):
    """Runs what needs a process of its own."""
    found = Forks({"KERAS_BACKEND": BACKEND, **oom_memory.environment(BACKEND, 0)})
    yield found
    found.close()


@pytest.fixture(scope="session")
def answers(request, forks):
    """What became of the scenarios in which memory runs out."""
    found = Answers(forks)
    everything = request.config.getoption("exhaustive")
    found.begin(name for name in SCENARIOS if everything or name not in EXHAUSTIVE)
    yield found
    found.close()


@pytest.fixture(autouse=True, scope="session")
def scenarios_that_wait(request):
    """On TensorFlow they are idle for most of their time: they begin with the suite."""
    if BACKEND == "tensorflow" and any("answers" in item.fixturenames for item in request.session.items):
        request.getfixturevalue("answers")
