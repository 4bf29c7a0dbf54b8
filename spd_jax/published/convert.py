"""Heads of the published code, "version 11", as speculation modules, and back.

A published head is a `config` of plain values and a `state_dict`, in the names of the paper's own implementation
(arXiv 2605.30852, release of August 2026). Its draft layers are Qwen3's, with q_norm and k_norm, whatever dense model
the target is, and Qwen3.5's, with gated attention, for targets of that family; rotary embeddings and the final norm are
the target's and are not in the file.

Nothing is guessed: what is missing, unknown or does not fit is refused, all of it in one error. This module knows
neither `.pt` files (`torch_file` reads them) nor head folders; `published_config` says what a config means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from spd_jax.config.import_head import FinalAnchor
from spd_jax.config.model import LayerConfig, MlpConfig, ModelConfig
from spd_jax.models.family import HUGGING_FACE, Part, Recipe, dense_recipes, only_part
from spd_jax.models.shapes import Shape
from spd_jax.plan import StagePlan
from spd_jax.published.config import (
    DEFAULTS,
    MARK,
    REMEMBERED,
    key_problems,
    published_config,
    target_problems,
    unknown_keys,
    version_problem,
)
from spd_jax.speculation.checkpoint import named_tensors
from spd_jax.speculation.module import HeadConfig, SpeculationModule, draft_layer_config
from spd_jax.weights.errors import WeightsError, listed
from spd_jax.weights.mapping import refuse_non_finite, table_problems

LAYER_NAMES = dataclasses.replace(HUGGING_FACE, layer="spec_layers.{index}.")
_LAYER_ORDER = [
    *(LAYER_NAMES.q, LAYER_NAMES.k, LAYER_NAMES.v, LAYER_NAMES.output, LAYER_NAMES.q_norm, LAYER_NAMES.k_norm),
    *(LAYER_NAMES.gate, LAYER_NAMES.up, LAYER_NAMES.down, LAYER_NAMES.input_norm, LAYER_NAMES.mlp_norm),
]
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_DTYPES = (np.dtype(np.float32), _BFLOAT16, np.dtype(np.float16))

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class PublishedHead:
    """`config` and `state_dict` of a published head, the tensors as arrays; `origin` is for messages."""

    config: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]
    origin: str


@dataclasses.dataclass(frozen=True)
class ImportedHead:
    """A published head as a speculation module, the plan it was made for, and the config keys that exports need."""

    module: SpeculationModule
    plan: StagePlan
    remembered: Mapping[str, Any]


def from_published(
    published: PublishedHead, target: ModelConfig, *, final_anchor: FinalAnchor | None = None
) -> ImportedHead:
    """A published head for a target, bit by bit, with a plan of even stages and a rank of its own for the draft.

    Parameters stay bfloat16 where all are; otherwise they become float32, which holds each of them exactly.

    Args:
        final_anchor: how the hidden state with index L was taken in training; only asked for if it is an anchor.

    Raises:
        ValueError: everything that is wrong: another version; config keys missing, unknown or of a wrong type; another
            target; anchors or draft ids that cannot be; tensors missing, unexpected, misshaped or not finite.
    """
    config, origin = published.config, published.origin
    version = version_problem(config)
    if version is not None:
        _refuse(origin, [version])
    problems, unknown = key_problems(config), unknown_keys(config)
    if problems:
        _refuse(origin, problems + unknown)
    problems = unknown + target_problems(config, target, final_anchor)

    def made(make: Callable[[], T]) -> T | None:
        try:
            return make()
        except ValueError as error:
            problems.append(str(error))
            return None

    layer = published_layer(target, config.get(MARK, DEFAULTS[MARK]))
    length, stages = target.num_layers, config["num_stages"]
    num_layers, anchors = config["num_spec_layers"], tuple(config["aggr_feature_bound"])
    cut = (length // stages,) * stages if stages >= 1 and length % stages == 0 else (length,)
    plan = made(lambda: StagePlan(cut, num_layers, "separate", anchors))
    ids = config.get("draft_token_ids")
    draft_ids = None if ids is None else tuple(ids)
    head = made(lambda: HeadConfig(layer, num_layers, anchors, config["vocab_size"], draft_ids))
    recipes: dict[str, Recipe] = {}
    if num_layers > len(published.tensors):  # a number out of a file; no table of that length is made
        problems.append(f"num_spec_layers is {num_layers}, state_dict holds {len(published.tensors)} tensors in all")
    elif config["hidden_size"] == target.hidden_size:  # otherwise every shape would be a problem
        recipes = _recipes(target, layer, num_layers, len(anchors), config["draft_vocab_size"])
        problems += _tensor_problems(published, recipes, layer)
    if problems or plan is None or head is None:
        _refuse(origin, problems)
    used = {value.dtype for value in published.tensors.values()}
    dtype = _BFLOAT16 if used == {_BFLOAT16} else np.dtype(np.float32)
    values = {
        path: recipe.combine([part.prepared(published.tensors[part.key]) for part in recipe.parts]).astype(dtype)
        for path, recipe in recipes.items()
    }
    remembered = {key: config[key] for key in REMEMBERED if key in config}
    return ImportedHead(_module(head, values, dtype), plan, remembered)


def to_published(
    module: SpeculationModule,
    plan: StagePlan,
    target: ModelConfig,
    *,
    target_name: str,
    origin: str,
    remembered: Mapping[str, Any] | None = None,
    target_rows: np.ndarray | None = None,
) -> PublishedHead:
    """A head in the published format, which `from_published` reads back bit by bit; the layout is not written.

    Args:
        remembered: of an imported head; None for what the release writes by default, with `target_name`.
        target_rows: `[Vd, D]`, the target head's rows of the draft vocabulary, for a head that stores none of its own.

    Raises:
        ValueError: everything that the published code cannot do: unequal stages, draft layers other than those it
            builds, rotary embeddings other than the target's; and what `from_published` refuses.
    """
    head = module.config
    if remembered is None:
        remembered = DEFAULTS | {"base_model_path": target_name}
        if has_no_dense_size(target) and isinstance(head.layer.mlp, MlpConfig):
            remembered[MARK] = head.layer.mlp.intermediate_size
    layer = published_layer(target, remembered.get(MARK, DEFAULTS[MARK]))
    problems = [
        f"draft layers have {name} {found}, the published code builds them with {wanted} for this target"
        for name, found, wanted in _differences(head.layer, layer)
        if not name.startswith("mixer.rope.")
    ]
    if head.layer.attention.rope != layer.attention.rope:
        problems.append("rotary embeddings are the head's own; the published code always takes the target's")
    if len(set(plan.stage_layers)) > 1:
        problems.append(f"stages have {list(plan.stage_layers)} layers; the published code cuts evenly")
    values = {name: np.asarray(value) for name, value in named_tensors(module).items()}
    if head.lm_head == "target" and target_rows is None:
        problems.append("the head borrows the target's rows for its LM head, and they were not given")
    elif head.lm_head == "target" and target_rows is not None:
        values["lm_head"] = target_rows.astype(values["projections.0.weight"].dtype)
    if problems:
        _refuse(origin, problems)
    parts: dict[str, np.ndarray] = {}
    for path, recipe in _recipes(target, layer, head.num_layers, len(head.anchors), head.draft_vocab_size).items():
        pieces = _split(values[path], len(recipe.parts), layer)
        parts |= {part.key: np.ascontiguousarray(piece) for part, piece in zip(recipe.parts, pieces, strict=True)}
    tensors = {name: parts[name] for name in sorted(parts, key=_place)}
    published = PublishedHead(published_config(head, plan, remembered), tensors, origin)
    from_published(published, target, final_anchor="before_norm")  # what could not be read back is not written
    return published


def has_no_dense_size(target: ModelConfig) -> bool:
    """Whether nothing says how wide a dense MLP of this target would be."""
    return target.dense_size is None and not any(isinstance(layer.mlp, MlpConfig) for layer in target.layers)


def published_layer(target: ModelConfig, fallback_size: int = DEFAULTS[MARK]) -> LayerConfig:
    """The draft layer that the published code builds for a target: Qwen3's, with the target's sizes.

    `fallback_size` is the width of the MLP for targets that have no dense one.
    """
    layer = draft_layer_config(target).with_attention(qk_norm=True)
    assert isinstance(layer.mlp, MlpConfig)
    size = fallback_size if has_no_dense_size(target) else layer.mlp.intermediate_size
    return dataclasses.replace(layer, mlp=MlpConfig(size, layer.mlp.activation))


def _differences(found: Any, wanted: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Fields in which two configs differ, by their path, with both values."""
    for field in dataclasses.fields(found):
        name, one, other = prefix + field.name, getattr(found, field.name), getattr(wanted, field.name)
        if dataclasses.is_dataclass(one) and type(one) is type(other):
            yield from _differences(one, other, f"{name}.")
        elif one != other:
            yield name, one, other


