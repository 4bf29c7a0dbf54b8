"""Results hang on no setting of JAX: each is changed, then all at once in a process that starts so."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax import defaults
from spd_jax.decode.options import Options
from spd_jax.decode.sampling import Sampling, gumbel, log_probs, row_keys
from tests.decode.test_sampled_text import SMALL, autoregressive, decoder
from tests.training.passes import LENGTH, ROWS, programs, random_ids, trainee, whole_rows

# Name and a value that is not JAX's own.
RANDOM: dict[str, Any] = {
    "jax_default_prng_impl": "unsafe_rbg",
    "jax_random_seed_offset": 3,
    "jax_threefry_partitionable": False,
    "jax_high_dynamic_range_gumbel": True,
}
OTHERS: dict[str, Any] = {
    "jax_enable_x64": True,
    "jax_default_matmul_precision": "BF16_BF16_F32",
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "raise",
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_disable_jit": True,
}
CHANGED = RANDOM | OTHERS
PROMPTS = [[1, 4], [5, 2, 6]]
OPTIONS = Options(12, Sampling(1.0), seed=3, eos_ids=(6,))


def texts() -> list[list[int]]:
    """Of both decoders, two sequences each."""
    made = decoder(3, "separate", SMALL), autoregressive()
    return [result.ids for one in made for result in one.generate(PROMPTS, OPTIONS).results]


def losses() -> list[float]:
    """Of two updates."""
    made = programs()
    state, found = made.start(trainee()), []
    for step in range(2):
        rows = whole_rows(random_ids(ROWS, LENGTH, seed=step), 3)
        state, values = made.update(state, made.gradient_step(made.zeros(state), state, rows))
        found.append(float(values["loss"]))
    return found


@contextlib.contextmanager
def changed(name: str, value: Any) -> Iterator[None]:
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    found = texts()
    assert len({len(text) for text in found[:2]}) == 2, "one sequence must end before its neighbour"
    return found


@pytest.mark.parametrize("name", OTHERS)
def test_a_setting_changes_no_text(name: str, expected: list[list[int]]):
    with changed(name, CHANGED[name]):
        assert texts() == expected


def test_a_process_that_starts_with_other_settings_gives_the_same(expected: list[list[int]]):
    """All at once: texts, and the losses of a training run, which is compiled there too."""
    code = (
        "import json, jax, tests.conftest, tests.test_defaults as test\n"
        "for name, value in test.CHANGED.items(): jax.config.update(name, value)\n"
        "print(json.dumps([test.texts(), test.losses()]))"
    )
    root = Path(__file__).parent.parent
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads(result.stdout) == [expected, losses()]


@pytest.mark.parametrize("name", [*RANDOM, "jax_enable_x64"])
def test_a_setting_changes_no_random_number(name: str):
    def numbers() -> np.ndarray:
        keys = row_keys(jnp.asarray([3, 2**32 - 1], jnp.uint32))
        return np.asarray(gumbel(keys, jnp.asarray([3, 4], jnp.int32), 0, jnp.arange(9, dtype=jnp.int32)))

    before = numbers()
    with changed(name, CHANGED[name]):
        np.testing.assert_array_equal(numbers(), before)


def test_random_numbers_are_those_of_jaxs_own_defaults():
    """So that settings of the past and the future mean the same texts."""
    seeds = np.asarray([0, 1, 7, 2**32 - 1], np.uint32)
    own, jaxs = defaults.key(jnp.asarray(seeds)), jax.vmap(jax.random.key)(seeds)
    np.testing.assert_array_equal(jax.random.key_data(own), jax.random.key_data(jaxs))
    numbers = jnp.arange(200, dtype=jnp.int32)
    keys = jax.vmap(defaults.fold, (None, 0))(own[2], numbers)
    np.testing.assert_array_equal(
        jax.random.key_data(keys), jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(jaxs[2], numbers))
    )
    for ours, theirs in (
        (defaults.bits, jax.random.bits),
        (defaults.uniform, jax.random.uniform),
        (defaults.gumbel, jax.random.gumbel),
    ):
        np.testing.assert_array_equal(jax.vmap(ours)(keys), jax.vmap(theirs)(keys))


def test_filters_need_no_compilation():
    """Eagerly and compiled they give the same, up to rounding."""
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 9)), jnp.float32)
    ids, sampling = jnp.arange(9, dtype=jnp.int32), Sampling(0.7, 5, 0.9)

    def filtered(logits: jax.Array) -> jax.Array:
        return log_probs(logits, ids, sampling.mode, sampling.numbers())[0]

    compiled = jax.jit(filtered)(logits)
    with jax.disable_jit():
        np.testing.assert_allclose(filtered(logits), compiled, rtol=1e-6)
