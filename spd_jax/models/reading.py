"""Reading a Hugging Face config dict: fields with their types, rotary parameters, end-of-sequence ids.

Problems are collected and reported together, each with the value found and what would be right. This module knows no
family: what a family requires, defaults and refuses is said in the family's own file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, get_args

from spd_jax.config.model import RopeConfig, RopeKind

_TIE = "tie_word_embeddings"
_WRAPPERS_OWN = ("eos_token_id", "bos_token_id", "pad_token_id", "quantization_config")
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)

# Names in a Hugging Face rope dict -> fields of RopeConfig.
_ROPE_NUMBERS = {
    "rope_theta": "theta",
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "attention_factor": "attention_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
_ROPE_OTHERS = ("rope_type", "type", "original_max_position_embeddings", "truncate", "partial_rotary_factor")
_ROPE_NEEDS = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ()}


class FieldReader:
    """Typed access to a config dict; remembers what was wrong until `finish` raises it all at once."""

    def __init__(self, fields: Mapping[str, Any], origin: str):
        self.fields = fields
        self.origin = origin
        self.problems: list[str] = []

    def whole(self, name: str, default: int | None = None) -> int:
        """A positive integer; a missing (or null) field takes the default, or is a problem when there is none."""
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            self.problems.append(f"{name} is missing (a positive integer)")
            return 1
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.problems.append(f"{name} is {value!r}, expected a positive integer")
            return 1
        return value

    def number(self, name: str, default: float) -> float:
        """A float, or an integer taken as one."""
        value = self.fields.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.problems.append(f"{name} is {value!r}, expected a number")
            return default
        return float(value)

    def positive(self, name: str, default: float | None) -> float | None:
        """A number above 0, or null; only a field that is absent takes the default."""
        value = self.fields.get(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            self.problems.append(f"{name} is {value!r}, expected a number above 0, or null")
            return default
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.fields.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problems.append(f"{name} is {value!r}, expected true or false")
            return default
        return value

    def choice(self, name: str, default: str, supported: Collection[str]) -> str:
        """One of the supported strings."""
        value = self.fields.get(name, default)
        if not isinstance(value, str) or value not in supported:
            self.problems.append(f"{name} is {value!r:.80}, supported: {', '.join(sorted(supported))}")
            return default
        return value

    def only(self, name: str, supported: Any, *others: Any) -> None:
        """A field that changes the arithmetic and of which only these values are implemented (absent is fine)."""
        value = self.fields.get(name)
        if value is not None and value not in (supported, *others):
            self.problems.append(f"{name} is {value!r}, supported: {supported!r} or absent")

    def layer_indices(self, name: str, num_layers: int) -> frozenset[int]:
        """Indices of layers, as a list or null."""
        value = self.fields.get(name) or []
        if not isinstance(value, list) or any(type(i) is not int or not 0 <= i < num_layers for i in value):
            self.problems.append(f"{name} is {value!r}, expected a list of layers from 0 to {num_layers - 1}")
            return frozenset()
        return frozenset(value)

    def token_id(self, name: str) -> int | None:
        """A token id, or None when absent or null."""
        ids = self.token_ids(name)
        return ids[0] if ids else None

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Token ids given as one integer, a list, null or not at all."""
        value = self.fields.get(name)
        try:
            return token_ids(value)
        except ValueError:
            self.problems.append(f"{name} is {value!r}, expected a token id or a list of token ids")
            return ()

    def finish(self) -> None:
        """Raise everything that was wrong.

        Raises:
            ValueError: with one line a problem.
        """
        if self.problems:
            raise ValueError(f"{self.origin}: cannot use this model config:\n  " + "\n  ".join(self.problems))


def text_fields(fields: Mapping[str, Any], origin: str, *, wrapper_ties: bool | None) -> Mapping[str, Any]:
    """The fields of the text model: those of `text_config`, with what its wrapper owns; `fields` where there is none.

    What a wrapper says besides is about pictures, and never stands in for a field that the text model leaves out. It
    owns the special tokens where it names them, a quantisation, and whether the head is tied (`Family.wrapper_ties`),
    all as in transformers.

    Raises:
        ValueError: `text_config` is no object.
    """
    inner = fields.get("text_config")
    if inner is None:
        return fields
    if not isinstance(inner, Mapping):
        raise ValueError(f"{origin}: text_config is {inner!r}, expected an object")
    owned = {name: fields[name] for name in _WRAPPERS_OWN if fields.get(name) is not None}
    return {**inner, **owned, _TIE: _tied(fields, inner, wrapper_ties)}


