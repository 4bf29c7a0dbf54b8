"""Frozen dataclasses that are JAX pytrees.

`dataclass` registers a frozen dataclass as a pytree. Fields marked with `static()` go into the tree definition.
Unflattening uses `object.__new__`, so neither `__init__` nor run-time shape checks run on the placeholders that
`jax.tree.map`, `jax.eval_shape` and `jax.vmap` put into leaves.

This module knows nothing of shapes, devices or models.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(**kwargs: Any) -> Any:
    """A field that is part of the tree definition: it must be hashable, and a change of it recompiles."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def dataclass(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass and a pytree; see the module docstring."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    data = tuple(f.name for f in fields if not f.metadata.get("static", False))
    meta = tuple(f.name for f in fields if f.metadata.get("static", False))

    def flatten_with_keys(value: Any) -> tuple[Any, Any]:
        children = tuple((jax.tree_util.GetAttrKey(name), getattr(value, name)) for name in data)
        return children, tuple(getattr(value, name) for name in meta)

    def unflatten(aux: Any, children: Any) -> Any:
        value = object.__new__(cls)
        for name, child in zip(data, children, strict=True):
            object.__setattr__(value, name, child)
        for name, child in zip(meta, aux, strict=True):
            object.__setattr__(value, name, child)
        return value

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
    return cls


def replace(value: T, **changes: Any) -> T:
    """A copy of a struct with some fields changed."""
    return dataclasses.replace(value, **changes)  # pyright: ignore[reportArgumentType, reportCallIssue]
