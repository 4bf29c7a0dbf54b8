"""The `config` of a published head, "version 11": its keys, what they must say for a target, and how one is written.

Keys and their meaning are those of the paper's own implementation (arXiv 2605.30852, release of August 2026). Problems
come as lines of text, so that all of them can be reported together. This module knows no tensors, and cannot know what
the file does not say: how many layers the target had, its tokenizer, or whether a hidden state with index L was taken
before the final norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spd_jax.config.import_head import FinalAnchor
from spd_jax.config.model import ModelConfig
from spd_jax.plan import StagePlan
from spd_jax.speculation.manifest import describe_type, has_type
from spd_jax.speculation.module import HeadConfig

VERSION = 11
# Targets whose published draft layers are known: Qwen3's dense layer, for Qwen3.5 its own.
FAMILIES = ("llama", "qwen3", "qwen3_5", "qwen3_moe")
# Written since the trainer takes hidden states before the final norm; older files lack it.
MARK = "spec_intermediate_size_fallback"
REQUIRED: dict[str, Any] = {
    "hidden_size": int,
    "vocab_size": int,
    "draft_vocab_size": int,
    "num_stages": int,
    "num_spec_layers": int,
    "num_aggr_types": int,
    "version": int,
    "trained_with_use_deepest": bool,
    "aggr_feature_bound": list[int],
    "base_model_path": str,
}
OPTIONAL: dict[str, Any] = {
    MARK: int,
    "spec_init_from_base_layers": list[int] | None,
    "draft_token_ids": list[int] | None,
    "model_type": str | None,
}
# Nothing here needs these, but an export gives them back.
REMEMBERED = ("trained_with_use_deepest", "base_model_path", MARK, "spec_init_from_base_layers", "model_type")
# What the release writes by default: trained with simulated fill; the size is for targets without a dense MLP.
DEFAULTS: dict[str, Any] = {"trained_with_use_deepest": True, MARK: 9216}
OTHER_VERSIONS = {
    10: "there every depth fuses hidden states of its own (shallow_hidden_layer_indices) and only the embedding's row "
    "is a query, so such weights do not fit this speculation module",
    12: "there stages are unequal and the draft reads its features after the first stage has run, a schedule that this "
    "program does not have",
}


def version_problem(config: Mapping[str, Any]) -> str | None:
    """Why the version cannot be read, or None."""
    version = config.get("version")
    if type(version) is int and version == VERSION:
        return None
    reason = OTHER_VERSIONS.get(version) if isinstance(version, int) else None
    return f"its version is {version!r}, only {VERSION} can be read" + (f": {reason}" if reason else "")


def key_problems(config: Mapping[str, Any]) -> list[str]:
    """Keys that are missing or hold values of a wrong type; without them nothing else can be checked."""
    problems = [f"config lacks {key} ({describe_type(kind)})" for key, kind in REQUIRED.items() if key not in config]
    for key, kind in (REQUIRED | OPTIONAL).items():
        if key in config and not has_type(config[key], kind):
            problems.append(f"config has {key} {config[key]!r}, expected {describe_type(kind)}")
    return problems


def unknown_keys(config: Mapping[str, Any]) -> list[str]:
    """Keys that nothing here knows; ignored, they could change what the head means."""
    unknown = sorted(str(key) for key in config if key not in REQUIRED | OPTIONAL)
    return [f"config has unknown keys: {', '.join(unknown)}"] if unknown else []


def target_problems(config: Mapping[str, Any], target: ModelConfig, final_anchor: FinalAnchor | None) -> list[str]:
    """What a complete config says that cannot be, by itself or for this target."""
    problems = [
        f"{key} is {config[key]}, the target's is {wanted}"
        for key, wanted in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size))
        if config[key] != wanted
    ]
    if config.get("model_type") not in (None, target.family):
        problems.append(f"model_type is {config['model_type']!r}, the target's is {target.family!r}")
    if target.family not in FAMILIES:
        problems.append(
            f"the target is of family {target.family!r}; published draft layers are known for {', '.join(FAMILIES)}"
        )
    stages, anchors, length = config["num_stages"], config["aggr_feature_bound"], target.num_layers
    if stages < 1 or length % stages:
        problems.append(f"num_stages is {stages}, which does not cut the target's {length} layers evenly")
    if config["num_aggr_types"] != len(anchors) or len(anchors) > max(stages, 1) + 1:
        problems.append(
            f"num_aggr_types is {config['num_aggr_types']} with aggr_feature_bound {anchors}; expected as many types "
            f"as anchors and at most {max(stages, 1) + 1}, one more than stages"
        )
    if anchors and anchors[-1] == length and final_anchor != "before_norm":
        problems.append(_final_anchor_problem(length, MARK in config, final_anchor))
    ids, size = config.get("draft_token_ids"), config["draft_vocab_size"]
    if ids is None and size != config["vocab_size"]:
        problems.append(f"draft_vocab_size is {size} without draft_token_ids: which tokens the rows score is not said")
    if ids is not None and len(ids) != size:
        problems.append(f"draft_vocab_size is {size}, draft_token_ids has {len(ids)} entries")
    return problems


def _final_anchor_problem(length: int, marked: bool, said: FinalAnchor | None) -> str:
    if said is not None:
        return f"anchor {length} was trained on the hidden state after the final norm; here it is taken before it"
    return (
        f"anchor {length} is the target's last hidden state, and the file does not say whether it was taken before or "
        "after the final norm: the published trainer takes it before, older ones took it after, and the published "
        "decoder takes it after the norm for the prompt and before it for new tokens. Here it is always taken before. "
        f"This file {'has' if marked else 'lacks'} {MARK}, a key that came with the trainer that takes it before. "
        "If the head was trained so, say --final_anchor before_norm"
    )


def published_config(head: HeadConfig, plan: StagePlan, remembered: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a head, its keys in the release's order.

    Args:
        remembered: the `REMEMBERED` keys of an imported head, or `DEFAULTS` and a `base_model_path`.
    """
    config: dict[str, Any] = {
        "hidden_size": head.layer.hidden_size,
        "vocab_size": head.vocab_size,
        "draft_vocab_size": head.draft_vocab_size,
        "num_stages": plan.num_stages,
        "num_spec_layers": head.num_layers,
        "num_aggr_types": len(head.anchors),
        "version": VERSION,
        "aggr_feature_bound": list(head.anchors),
    }
    config |= {key: remembered[key] for key in REMEMBERED if key in remembered}
    if head.draft_ids is not None:
        config["draft_token_ids"] = list(head.draft_ids)
    return {key: config[key] for key in [*REQUIRED, *OPTIONAL] if key in config}
