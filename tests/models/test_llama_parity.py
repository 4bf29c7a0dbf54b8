"""Logits of tiny random Llama models equal to transformers' at 1e-4 in float32, over every switch of the family."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spd_jax.weights.load import load_decoder, open_target
from tests.tiny import decoder_logits, logits_of, random_ids, run, save_llama

ROPE = {"rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "wide heads (D06)": {"head_dim": 16},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "linear rope": {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}},
    "llama3 rope (E04)": {"rope_parameters": ROPE | LLAMA3 | {"original_max_position_embeddings": 64}},
    "yarn (E03)": {"rope_parameters": ROPE | YARN},
    "yarn, given attention": {"rope_parameters": ROPE | YARN | {"attention_factor": 0.7, "truncate": False}},
    "yarn, mscale": {"rope_parameters": ROPE | YARN | {"mscale": 1.5, "mscale_all_dim": 0.8}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path):
    """E01, E03, E04, E05, D06: 100 tokens, well beyond the length that the rope scalings start from."""
    model = save_llama(tmp_path, **VARIANTS[name])
    ids = random_ids(100, batch=2)
    wanted = logits_of(model, ids)
    logits = decoder_logits(load_decoder(open_target(tmp_path)), ids)
    assert wanted.std() > 0.5  # logits that say something
    np.testing.assert_allclose(logits, wanted, atol=1e-4, rtol=1e-4)


def test_hidden_state_l_is_taken_before_the_final_norm(tmp_path: Path):
    """Index L means the output of the last layer before the final norm (transformers gives it after the norm)."""
    import torch

    model = save_llama(tmp_path)
    ids = random_ids(12)
    with torch.no_grad():
        theirs = model(torch.from_numpy(ids), output_hidden_states=True).hidden_states
    ours = run(load_decoder(open_target(tmp_path)), lambda model, ids: model.hidden_states(ids), ids)
    assert len(ours) == len(theirs) == 3
    for index in range(2):
        np.testing.assert_allclose(ours[index], theirs[index].numpy(), atol=1e-4)
    with torch.no_grad():
        normed = model.model.norm(torch.from_numpy(np.array(ours[2]))).numpy()
    np.testing.assert_allclose(normed, theirs[2].numpy(), atol=1e-4)