def _tied(fields: Mapping[str, Any], inner: Mapping[str, Any], wrapper_ties: bool | None) -> Any:
    """Whether the head of a wrapped text model is tied; a value that is no flag is handed on, to be refused."""
    if wrapper_ties is not None:
        return bool(wrapper_ties) if _TIE not in fields else fields[_TIE] or False
    given = [level[_TIE] for level in (fields, inner) if level.get(_TIE) is not None]
    wrong = [value for value in given if not isinstance(value, bool)]
    return wrong[0] if wrong else any(given) if given else None


def token_ids(value: Any) -> tuple[int, ...]:
    """Token ids given as one integer, a list or None, without duplicates and in the order found.

    Raises:
        ValueError: it is something else.
    """
    listed = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in listed):
        raise ValueError(f"expected a token id or a list of token ids, found {value!r}")
    return tuple(dict.fromkeys(listed))


def read_rope(
    reader: FieldReader, *, max_position: int, partial: float | None = None, ignored: Collection[str] = ()
) -> RopeConfig:
    """Rotary parameters from `rope_parameters`, or from the older `rope_theta` with `rope_scaling`.

    Unknown kinds and unknown parameters are problems: ignored, they would give wrong numbers without a word.
    `original_max_position_embeddings` is looked for among the parameters, then beside them, and falls back on
    max_position_embeddings, as in transformers.

    Args:
        partial: the share of a head that a family rotates where its config says nothing (None: always all of it).
        ignored: parameters that change nothing for text.
    """
    fields = reader.fields
    name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    given = fields.get(name) or {}
    if not isinstance(given, Mapping):
        reader.problems.append(f"{name} is {given!r}, expected a dict")
        return RopeConfig()
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_KINDS:
        reader.problems.append(f"{name} has rope_type {kind!r}, supported: {', '.join(ROPE_KINDS)}")
        return RopeConfig()
    unknown = sorted(set(given) - set(_ROPE_NUMBERS) - set(_ROPE_OTHERS) - set(ignored))
    if unknown:
        known = ", ".join([*_ROPE_NUMBERS, *_ROPE_OTHERS])
        reader.problems.append(
            f"{name} has {', '.join(map(repr, unknown))}, which nothing here implements; known: {known}"
        )
    parameters = FieldReader({"rope_theta": fields.get("rope_theta"), **given}, reader.origin)
    if partial is None:
        parameters.only("partial_rotary_factor", 1.0)
        share = 1.0
    else:
        share = parameters.number("partial_rotary_factor", reader.number("partial_rotary_factor", partial))
        if not 0.0 < share <= 1.0:
            parameters.problems.append(f"partial_rotary_factor is {share}, expected a share above 0 and up to 1")
            share = 1.0
    present = [key for key in _ROPE_NUMBERS if parameters.fields.get(key) is not None]
    values = {_ROPE_NUMBERS[key]: parameters.number(key, 1.0) for key in present}
    if values.get("factor", 1.0) < 1.0 or values.get("theta", 1.0) <= 0.0:
        parameters.problems.append(
            f"factor must be at least 1 and rope_theta positive, found {dict(parameters.fields)}"
        )
    original = None
    if kind in ("llama3", "yarn"):
        beside = reader.whole("original_max_position_embeddings", max_position)
        original = parameters.whole("original_max_position_embeddings", beside)
    if kind == "yarn" and given.get("factor") is None and original:
        values["factor"] = max_position / original
    missing = [key for key in _ROPE_NEEDS.get(kind, ()) if given.get(key) is None]
    parameters.problems += [f"{key} is missing (rope_type {kind!r} needs it)" for key in missing]
    reader.problems += [f"{name}: {problem}" for problem in parameters.problems]
    truncate = parameters.flag("truncate", True)
    return RopeConfig(
        kind=kind,  # pyright: ignore[reportArgumentType]
        original_max_position=original,
        truncate=truncate,
        partial_rotary_factor=share,
        **values,
    )
