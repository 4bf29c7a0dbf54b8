"""The `config.json` of a head folder: what a head means and its tensors cannot show.

Which hidden states it reads and by what convention, which token ids its rows score, the stage plan it was made for, and
the target and tokenizer it belongs to. It is read strictly: nothing missing is guessed and nothing unknown is ignored,
because a head that is read with another meaning drafts badly without failing. Every field of `LayerConfig` and what it
holds is written, so a field that they gain raises `FORMAT_VERSION`, unless older files are given its value.

This module knows neither tensors nor targets; `spd_jax.speculation.checkpoint` compares and loads.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from spd_jax.config.model import LayerConfig
from spd_jax.files import read_json
from spd_jax.plan import Layout, StagePlan
from spd_jax.speculation.module import HeadConfig, LmHead

FORMAT = "spd_jax speculation head"
FORMAT_VERSION = 2
ANCHOR_CONVENTION = "hidden state index, output of that many layers, before the final norm"
DRAFT_VOCABULARY_CONVENTION = (
    "absolute target token ids, sorted; row i of lm_head scores token ids[i]; null: row i scores token i"
)
CONFIG_FILE = "config.json"
StoredDtype = Literal["float32", "bfloat16"]
STORED_DTYPES: tuple[str, ...] = typing.get_args(StoredDtype)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class HeadManifest:
    """What `config.json` of a head says.

    Digests are sha256 in hexadecimal; `tokenizer_digest` is None for a head that was saved without a tokenizer.
    `dtype` is that of the stored tensors. `training` is whatever the trainer wanted to remember; nothing reads it but
    the export of a published head, which finds there what the head's first config said.
    """

    head: HeadConfig
    plan: StagePlan
    target_name: str
    target_digest: str
    tokenizer_digest: str | None
    dtype: str
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def manifest_text(manifest: HeadManifest) -> str:
    """The text of `config.json`.

    Raises:
        TypeError, ValueError: `training` holds something that JSON cannot, or a number that is not finite.
    """
    head, plan = manifest.head, manifest.plan
    tree = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "target": {
            "name": manifest.target_name,
            "config_sha256": manifest.target_digest,
            "tokenizer_sha256": manifest.tokenizer_digest,
        },
        "head": {
            "layer": as_tree(head.layer),
            "num_layers": head.num_layers,
            "vocab_size": head.vocab_size,
            "lm_head": head.lm_head,
            "dtype": manifest.dtype,
        },
        "anchors": {"convention": ANCHOR_CONVENTION, "indices": list(head.anchors)},
        "draft_vocabulary": {
            "convention": DRAFT_VOCABULARY_CONVENTION,
            "ids": None if head.draft_ids is None else list(head.draft_ids),
        },
        "plan": {"stage_layers": list(plan.stage_layers), "layout": plan.layout},
        "training": dict(manifest.training),
    }
    # One line a section: tens of thousands of draft ids stay one line.
    lines = [f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in tree.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def is_manifest(file: str | os.PathLike[str]) -> bool:
    """Whether a file says it is a head's `config.json`, of whatever version."""
    try:
        tree = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(tree, dict) and tree.get("format") == FORMAT