def _refuse(origin: str, problems: Sequence[str]) -> NoReturn:
    lines = listed(list(dict.fromkeys(problems)), "\n  ")
    raise ValueError(f"{origin}: cannot be this target's head in the published format:\n  {lines}")


def _recipes(
    target: ModelConfig, layer: LayerConfig, num_layers: int, num_types: int, draft_vocab_size: int
) -> dict[str, Recipe]:
    """Path in `SpeculationModule` -> the published tensors that it is made of."""
    size = target.hidden_size
    model = dataclasses.replace(target, layers=(layer,) * max(num_layers, 1))
    recipes = {path: recipe for path, recipe in dense_recipes(model, LAYER_NAMES).items() if path.startswith("layers.")}
    whole = {f"projections.{i}.weight": (f"aggr_projs.{i}.weight", (size, (i + 1) * size)) for i in range(num_types)}
    whole["lm_head"] = ("lm_head.weight", (draft_vocab_size, size))
    return recipes | {path: Recipe(shape, (Part(key, shape),), only_part) for path, (key, shape) in whole.items()}


class _Source:
    """A published head as a `TensorSource`, so that what checks the weights of targets serves here too."""

    def __init__(self, published: PublishedHead):
        self._tensors, self.origin = published.tensors, published.origin
        self.shapes: Mapping[str, Shape] = {name: value.shape for name, value in published.tensors.items()}
        self.dtypes: Mapping[str, str] = {name: str(value.dtype) for name, value in published.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        return self._tensors[name]


def _tensor_problems(published: PublishedHead, recipes: Mapping[str, Recipe], layer: LayerConfig) -> list[str]:
    source = _Source(published)
    problems = table_problems(source, recipes, ignored=r"(?!)", tied=False)
    gated = (2 * layer.attention.num_heads * layer.attention.head_dim, layer.hidden_size)
    if not layer.attention.gated and source.shapes.get(f"spec_layers.0.{LAYER_NAMES.q}.weight") == gated:
        problems.append("q_proj has twice the rows: gated attention (Qwen3.5), which this target does not have")
    for name, value in published.tensors.items():
        if value.dtype not in _DTYPES:
            problems.append(f"{name} has dtype {value.dtype}, expected {', '.join(map(str, _DTYPES))}")
            continue
        try:
            refuse_non_finite(value, name)
        except WeightsError as error:
            problems.append(str(error))
    return problems


def _split(value: np.ndarray, count: int, layer: LayerConfig) -> list[np.ndarray]:
    """Undo a recipe: rows of one parameter into its `count` parts."""
    if count < 3:
        return np.split(value, count)
    config, tail = layer.attention, value.shape[1:]
    group = config.num_heads // config.num_kv_heads
    asked = group * (1 + config.gated)
    by_kv_head = value.reshape(config.num_kv_heads, asked + 2, config.head_dim, *tail)
    queries = by_kv_head[:, :asked]
    if config.gated:  # heads and their gates take turns in the file
        queries = queries.reshape(config.num_kv_heads, 2, group, config.head_dim, *tail).swapaxes(1, 2)
    pieces = queries, by_kv_head[:, asked], by_kv_head[:, asked + 1]
    return [piece.reshape(-1, *tail) for piece in pieces]


def _place(name: str) -> tuple[int, int, int, str]:
    """Where a tensor stands in the published order: projections, LM head, then layer by layer."""
    top, index, rest = [*name.split(".", 2), ""][:3]
    if top != "spec_layers":
        return (0, int(index), 0, "") if top == "aggr_projs" else (1, 0, 0, "")
    module, leaf = rest.rsplit(".", 1)
    return 2, int(index), _LAYER_ORDER.index(module), leaf.replace("weight", "")


def _module(config: HeadConfig, values: Mapping[str, np.ndarray], dtype: Any) -> SpeculationModule:
    graphdef, state = nnx.split(nnx.eval_shape(lambda: SpeculationModule(config, dtype=dtype, rngs=nnx.Rngs(0))))
    filled = [
        (path, variable.replace(jnp.array(values[".".join(map(str, path))])))
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))
