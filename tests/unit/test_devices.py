"""The catalogue of cards: names as people write them, and what a framework can use."""

import pytest

from oomproof._machine import gpus

MIB = 2**20
# Of compute capability 6, 7, 8 and 9.
CARDS = ("p100-16gb", "t4", "rtx-3090", "h200")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("rtx-4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA H200", "h200"),
        ("p100", "p100-16gb"),
    ],
)
def test_names_as_people_write_them(written, name):
    assert gpus.find(written).name == name


def test_a_card_of_two_sizes_has_to_be_named_in_full():
    with pytest.raises(ValueError, match="a100-40gb, a100-80gb"):
        gpus.find("a100")


@pytest.mark.parametrize(("wrong", "near"), [("rtx-4009", "rtx-4090"), ("gtx 1070ti", "gtx-1070")])
def test_an_unknown_card_names_near_ones(wrong, near):
    with pytest.raises(ValueError, match=rf"no GPU.*{near}.*--memory"):
        gpus.find(wrong)


def test_nothing_near():
    with pytest.raises(ValueError, match=r"no GPU 'abacus' in the catalogue. `oomproof gpus`"):
        gpus.find("abacus")
    with pytest.raises(TypeError, match="gpu=4090"):
        gpus.find(4090)


def test_every_name_finds_itself():
    assert all(gpus.find(name) is gpu for name, gpu in gpus.CATALOGUE.items())


def test_what_frameworks_can_use(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    card = gpus.find("rtx-3090")
    assert card.usable("jax") == card.memory * 3 // 4
    # Kept back by TensorFlow, by compute capability, besides the context.
    kept = {name: gpus.find(name).memory - gpus.find(name).usable("tensorflow") for name in CARDS}
    assert [kept[name] - kept["p100-16gb"] for name in CARDS] == [0, 550 * MIB, 1036 * MIB, 1300 * MIB]
    assert 500 * MIB < kept["p100-16gb"] < 1000 * MIB
    assert card.usable("tensorflow") < card.usable("torch") < card.memory
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert card.usable("jax") == int(card.memory * 0.9)


def test_what_nvidia_smi_shows():
    card = gpus.find("t4")
    assert card.shown("torch", 100 * MIB) < 1000 * MIB
    # These take what they may use at once.
    assert card.shown("tensorflow", 100 * MIB) > card.usable("tensorflow")
    assert card.shown("jax", 100 * MIB) > card.usable("jax")


def test_a_card_by_its_memory():
    assert gpus.of_memory("24GiB").memory == 24 * 2**30
    assert str(gpus.of_memory(2**30)) == "a card (1.0 GiB)"
    with pytest.raises(ValueError, match="Units"):
        gpus.of_memory("24 bananas")
    with pytest.raises(ValueError, match="positive"):
        gpus.of_memory(0)
