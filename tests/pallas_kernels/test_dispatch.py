"""Choice of a backend: explicit, or by platform; logged once; never replaced in silence."""

import logging

import pytest

from pallas_kernels.dispatch import choose_backend

BACKENDS = {"reference": lambda: "reference", "triton": lambda: "triton"}


@pytest.mark.parametrize(("platform", "want"), [("cpu", "reference"), ("gpu", "triton"), ("tpu", "reference")])
def test_by_platform(platform, want):
    assert choose_backend("some", None, BACKENDS, platform=platform)() == want


def test_named_backend_wins_over_the_platform():
    assert choose_backend("some", "reference", BACKENDS, platform="gpu")() == "reference"


def test_missing_backend_is_an_error():
    with pytest.raises(ValueError, match=r"mosaic.*reference.*triton"):
        choose_backend("some", "mosaic", BACKENDS)


def test_choice_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="pallas_kernels.dispatch"):
        for _ in range(3):
            choose_backend("logged", "triton", BACKENDS)
    assert [record.getMessage() for record in caplog.records] == ["kernel logged: backend triton (asked for)"]
