"""Multimodal checkpoints: which of two configs owns a flag, by what transformers' classes make of the same folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from spd_jax.models.registry import family_of
from spd_jax.weights.errors import WeightsError
from spd_jax.weights.load import load_decoder, open_target
from tests.models.test_families import DELTA, MOE, SIZES
from tests.tiny import decoder_logits, logits_of, random_ids, random_model

HEAD = "lm_head.weight"
BASES: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": 5},
    "qwen3_5": DELTA | {"head_dim": 16},
    "qwen3_5_moe": DELTA | MOE | {"head_dim": 16, "shared_expert_intermediate_size": 20, "intermediate_size": None},
}
SIGLIP = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
PICTURES = {
    "gemma3": SIGLIP | {"image_size": 8, "patch_size": 4},
    "qwen3_5": {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 32},
}
PICTURES["qwen3_5_moe"] = PICTURES["qwen3_5"]
Flag = bool | None

Save = Callable[..., Path]


@pytest.fixture(scope="module")
def bases() -> dict[str, tuple[Any, dict[str, np.ndarray], dict[str, Any]]]:
    """Of each family a text model with a head of its own, its tensors under a wrapper's names, and its config."""
    found = {}
    for name, changes in BASES.items():
        model = random_model(f"{name}_text", **(SIZES | changes | {"tie_word_embeddings": False}))
        state = {key: value.numpy() for key, value in model.state_dict().items()}
        tensors = {key.replace("model.", "model.language_model.", 1): value for key, value in state.items()}
        found[name] = (model, tensors, json.loads(model.config.to_json_string(use_diff=False)))
    return found


@pytest.fixture
def save(bases: Any, tmp_path: Path) -> Save:
    """A wrapped checkpoint with these flags, None for absent ones, and with a head or without."""

    def write(name: str, *, outer: Flag, inner: Flag, head: bool, **fields: Any) -> Path:
        _, tensors, config = bases[name]
        text = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
        if inner is not None:
            text["tie_word_embeddings"] = inner
        whole = {"model_type": name, "text_config": text, "vision_config": PICTURES[name], **fields}
        if outer is not None:
            whole["tie_word_embeddings"] = outer
        (tmp_path / "config.json").write_text(json.dumps(whole))
        kept = {key: value for key, value in tensors.items() if head or key != HEAD}
        safetensors.numpy.save_file(kept, tmp_path / "model.safetensors")
        return tmp_path

    return write


def heads_of_transformers(folder: Path, name: str) -> list[np.ndarray]:
    """What each class that transformers chooses for a folder takes for the head, but not where it makes one up."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.set_verbosity_error()  # of the tower for pictures, which the file does not hold
    logging.disable_progress_bar()
    classes = [AutoModelForCausalLM] if name == "gemma3" else [AutoModelForCausalLM, AutoModelForImageTextToText]
    found = []
    for chosen in classes:
        model, loading = chosen.from_pretrained(folder, output_loading_info=True)
        if HEAD not in loading["missing_keys"]:
            found.append(model.get_output_embeddings().weight.detach().numpy())
    return found


@pytest.mark.filterwarnings("ignore:.*the config ties the head")  # another test's business
@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("inner", [None, True, False])
@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize("name", ["gemma3", "qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_the_head_is_the_one_that_transformers_takes(name: str, outer: Flag, inner: Flag, head: bool, save: Save):
    """Every pair of flags: both classes of transformers agree where neither makes a head up, and so do we."""
    folder = save(name, outer=outer, inner=inner, head=head)
    theirs = heads_of_transformers(folder, name)
    if not theirs:
        with pytest.raises(WeightsError, match=r"missing lm_head\.weight .*the config unties the head"):
            open_target(folder)
        return
    ours = open_target(folder)
    taken = ours.tensor("embedding" if ours.config.tie_embeddings else "head")
    for wanted in theirs:
        np.testing.assert_array_equal(taken, wanted)


def test_logits_of_a_wrapper_that_unties_what_its_text_model_ties(bases: Any, save: Save):
    """Outer `tie_word_embeddings: false`, inner `true`, and an lm_head: its logits, not those of the embedding."""
    folder = save("gemma3", outer=False, inner=True, head=True)
    ids = random_ids(12)
    wanted = logits_of(bases["gemma3"][0], ids)
    np.testing.assert_allclose(decoder_logits(load_decoder(open_target(folder)), ids), wanted, atol=1e-4, rtol=1e-4)


def read(name: str, text: dict[str, Any], **outer: Any) -> Any:
    sizes = {key: value for key, value in (SIZES | BASES[name]).items() if value is not None}
    return family_of(name, "").config_of({"model_type": name, "text_config": sizes | text, **outer}, "config.json")


@pytest.mark.parametrize("name", BASES)
def test_special_tokens_are_the_wrappers_where_it_names_them(name: str):
    """As in transformers' GenerationConfig.from_model_config."""
    inner = {"eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0}
    outer = {"eos_token_id": [1, 50], "bos_token_id": 7, "pad_token_id": None}
    config = read(name, inner, **outer)
    assert (config.eos_token_ids, config.bos_token_id, config.pad_token_id) == ((1, 50), 7, 0)
    assert read(name, inner).eos_token_ids == (1,)


def test_what_is_not_the_wrappers_never_fills_a_gap_of_the_text_model():
    """A size of the tower for pictures, or of an adapter, is no size of the text model."""
    config = read("gemma3", {}, max_position_embeddings=7, rms_norm_eps=0.5, sliding_window=3)
    assert (config.max_position, config.norm.eps, config.layers[0].attention.window) == (256, 1e-5, 5)
    text = {name: value for name, value in SIZES.items() if name != "max_position_embeddings"}
    fields = {"model_type": "gemma3", "text_config": text, "max_position_embeddings": 7}
    assert family_of("gemma3", "").config_of(fields, "config.json").max_position == 131072


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quantization_config": {"bits": 4}}, "quantization_config is present"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
        ({"text_config": [1]}, r"text_config is \[1\], expected an object"),
    ],
)
@pytest.mark.parametrize("name", ["gemma3", "qwen3_5"])
def test_what_a_wrapper_cannot_say_is_refused(name: str, fields: dict[str, Any], said: str):
    whole = {"model_type": name, "text_config": SIZES | BASES[name] | {"quantization_config": None}} | fields
    with pytest.raises(ValueError, match=rf"config\.json: (.|\n)*{said}"):
        family_of(name, "").config_of(whole, "config.json")