def read_manifest(path: str | os.PathLike[str]) -> HeadManifest:
    """What a head folder says about itself, checked for sense but not against any target.

    Raises:
        ValueError: the file and what is wrong in it: missing, no JSON, another format or version, keys missing or
            unknown, values of a wrong type, another convention, anchors or draft ids that cannot be.
    """
    file = Path(path) / CONFIG_FILE
    if not file.is_file():
        raise ValueError(f"{file} is missing: {path} is no speculation head")
    tree = read_json(file)
    try:
        return _from_json(tree)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _from_json(tree: Any) -> HeadManifest:
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        found = tree.get("format") if isinstance(tree, dict) else tree
        raise ValueError(f"format is {found!r}, expected {FORMAT!r}")
    if tree.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"format_version is {tree.get('format_version')!r}, this program reads {FORMAT_VERSION}")
    sections = ("target", "head", "anchors", "draft_vocabulary", "plan", "training")
    _check_keys("top level", tree, {"format", "format_version", *sections})
    target = _section(tree, "target", {"name": str, "config_sha256": str, "tokenizer_sha256": str | None})
    anchors = _section(tree, "anchors", {"convention": str, "indices": list[int]})
    drafts = _section(tree, "draft_vocabulary", {"convention": str, "ids": list[int] | None})
    plan = _section(tree, "plan", {"stage_layers": list[int], "layout": Layout})
    kinds = {"layer": dict, "num_layers": int, "vocab_size": int, "lm_head": LmHead, "dtype": StoredDtype}
    head = _section(tree, "head", kinds)
    conventions = [("anchors", anchors, ANCHOR_CONVENTION), ("draft_vocabulary", drafts, DRAFT_VOCABULARY_CONVENTION)]
    for name, section, convention in conventions:
        if section["convention"] != convention:
            raise ValueError(f"{name}.convention is {section['convention']!r}, expected {convention!r}")
    config = HeadConfig(
        layer=_dataclass("head.layer", LayerConfig, head["layer"]),
        num_layers=head["num_layers"],
        anchors=tuple(anchors["indices"]),
        vocab_size=head["vocab_size"],
        draft_ids=None if drafts["ids"] is None else tuple(drafts["ids"]),
        lm_head=head["lm_head"],
    )
    made_for = StagePlan(tuple(plan["stage_layers"]), head["num_layers"], plan["layout"], config.anchors)
    if not isinstance(tree["training"], dict):
        raise ValueError(f"training is {tree['training']!r}, expected an object")
    digests = (target["config_sha256"], target["tokenizer_sha256"])
    return HeadManifest(config, made_for, target["name"], *digests, head["dtype"], tree["training"])


def _check_keys(where: str, found: Mapping[str, Any], wanted: set[str]) -> None:
    missing, unknown = sorted(wanted - found.keys()), sorted(found.keys() - wanted)
    if missing or unknown:
        raise ValueError(f"{where}: missing keys {missing} (nothing is guessed), unknown keys {unknown}")


def _section(tree: Mapping[str, Any], name: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    section = tree[name]
    if not isinstance(section, dict):
        raise ValueError(f"{name} is {section!r}, expected an object")
    _check_keys(name, section, set(kinds))
    for key, kind in kinds.items():
        if not has_type(section[key], kind):
            raise ValueError(f"{name}.{key} is {section[key]!r}, expected {describe_type(kind)}")
    return section


def describe_type(kind: Any) -> str:
    """An annotated type in words, for messages."""
    if typing.get_origin(kind) is Literal:
        return f"one of {list(typing.get_args(kind))}"
    return kind.__name__ if isinstance(kind, type) else str(kind)


def as_tree(config: Any) -> dict[str, Any]:
    """Every field of a config; a config that is a field names its `class`, since there may be several."""
    tree = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        inner = dataclasses.is_dataclass(value)
        tree[field.name] = {"class": type(value).__name__, **as_tree(value)} if inner else value
    return tree


def _dataclass(where: str, cls: type[T], values: Mapping[str, Any]) -> T:
    """The inverse of `as_tree`."""
    kinds = typing.get_type_hints(cls)
    choices = {name: _config_kinds(kind) for name, kind in kinds.items()}
    section = _section({where: values}, where, {name: dict if choices[name] else kinds[name] for name in kinds})
    for name, kind in kinds.items():
        if choices[name]:
            inner, found = f"{where}.{name}", dict(section[name])
            chosen = {choice.__name__: choice for choice in choices[name]}
            if (given := found.pop("class", None)) not in chosen:
                raise ValueError(f"{inner}.class is {given!r}, expected one of {sorted(chosen)}")
            section[name] = _dataclass(inner, chosen[given], found)
        elif kind in (float, float | None) and section[name] is not None:
            section[name] = float(section[name])  # JSON may write 10000 for 10000.0
    return cls(**section)


def _config_kinds(kind: Any) -> list[type]:
    """The configs that an annotation allows, none where it is of plain values."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else [kind]
    return [option for option in options if dataclasses.is_dataclass(option) and isinstance(option, type)]


def has_type(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of an annotated type: unions, Literal, lists; a whole number may stand for a float."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(has_type(value, one) for one in arguments)
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in arguments)
    if origin is list:
        return isinstance(value, list) and all(has_type(entry, arguments[0]) for entry in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
