"""Frozen pytree dataclasses: placeholders never meet `__init__`, static fields sit in the tree definition."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from spd_jax import struct


@struct.dataclass
class Picky:
    """Refuses anything but arrays when it is made."""

    x: Float[Array, " N"]
    y: Any
    name: str = struct.static(default="n")

    def __post_init__(self) -> None:
        if not hasattr(self.x, "shape"):
            raise TypeError(f"found {self.x!r}, expected an array")

    @property
    def total(self) -> Array:
        return jnp.sum(self.x) + jnp.sum(self.y)


@struct.dataclass
class Outer:
    """A struct in a struct, as state holds caches."""

    inner: Picky
    count: Array


def make(name: str = "n") -> Picky:
    return Picky(jnp.arange(3.0), jnp.ones((3, 2)), name)


def test_init_and_its_checks_run_when_a_value_is_made():
    with pytest.raises(TypeError, match="found 3, expected an array"):
        Picky(3, None)  # pyright: ignore[reportArgumentType]


def test_placeholders_do_not_meet_init():
    shapes = jax.tree.map(lambda leaf: leaf.shape, make(), is_leaf=lambda leaf: isinstance(leaf, Array))
    assert (shapes.x, shapes.y, shapes.name) == ((3,), (3, 2), "n")
    for placeholder in (None, object(), 1):
        assert jax.tree.map(lambda _, p=placeholder: p, make()).x is placeholder
    leaves, definition = jax.tree.flatten(make())
    assert jax.tree.unflatten(definition, [0] * len(leaves)).x == 0


def test_fields_come_back_in_order_and_static_ones_are_no_leaves():
    value = make("m")
    leaves, definition = jax.tree.flatten(value)
    assert [leaf.shape for leaf in leaves] == [(3,), (3, 2)]
    back = jax.tree.unflatten(definition, leaves)
    assert isinstance(back, Picky)
    assert back.name == "m"
    assert back.x is value.x


def test_static_fields_are_part_of_the_tree_definition():
    assert jax.tree.structure(make("a")) == jax.tree.structure(make("a"))
    assert jax.tree.structure(make("a")) != jax.tree.structure(make("b"))
    with pytest.raises(ValueError, match="metadata"):
        jax.tree.map(lambda a, b: a, make("a"), make("b"))


def test_a_new_static_value_compiles_anew_and_an_old_one_does_not():
    traced = []

    @jax.jit
    def double(value: Picky) -> Picky:
        traced.append(value.name)
        return jax.tree.map(lambda leaf: leaf * 2, value)

    for name in ("a", "b", "a"):
        assert double(make(name)).name == name
    assert traced == ["a", "b"]
    np.testing.assert_array_equal(double(make("a")).x, [0.0, 2.0, 4.0])


def test_eval_shape_and_vmap_and_grad_go_through():
    shapes = jax.eval_shape(make)
    assert isinstance(shapes, Picky)
    assert shapes.x.shape == (3,)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1]), make())
    np.testing.assert_array_equal(jax.vmap(lambda value: value.total)(stacked), [9.0, 18.0])
    gradient = jax.grad(lambda value: value.total)(make())
    assert isinstance(gradient, Picky)
    np.testing.assert_array_equal(gradient.y, np.ones((3, 2)))


def test_structs_carry_through_loops_and_nest():
    start = Outer(make(), jnp.int32(0))

    def step(value: Outer) -> Outer:
        inner = struct.replace(value.inner, x=value.inner.x + 1)
        return struct.replace(value, inner=inner, count=value.count + 1)

    end = jax.lax.while_loop(lambda value: value.count < 4, step, start)
    np.testing.assert_array_equal(end.inner.x, [4.0, 5.0, 6.0])
    assert len(jax.tree.leaves(start)) == 3


def test_paths_name_the_fields():
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(Outer(make(), jnp.int32(0)))]
    assert paths == [".inner.x", ".inner.y", ".count"]


def test_values_are_frozen_and_replace_makes_a_changed_copy():
    value = make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.name = "other"  # pyright: ignore[reportAttributeAccessIssue]
    changed = struct.replace(value, name="other")
    assert (changed.name, value.name) == ("other", "n")
    assert changed.x is value.x
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        struct.replace(value, z=1)
    with pytest.raises(TypeError, match="expected an array"):  # a replaced value is a new one: it is checked
        struct.replace(value, x=3)
