"""`oomproof estimate` and `oomproof max-batch-size` on the command line."""

import json
import sys
import textwrap

import keras
import pytest
from estimated import FIELDS, conv_net, wide_net
from here import BACKEND, at_length
from keras import layers

from oomproof._cli import main as cli

# The command line


def called(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["oomproof", *map(str, arguments)])
    try:
        cli.main()
        code = 0
    except SystemExit as left:
        code = left.code or 0
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return lambda *arguments: called(capsys, monkeypatch, *arguments)


def test_a_file(call, tmp_path):
    conv_net().save(tmp_path / "model.keras")
    code, out, _ = call(
        "estimate", "model.keras", "--batch-size", "64", "--gpu", "rtx-4090", "--engine", "trace", "--json"
    )
    answer = json.loads(out)
    assert code == 0
    assert all(field in answer for field in FIELDS)
    assert answer["fits"] is True
    assert call("estimate", "model.keras", "--batch-size", "4096", "--memory", "600MiB", "--engine", "trace")[0] == 3


def test_the_precision_of_a_file(call, tmp_path):
    conv_net().save(tmp_path / "model.keras")
    arguments = ("estimate", "model.keras", "--batch-size", "256", "--engine", "trace", "--json")
    full, mixed = (
        json.loads(call(*arguments, *more)[1])["expected"] for more in ((), ("--precision", "mixed_bfloat16"))
    )
    assert mixed < 0.8 * full


def test_a_file_that_says_it_is_not_compiled(call, tmp_path):
    conv_net(jit_compile=False).save(tmp_path / "model.keras")
    _, out, _ = call("estimate", "model.keras", "--batch-size", "4", "--engine", "trace")
    assert ("jit_compile=False" in out) == (BACKEND in ("jax", "tensorflow"))
    _, out, _ = call("estimate", "model.keras", "--batch-size", "4", "--engine", "trace", "--jit")
    assert "jit_compile=False" not in out


def test_no_traceback_for_a_model_that_fails(call, tmp_path):
    (tmp_path / "my_failing.py").write_text(
        textwrap.dedent("""
        import keras

        def build_model():
            model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4)], name="small")
            model.compile("sgd", lambda y, p: keras.ops.matmul(y, keras.ops.ones((77, 5))))
            return model
        """)
    )
    code, _, err = call("estimate", "my_failing:build_model", "--batch-size", "4", "--engine", "trace")
    assert code == 2
    assert "A step of small was tried with x (4, 16) float32" in " ".join(err.split())


def test_a_function_and_several_sizes(call, tmp_path):
    (tmp_path / "my_training.py").write_text(
        textwrap.dedent("""
        import keras

        def build_model():
            model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4)])
            model.compile("sgd", "mse")
            return model

        def broken():
            raise RuntimeError("no data here")

        def number():
            return 7
        """)
    )
    code, out, _ = call("estimate", "my_training:build_model", "--batch-size", "64,128", "--engine", "trace", "--json")
    small, large = json.loads(out)
    assert code == 0
    assert (small["batch_size"], large["batch_size"]) == (64, 128)
    assert small["expected"] < large["expected"]
    for name, message in {
        "broken": "no data here",
        "number": "keras.Model",
        "missing": "has no function 'missing'",
    }.items():
        code, _, err = call("estimate", f"my_training:{name}", "--batch-size", "4")
        assert code == 2
        assert message in err


@at_length("tensorflow")
def test_a_model_of_keras_applications(call):
    arguments = ("--input-shape", "32,32,3", "--classes", "10", "--engine", "trace")
    code, out, _ = call("estimate", "keras.applications.MobileNetV2", "--batch-size", "8", *arguments)
    assert code == 0
    assert "assumed" in out


@at_length("tensorflow")
def test_bad_input_on_the_command_line(call, tmp_path):
    (tmp_path / "broken.keras").write_bytes(b"not a zip")
    (tmp_path / "notes.txt").write_text("hello")
    lambda_model = keras.Sequential([keras.Input((4,)), layers.Lambda(lambda x: x * 2)])
    lambda_model.save(tmp_path / "code.keras")
    conv_net().save(tmp_path / "model.keras")
    for arguments, message in [
        (("broken.keras",), "is not a Keras model"),
        (("notes.txt",), "could not be loaded"),
        (("nowhere.keras",), "There is no file"),
        (("code.keras",), "holds Python code"),
        (("something",), "Expected a Keras file"),
        (("nomodule:build",), "no module 'nomodule'"),
        (("keras.applications.Resnet5",), "has no 'Resnet5'"),
        (("model.keras", "--gpu", "rtx-4009"), "Near matches: rtx-4090"),
        (("model.keras", "--input-shape", "3"), "does not agree"),
        (("model.keras", "--input-shape", "a,b"), "Expected a shape"),
        (("model.keras", "--precision", "float7"), "dtype policy"),
        (("model.keras", "--backend", "numpy"), "Expected a backend"),
        (("model.keras", "--memory", "much"), "memory='much'"),
        (("model.keras", "--optimizer", "sgd"), "compiled, with Adam"),
        (("model.keras", "--classes", "10"), "--classes only for"),
        ((".",), "which is a folder"),
        (("my_training:",), "module:function"),
    ]:
        code, _, err = call("estimate", *arguments, "--batch-size", "4")
        assert (code, message in " ".join(err.split())) == (2, True), (arguments, err)
    for size in ("0", "-3", "many", "4,0"):
        code, _, err = call("estimate", "model.keras", f"--batch-size={size}")
        assert code == 2
        assert "at least 1" in err


@at_length("tensorflow")
def test_the_largest_batch_on_the_command_line(call, tmp_path):
    wide_net("sgd").save(tmp_path / "model.keras")
    code, out, _ = call("max-batch-size", "model.keras", "--memory", "3GiB", "--engine", "trace")
    assert code == 0
    assert int(out) > 1000
