"""The model of memory requests that other tests feed with addresses."""

from __future__ import annotations

import random

import pytest

import memory_model as model


@pytest.mark.parametrize("units", [1, 2, 31, 32, 100])
def test_requests_fit_into_any_room(units: int) -> None:
    rng = random.Random(units)
    for _ in range(100):
        offsets = [at for at in model.request(rng, 4, 4 * units) if at is not None]
        assert all(0 <= at <= 4 * (units - 1) for at in offsets)
