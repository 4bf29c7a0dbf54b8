"""What JAX lets a process set, held to fixed values wherever this library computes.

A process may choose another random number generator (`jax_default_prng_impl`), 64-bit types, another precision of
products, stricter promotion, checks for NaN, or no compilation at all, for its own code or for speed. Results of this
library hang on none of it: its programs are compiled by `jit`, which fixes what decides about a program, and its random
numbers come from `key` and `bits`, threefry2x32 whatever the process prefers.

Products of float32 numbers are float32 products (JAX would take bfloat16 on TPUs and TF32 on GPUs); those of bfloat16
numbers stay what they are. This module knows no arrays and no devices, and sets nothing for the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

GENERATOR = "threefry2x32"


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """The settings that this library traces, compiles and calls programs with (20 us to enter)."""
    with (
        jax.enable_x64(False),
        jax.default_matmul_precision("highest"),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("allow"),
        jax.allow_f16_reductions(True),
        jax.disable_jit(False),
        jax.debug_nans(False),  # what is not finite is found by the programs themselves, and -inf is no fault
        jax.debug_infs(False),
    ):
        yield


class Jitted:
    """A function that is compiled and called with `pinned` settings; see `jit`."""

    def __init__(self, function: Callable[..., Any], **options: Any):
        self._jitted: Any = jax.jit(function, **options)

    def __call__(self, *args: Any) -> Any:
        with pinned():
            return self._jitted(*args)

    def trace(self, *args: Any) -> Any:
        """As `trace` of a jitted function."""
        with pinned():
            return self._jitted.trace(*args)

    def lower(self, *args: Any) -> Any:
        """As `lower` of a jitted function."""
        with pinned():
            return self._jitted.lower(*args)

    def count(self) -> int:
        """Programs compiled so far."""
        return self._jitted._cache_size()


def jit(function: Callable[..., Any], **options: Any) -> Jitted:
    """`jax.jit` whose programs hang on no setting of the process; options as there, arguments by position only."""
    return Jitted(function, **options)


def key(seed: UInt32[Array, "*shape"]) -> Array:
    """The key that `jax.random.key` makes of a seed with JAX's own defaults; one for each seed."""
    return jax.random.wrap_key_data(jnp.stack([jnp.zeros_like(seed), seed], axis=-1), impl=GENERATOR)


def bits(key: Array) -> UInt32[Array, ""]:
    """32 random bits: those of `jax.random.bits` with JAX's own defaults.

    What JAX makes of a key depends on `jax_threefry_partitionable`; folding a number into it does not.
    """
    both = jax.random.key_data(jax.random.fold_in(key, jnp.uint32(0)))
    return both[0] ^ both[1]


def uniform(key: Array) -> Float[Array, ""]:
    """A float32 number in [0, 1) out of 23 random bits."""
    one = jnp.float32(1.0)
    mantissa = bits(key) >> jnp.uint32(9)
    return jax.lax.bitcast_convert_type(mantissa | jax.lax.bitcast_convert_type(one, jnp.uint32), jnp.float32) - one


def gumbel(key: Array) -> Float[Array, ""]:
    """A standard Gumbel number in float32."""
    return -jnp.log(-jnp.log(jnp.maximum(uniform(key), jnp.finfo(jnp.float32).tiny)))


def fold(key: Array, number: Int[Array, ""] | int) -> Array:
    """A key of its own for a number below 2^31."""
    return jax.random.fold_in(key, jnp.asarray(number, jnp.uint32))
