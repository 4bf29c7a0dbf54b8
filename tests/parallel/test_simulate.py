"""Asking for simulated devices."""

import jax
import pytest

from spd_jax.parallel.platform import simulate_devices


def test_asking_after_jax_has_started_says_so() -> None:
    """Q01: JAX ignores the wish then; it must not pass silently."""
    count = len(jax.devices())
    with pytest.raises(RuntimeError, match=f"JAX had started with {count}: ask before"):
        simulate_devices(count + 1)
    assert len(jax.devices()) == count


def test_asking_again_for_what_is_there_is_no_error() -> None:
    simulate_devices(len(jax.devices()))
