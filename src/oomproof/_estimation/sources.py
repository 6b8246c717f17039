"""Models by name: a Keras file, a function of the user's, or one of keras.applications."""

from __future__ import annotations

import pathlib
import warnings
import zipfile
from typing import Any

import keras

from oomproof._estimation import naming

_FILES = (".keras", ".h5", ".hdf5")
_ZOO = "keras.applications."


def load(
    source: str,
    *,
    input_shape: tuple[int, ...] | None = None,
    classes: int | None = None,
    optimizer: str | None = None,
    precision: str | None = None,
) -> tuple[Any, tuple[str, ...]]:
    """The model, compiled, and what had to be assumed for that.

    Args:
        source: `"model.keras"`, `"train:build_model"` or `"keras.applications.ResNet50"`.
        input_shape: The shape of an image, for keras.applications.
        classes: The number of classes, for keras.applications.
        optimizer: What a model is compiled with that is not compiled; Adam where nothing is said.
        precision: The dtype policy to build with.

    Raises:
        ValueError: With what is wrong, in words.
    """
    if classes is not None and not source.startswith(_ZOO):
        raise ValueError(f"Expected --classes only for a model of keras.applications. Received: {source!r}")
    usual = keras.config.dtype_policy()
    try:
        if precision is not None:
            _set_policy(precision)
        if source.startswith(_ZOO):
            model = _from_zoo(source.removeprefix(_ZOO), input_shape, classes)
        elif source.endswith(_FILES) or pathlib.Path(source).exists():
            model = _from_file(pathlib.Path(source))
        elif ":" in source:
            model = _from_function(source)
        else:
            raise ValueError(
                f"Expected a Keras file (model.keras), a function (module:function) or a model of keras.applications "
                f"(keras.applications.ResNet50). Received: {source!r}, and there is no such file."
            )
    finally:
        keras.config.set_dtype_policy(usual)
    return model, _compiled(model, source, optimizer)


def _set_policy(precision: str) -> None:
    try:
        keras.config.set_dtype_policy(precision)
    except ValueError as error:
        raise ValueError(
            f'Expected a dtype policy such as "mixed_bfloat16" or "mixed_float16". Received: {precision!r}'
        ) from error


def _compiled(model: Any, source: str, optimizer: str | None) -> tuple[str, ...]:
    if model.compiled:
        if optimizer is not None:
            raise ValueError(
                f"{source} is compiled, with {type(model.optimizer).__name__}: --optimizer is for models that are not. "
                "Compile it with the other one where it is built."
            )
        return ()
    try:
        chosen = keras.optimizers.get(optimizer or "adam")
    except ValueError as error:
        raise ValueError(f'Expected an optimizer of Keras, such as "adam" or "sgd". Received: {optimizer!r}') from error
    outputs = getattr(model, "outputs", None) or [None]
    loss = "categorical_crossentropy" if len(outputs) == 1 and _classifies(model) else "mean_squared_error"
    model.compile(optimizer=chosen, loss=loss)
    return (f"the model is not compiled: {type(chosen).__name__} and {loss} were assumed",)


def _classifies(model: Any) -> bool:
    activation = getattr(model.layers[-1], "activation", None) if model.layers else None
    return getattr(activation, "__name__", "") == "softmax"


def _from_file(path: pathlib.Path) -> Any:
    if path.is_dir():
        raise ValueError(f"Expected a file. Received: {str(path)!r}, which is a folder.")
    if not path.is_file():
        raise ValueError(f"There is no file {str(path)!r}.")
    if path.suffix == ".keras" and not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not a Keras model: a .keras file is a zip archive, and this is not one.")
    try:
        with warnings.catch_warnings():
            # Keras says that an optimizer without slots has none, which does not matter here.
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            return keras.models.load_model(path, safe_mode=True)
    except Exception as error:
        text = naming.first_line(error)
        if "safe_mode" in str(error) or "unsafe" in str(error).lower():
            raise ValueError(
                f"{path} holds Python code (a Lambda layer) that would run when it is loaded, so it was not loaded. If "
                "you trust it, build the model in a function of yours and name that: module:function."
            ) from error
        raise ValueError(
            f"{path} could not be loaded as a Keras model: {text} (If it has layers of your own, build it in a "
            "function and name that: module:function.)"
        ) from error


def _from_zoo(name: str, input_shape: tuple[int, ...] | None, classes: int | None) -> Any:
    known = [each for each in dir(keras.applications) if each[:1].isupper()]
    if name not in known:
        raise ValueError(f"keras.applications has no {name!r}. It has: {', '.join(known)}.")
    options: dict[str, Any] = {"weights": None}
    options |= {} if input_shape is None else {"input_shape": input_shape}
    options |= {} if classes is None else {"classes": classes}
    try:
        return getattr(keras.applications, name)(**options)
    except ValueError as error:
        raise ValueError(f"keras.applications.{name} could not be built: {naming.first_line(error)}") from error


def _from_function(source: str) -> Any:
    model = naming.called(source)
    if not isinstance(model, keras.Model):
        raise ValueError(f"Expected {source} to return a keras.Model. Received: {type(model).__name__}")
    return model
