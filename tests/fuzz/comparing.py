"""Trains a case by plain Keras and under a guard, and says what differs. Scripts hold a copy of what they use of this.

Definitions here use what writing.py imports for every script, and each other.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from here import BACKEND
from keras import ops

import oomproof

# Relative to the largest number of an array, but for numbers that are all tiny.
TOLERANCE = {"float64": 1e-8, "float32": 1e-4, "mixed_bfloat16": 3e-2, "mixed_float16": 1e-2}
# As much as one step of rounding changes a variable, to see what becomes of it.
ROUNDING = {"float64": 1e-15, "float32": 2e-7, "mixed_bfloat16": 2e-3, "mixed_float16": 3e-4}
# How much larger than measured rounding a difference must be to be none of it.
MARGIN = 50.0


@dataclasses.dataclass
class Case:
    """A training as functions, and how the guarded side runs it.

    `build()` makes a compiled model, `train(model, data, log)` trains it. `guard` holds arguments of `oomproof.guard`,
    `recompute` segments as fractions of the model's calls, `head` such a fraction of where heads can begin and a number
    of parts, `ooms` the numbers of the forward passes, backward passes
    and updates that run out of memory.
    """

    build: Callable
    train: Callable
    arrays: Callable
    precision: str
    batch: int
    random: bool = False
    guard: dict = dataclasses.field(default_factory=dict)
    recompute: tuple = ()
    head: tuple = ()
    lean: bool = False
    ooms: dict = dataclasses.field(default_factory=dict)
    faults: Any = None


class Log:
    """What a training showed on its way, in order, and what each fit said of its exactness."""

    def __init__(self):
        self.found, self.words = {}, []

    def __call__(self, name, value):
        self.found[f"{len(self.found)} {name}"] = value

    def fit(self, history):
        self("epochs", history.epoch)
        for name, values in history.history.items():
            self(f"history of {name}", values)
        if hasattr(history, "run"):
            self.words.append(history.run)

    def state(self, model):
        """All variables. Their order is that of the model; their paths say which is meant."""
        for variable in [*model.variables, *model.metrics_variables]:
            self(f"variable {variable.path}", ops.convert_to_numpy(variable))
        if model.optimizer is not None:
            for variable in model.optimizer.variables:
                self(f"optimizer {variable.name}", ops.convert_to_numpy(variable))


def outcome(case):
    """{"status": …, "details": […], "said": …}.

    The status is "same", "not compared" (where the guard said so), "invalid" (Keras cannot build it), "both raised",
    "plain failed" (and the guarded training did not), "refused", "recovery failed", or one of the failures:
    "different", "raised", "did not raise", "did not refuse".
    """
    set_precision(case.precision)
    arrays, error = attempt(case.arrays)
    if error is not None:
        return result("invalid", [said_by(error)])
    plain, error = attempt(lambda: trained(case, arrays))
    guarded, guarded_error = attempt(lambda: trained(case, arrays, guarded=True))
    if error is not None:
        if guarded_error is None and not isinstance(error, ValueError):
            # Not what Keras refuses: what it fails at, as on JAX with moving averages of weights.
            return result("plain failed", [f"plain Keras raised {said_by(error)}"])
        if guarded_error is None:
            return result("did not raise", [f"plain Keras raised {said_by(error)}"])
        return result("both raised", [said_by(error), said_by(guarded_error)])
    if guarded_error is not None:
        return result(status_of(guarded_error, case), [said_by(guarded_error)])
    said = exactness(case, guarded)
    details = compared(case, arrays, plain.found, guarded.found, numbers_too=said == "exact")
    if details:
        return result("different", details, said)
    if said.startswith("not exact"):
        strict = dataclasses.replace(case, guard={**case.guard, "allow": "exact"})
        _, error = attempt(lambda: trained(strict, arrays, guarded=True))
        if not isinstance(error, oomproof.OomproofError):
            told = "it trained" if error is None else said_by(error)
            return result("did not refuse", [f'allow="exact" on a training that is {said}: {told}'], said)
    return result("same" if said == "exact" else "not compared", [], said)


def report(found):
    print(f"{found['status']} {found['said']}".strip())
    print("\n".join(f"  {line}" for line in found["details"]))


def result(status, details, said=""):
    return {"status": status, "details": details[:20], "said": said}


def attempt(function):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(), None
    except Exception as error:
        return None, error


def said_by(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def status_of(error, case):
    if isinstance(error, oomproof.RecoveryFailedError) and case.ooms:
        return "recovery failed"
    expected = oomproof.UnsupportedModelError, oomproof.CannotFitError, oomproof.BackendError
    return "refused" if isinstance(error, expected) else "raised"


def exactness(case, log):
    """What the guard said of all fits together, in one of its three words."""
    words = [str(getattr(run, "exactness", None) or word_of(case, run)) for run in log.words]
    worst = [word for word in words if word.startswith("not exact")] + [word for word in words if word != "exact"]
    return worst[0] if worst else "exact"


def word_of(case, run):
    if run.plan.caveats:
        return f"not exact: {'; '.join(run.plan.caveats)}"
    cut = run.plan.micro_batch_size is not None or case.ooms
    return "exact but for random numbers" if case.random and cut else "exact"


# Training


def trained(case, arrays, guarded=False, disturbed=False):
    """Trains a fresh model and returns its Log. Every call starts from the same weights and seeds."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    if case.faults is not None:
        case.faults.schedule = {}
    model = case.build()
    if disturbed:
        disturb(model, ROUNDING[case.precision])
    log = Log()
    keras.utils.set_random_seed(8)
    if guarded:
        head, recompute = head_of(model, case.head), segments(model, case.recompute)
        if head:
            recompute = before(model, head["head"], recompute)
        plan = oomproof.Plan(recompute=recompute, lean_commit=case.lean, **head)
        options = {"plan": plan} if case.recompute or case.lean or head else {}
        oomproof.guard(model, **{"verbose": 0, **options, **case.guard})
        if case.ooms:
            case.faults.start(case.ooms)
    try:
        case.train(model, arrays, log)
    finally:
        if case.faults is not None:
            case.faults.start({})
    log.state(model)
    if any(np.asarray(value).dtype.kind == "f" and not np.all(np.isfinite(value)) for value in leaves(log)):
        log("finite", 0)
    return log


