"""Choice of a backend: explicit, or by device; logged once; never replaced in silence."""

import logging
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxserve.targets import get_target
from pallas_kernels.dispatch import Target, choose_backend, compiling_for, target_of

BACKENDS = {name: lambda name=name: name for name in ("reference", "triton", "mosaic")}


def gpu(capability: str) -> Any:
    return SimpleNamespace(platform="gpu", compute_capability=capability, core_count=7)


CPU: Any = SimpleNamespace(platform="cpu")
TPU: Any = SimpleNamespace(platform="tpu")


@pytest.mark.parametrize(
    ("device", "want"),
    [
        (CPU, "reference"),
        (TPU, "reference"),
        (gpu("7.5"), "reference"),
        (gpu("8.0"), "triton"),
        (gpu("8.9"), "triton"),
        (gpu("9.0"), "triton"),
        (gpu("10.0"), "triton"),
    ],
    ids=str,
)
def test_by_device(device, want):
    assert choose_backend("some", None, BACKENDS, device=device)() == want


def test_named_backend_wins_over_the_device():
    assert choose_backend("some", "reference", BACKENDS, device=gpu("9.0"))() == "reference"
    assert choose_backend("some", "triton", BACKENDS, device=gpu("9.0"))() == "triton"


def test_refused_call_goes_to_the_next():
    h200 = gpu("9.0")
    assert choose_backend("some", None, BACKENDS, device=h200, refusals={"triton": lambda: "odd shape"})() == "mosaic"
    both = {"mosaic": lambda: "odd shape", "triton": lambda: "odd too"}
    assert choose_backend("some", None, BACKENDS, device=h200, refusals=both)() == "reference"


def test_missing_backend_is_an_error():
    with pytest.raises(ValueError, match=r"fast.*mosaic.*reference.*triton"):
        choose_backend("some", "fast", BACKENDS)


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [("triton", CPU, "cpu"), ("triton", gpu("7.5"), r"8\.0.*7\.5"), ("mosaic", gpu("8.9"), r"9\.0.*8\.9")],
)
def test_named_backend_that_cannot_run_is_an_error(backend, device, message):
    with pytest.raises(NotImplementedError, match=message):
        choose_backend("some", backend, BACKENDS, device=device)


def test_named_backend_that_refuses_the_call_is_an_error():
    with pytest.raises(NotImplementedError, match="odd shape"):
        choose_backend("some", "triton", BACKENDS, device=gpu("9.0"), refusals={"triton": lambda: "odd shape"})


def test_choice_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="pallas_kernels.dispatch"):
        for _ in range(3):
            choose_backend("logged", "triton", BACKENDS, device=gpu("8.0"))
            choose_backend("logged", None, BACKENDS, device=gpu("9.0"), refusals={"triton": lambda: "odd shape"})
    assert [record.getMessage() for record in caplog.records] == [
        "kernel logged: backend triton (asked for)",
        "kernel logged: backend mosaic (chosen for gpu; not triton: odd shape)",
    ]


@pytest.mark.parametrize("name", ["a100", "l4", "b200"])
def test_topology_device_is_a_target(name):
    card = get_target(name)
    assert target_of(card.mesh().devices.flat[0]) == Target("gpu", card.compute_capability, card.num_sms)


def test_a_program_for_another_device():
    with compiling_for(gpu("8.9")):
        assert target_of() == target_of(gpu("8.9"))
        assert target_of(gpu("8.0")) == target_of(gpu("8.0"))  # named: taken
    assert target_of() == Target(jax.devices()[0].platform)


def test_default_device():
    assert target_of() == Target(jax.devices()[0].platform)
