"""A target's weights under canonical paths, whatever file they come from.

Canonical paths are the flattened parameter paths of `spd_jax.models.decoder.Decoder`, in its layout: `embedding`
[V, D], `layers.0.attention.qkv.weight` [(N + 2 K) H, D] with rows grouped by key-value head,
`layers.0.mlp.gate_up.weight` [2 F, D] gate first, `head` [V, D] unless tied. Nothing here knows of devices,
meshes or stages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from spd_jax.config.model import ModelConfig, facts
from spd_jax.models.family import HUGGING_FACE, Recipe, TensorSource
from spd_jax.weights.errors import WeightsError, listed

# Integers, and 8 bits and less of float without the scales that would make numbers of them.
_NOT_NUMBERS = re.compile(r"[IU]\d+|BOOL|F[468]_.*")


@runtime_checkable
class TargetWeights(Protocol):
    """The weights of a target model, one tensor at a time.

    `tensor` returns one parameter on the host in its stored dtype (ml_dtypes.bfloat16 possible), in the layout above;
    it refuses NaN and infinity. `origin` is for messages.
    """

    config: ModelConfig
    origin: str

    def paths(self) -> list[str]:
        """Every canonical path, in the order of the forward pass."""
        ...

    def tensor(self, path: str) -> np.ndarray:
        """One parameter."""
        ...


class CheckpointWeights:
    """`TargetWeights` of a file: the family's recipes applied to the file's tensors.

    The whole table is checked at once, from shapes and dtypes alone.

    Raises:
        WeightsError: tensors are missing, unexpected or of the wrong shape or dtype; all of them are named.
    """

    def __init__(self, config: ModelConfig, source: TensorSource, recipes: Mapping[str, Recipe], *, ignored: str):
        self.config = config
        self.origin = source.origin
        self._source = source
        self._recipes = {path: recipe.suiting(source.shapes) for path, recipe in recipes.items()}
        problems = table_problems(source, self._recipes, ignored=ignored, tied=config.tie_embeddings)
        if problems:
            raise WeightsError(f"{self.origin}: {len(problems)} problem(s):\n  " + listed(problems, "\n  "))

    def paths(self) -> list[str]:
        """Every canonical path, in the order of the forward pass."""
        return list(self._recipes)

    def tensor(self, path: str) -> np.ndarray:
        """One parameter on the host, in the layout of `Decoder`.

        Raises:
            WeightsError: it holds NaN or infinity.
        """
        recipe = self._recipes[path]
        parts = []
        for part in recipe.parts:
            value = self._source.read(part.key)
            refuse_non_finite(value, f"{self.origin}: tensor {part.key}")
            parts.append(part.prepared(value))
        return recipe.combine(parts)


def settle_head(config: ModelConfig, source: TensorSource) -> ModelConfig:
    """The config of a Hugging Face checkpoint whose file may hold a head though the config ties it to the embedding.

    An equal head is one that was stored twice. Another one is used, with a warning, as transformers does since 5.0: the
    config is wrong about its file.
    """
    head, embedding = (f"{name}.weight" for name in (HUGGING_FACE.head, HUGGING_FACE.embedding))
    if not config.tie_embeddings or head not in source.shapes or embedding not in source.shapes:
        return config
    if source.shapes[head] == source.shapes[embedding] and np.array_equal(source.read(head), source.read(embedding)):
        return config
    warnings.warn(
        f"{source.origin}: the config ties the head to the embedding, but the file holds another {head}, which is "
        "used, as transformers does (set tie_word_embeddings to false to say so)",
        stacklevel=3,
    )
    return dataclasses.replace(config, tie_embeddings=False)


def table_problems(source: TensorSource, recipes: Mapping[str, Recipe], *, ignored: str, tied: bool) -> list[str]:
    """What does not fit between a file and the table of its family; reads no data."""
    problems, used, head = [], set(), f"{HUGGING_FACE.head}.weight"
    for recipe in recipes.values():
        for part in recipe.parts:
            used.add(part.key)
            if part.key not in source.shapes:
                why = " (the config unties the head: tie_word_embeddings)" if part.key == head else ""
                problems.append(f"missing {part.key} {list(part.shape)}{why}")
                continue
            shape, dtype = source.shapes[part.key], source.dtypes[part.key]
            if shape != part.shape:
                problems.append(f"{part.key} has shape {list(shape)}, expected {list(part.shape)}")
            if _NOT_NUMBERS.fullmatch(dtype):
                problems.append(f"{part.key} has dtype {dtype}, expected a floating point type of 16 bits or more")
    skip = re.compile(ignored)
    for key in source.shapes:
        of_tied_head = tied and key == head
        if key not in used and not of_tied_head and not skip.fullmatch(key):
            problems.append(f"unexpected {key} {list(source.shapes[key])}")
    return problems


def refuse_non_finite(value: np.ndarray, name: str) -> None:
    """Raise when a tensor holds NaN or infinity.

    Raises:
        WeightsError: naming the tensor, the number of such values and the place of the first.
    """
    bad = ~np.isfinite(value)
    if bad.any():
        first = [int(index) for index in np.argwhere(bad)[0]]
        raise WeightsError(f"{name} holds {int(bad.sum())} NaN or infinite value(s), the first at {first}")


def config_digest(weights: TargetWeights) -> str:
    """sha256 of the target's config: equal for equal configs, whatever file they come from."""
    text = json.dumps(facts(weights.config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class TensorMap(Mapping[str, np.ndarray]):
    """A target's tensors by canonical path, read when asked for."""

    def __init__(self, weights: TargetWeights):
        self._weights = weights

    def __getitem__(self, path: str) -> np.ndarray:
        return self._weights.tensor(path)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights.paths())

    def __len__(self) -> int:
        return len(self._weights.paths())