def leaves(log):
    return keras.tree.flatten(log.found)


def disturb(model, size):
    """Moves each weight by about what rounding would."""
    rng = np.random.default_rng(3)
    moved = [w * (1 + size * rng.choice([-1, 1], w.shape)) if w.dtype.kind == "f" else w for w in model.get_weights()]
    model.set_weights(moved)


def reordered(arrays, batch):
    """The same batches with the samples of each in another order."""
    samples = len(keras.tree.flatten(arrays)[0])
    rng = np.random.default_rng(4)
    order = [s + rng.permutation(min(batch, samples - s)) for s in range(0, samples, batch)]
    return keras.tree.map_structure(lambda a: a[np.concatenate(order)], arrays)


def head_of(model, chosen):
    """Arguments of a plan: the head that begins at this fraction of the calls that one can begin with, in parts."""
    from oomproof._backends.common.head import heads

    found = heads(model) if model.built and chosen else ()
    return {"head": found[int(chosen[0] * len(found))], "head_parts": chosen[1]} if found else {}


def before(model, head, recompute):
    """Segments that end before the head."""
    from oomproof._backends.common.head import check_head

    def fits(segment):
        try:
            check_head(model, (head, 2), (segment,))
        except ValueError:
            return False
        return True

    return tuple(filter(fits, recompute))


def segments(model, fractions):
    """Labels of segments that begin and end at these fractions of the model's calls."""
    from oomproof._backends.common.segments import labels

    found = labels(model) if model.built else ()
    chosen, free = [], 0
    for begin, end in fractions:
        first, last = max(free, int(begin * len(found))), min(int(end * len(found)), len(found) - 1)
        # Labels of a nested model's calls and of those around it do not make one segment.
        while last > first and found[last].rpartition("/")[0] != found[first].rpartition("/")[0]:
            last -= 1
        if first < len(found) and first <= last:
            chosen.append(found[first] if first == last else f"{found[first]}..{found[last]}")
            free = last + 1
    return tuple(chosen)


# Comparing


def compared(case, arrays, expected, received, numbers_too):
    """What differs, in words: names and shapes always, numbers where they are to be the same."""
    if not numbers_too:
        expected, received = ({n: v for n, v in log.items() if "finite" not in n} for log in (expected, received))
    if list(expected) != list(received):
        missing = [name for name in expected if name not in received]
        return [
            f"not there under the guard: {missing[:6]}; only there: {[n for n in received if n not in expected][:6]}"
        ]
    expected, received = flat(expected), flat(received)
    if list(expected) != list(received):
        return [f"keys differ: {sorted(set(expected) ^ set(received))[:6]}"]
    shapes = [
        f"{name}: {value.shape} became {received[name].shape}"
        for name, value in expected.items()
        if value.shape != received[name].shape
    ]
    if shapes or not numbers_too:
        return shapes or counts_that_differ(expected, received)
    if any(name.endswith("finite") for name in expected):
        return []
    far = {n: d for n in expected if (d := distance(expected[n], received[n])) > TOLERANCE[case.precision]}
    if not far:
        return []
    rounding = measured_rounding(case, arrays, expected)
    return [f"{n}: {d:.1e} apart (rounding {rounding[n]:.1e})" for n, d in far.items() if d > MARGIN * rounding[n]]


def flat(found):
    """{name: array} of what a Log holds, dicts and lists taken apart."""
    paths = keras.tree.flatten_with_path(found)
    return {" ".join(map(str, path)): np.asarray(value) for path, value in paths if value is not None}


def counts_that_differ(expected, received):
    """Steps and samples are the same whatever random numbers were drawn."""
    counted = [n for n in expected if n.endswith(("iteration", "count")) or "epochs" in n]
    return [f"{n}: {expected[n]} became {received[n]}" for n in counted if not np.allclose(expected[n], received[n])]


def distance(a, b):
    if a.dtype.kind not in "fiub" or not a.size:
        return 0.0 if np.array_equal(a, b) else np.inf
    a, b = a.astype("float64"), b.astype("float64")
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return np.inf
    apart = np.nan_to_num(np.abs(a - b))
    return float(np.max(apart) / max(np.max(np.abs(np.nan_to_num(a))), 1e-3))


def measured_rounding(case, arrays, expected):
    """By name, how far plain Keras is from itself when rounding falls out otherwise.

    Samples in another order inside of their batches, and weights that start one rounding away.
    """
    runs = [attempt(lambda: trained(case, arrays, disturbed=True))[0]]
    if not case.random:
        runs.append(attempt(lambda: trained(case, reordered(arrays, case.batch)))[0])
    found = dict.fromkeys(expected, 0.0)
    for run in runs:
        others = {} if run is None else flat(run.found)
        for name, value in expected.items():
            if name in others and others[name].shape == value.shape and "predict" not in name:
                found[name] = max(found[name], distance(value, others[name]))
    # Predictions come in another order too; they round no worse than the weights they are made from.
    worst = max((d for name, d in found.items() if "variable" in name), default=0.0)
    return {name: worst if "predict" in name else d for name, d in found.items()}


# Precision


def set_precision(name):
    """Makes Keras compute in this precision throughout, as the float64 fixture of tests/backends does."""
    from keras.src.backend.common import dtypes

    double = name == "float64"
    keras.config.set_floatx("float64" if double else "float32")
    keras.config.set_dtype_policy(name)
    # Off TensorFlow, Keras turns what it promotes to double precision into single.
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64" if double or BACKEND == "tensorflow" else "float32"
    if BACKEND == "jax":
        import jax

        jax.config.update("jax_enable_x64", double)
    if BACKEND == "torch":
        keep_sample_weights()


def keep_sample_weights():
    """Keras masks sample weights in place on torch, so plain metrics see other weights than it was given."""
    from keras.src.losses import loss

    if not hasattr(loss.apply_mask, "kept"):
        original = loss.apply_mask

        def apply_mask(sample_weight, *rest, **options):
            return original(None if sample_weight is None else ops.copy(sample_weight), *rest, **options)

        apply_mask.kept = True
        loss.apply_mask = apply_mask
