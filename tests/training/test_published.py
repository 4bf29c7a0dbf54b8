"""The published implementation's own training pass and decoding on its tiny fixtures, number by number."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from spd_jax.published.convert import to_published
from spd_jax.speculation.module import SpeculationModule
from spd_jax.training.rows import Rows
from spd_jax.training.sharding import data_mesh
from spd_jax.training.step import PassOptions, Programs, Sums
from spd_jax.training.target import FrozenTarget
from tests.fixtures import Fixture, load_fixture
from tests.memory_weights import DecoderWeights
from tests.training.passes import frozen, logits_of, whole_rows

fixture = functools.cache(load_fixture)
NAMES = ["tiny_llama", "tiny_qwen3_5", "tiny_qwen3_moe"]
GATE = [*NAMES[:2], pytest.param(NAMES[2], marks=pytest.mark.slow)]


@functools.cache
def target(name: str) -> FrozenTarget:
    return frozen(DecoderWeights(fixture(name).target), fixture(name).plan.anchors)


def published_rows(loaded: Fixture) -> Rows:
    """Labels stand at the token itself: position t is scored where the label of t + 1 is one.

    Padded to 64 positions, which compile faster than 48.
    """
    train = loaded.golden["train"]
    ids, labels = (np.asarray(train[name]) for name in ("input_ids", "labels"))
    scored = np.zeros((len(labels), 64), bool)
    scored[:, : labels.shape[1] - 1] = labels[:, 1:] != -100
    assert train["fill"] == loaded.plan.num_stages
    rows = whole_rows(np.pad(ids, [(0, 0), (0, 64 - ids.shape[1])]), train["fill"])
    return Rows(rows.ids, rows.positions, rows.low, rows.fill, scored)


@functools.cache
def trained(name: str) -> tuple[Sums, dict[str, Any]]:
    """Sums of one pass, and the norm of the mean gradient by published name."""
    loaded = fixture(name)
    options = PassOptions("kl", chunk=16, products="float32")
    programs = Programs(data_mesh(1), loaded.head, loaded.plan, target(name), optax.sgd(0.0), options)
    state = programs.start(loaded.head)
    sums = programs.gradient_step(programs.zeros(state), state, published_rows(loaded))
    graphdef, _ = nnx.split(loaded.head)
    gradient: SpeculationModule = nnx.merge(graphdef, jax.tree.map(lambda g: g / sums.figures.covered, sums.gradients))
    named = to_published(gradient, loaded.plan, loaded.target.config, target_name="", origin="gradient").tensors
    return sums, {name: float(np.linalg.norm(value)) for name, value in named.items()}


@pytest.mark.parametrize("name", GATE)
def test_loss_and_accuracy_are_the_published_ones(name: str):
    figures, expected = trained(name)[0].figures, fixture(name).golden["train"]
    assert float(trained(name)[0].total / figures.covered) == pytest.approx(expected["loss"], rel=1e-4)
    assert float(figures.right_A[0] / figures.covered) == pytest.approx(expected["acc"], rel=1e-4)


@pytest.mark.parametrize("name", GATE)
def test_every_gradient_is_the_published_one(name: str):
    expected = fixture(name).golden["train"]["grad_norm"]
    assert trained(name)[1].keys() == expected.keys()
    assert trained(name)[1] == {name: pytest.approx(norm, rel=1e-4) for name, norm in expected.items()}


def cycles_of(prompt: dict[str, Any], logits: np.ndarray, ids: np.ndarray, n: int) -> list[tuple[list[int], int]]:
    """Tokens and positions in flight at every cycle, from what the published decoder gave."""
    tokens, oldest, cycles = [*prompt["prompt_ids"], prompt["generated_ids"][0]], len(prompt["prompt_ids"]), []
    for row in logits:
        in_flight = len(tokens) - oldest
        cycles.append((list(tokens), in_flight))
        drafted = int(ids[row.argmax()])
        if in_flight == n:
            oldest += 1
            place = oldest - len(prompt["prompt_ids"])
            if place < len(prompt["accepted"]) and not prompt["accepted"][place]:
                tokens = [*tokens[:oldest], prompt["generated_ids"][place]]
                continue
        tokens.append(drafted)
    return cycles


def largest_difference(name: str, prompt: int, first: int, count: int = 32) -> float:
    """Of a logit, over `count` cycles from `first` on."""
    loaded = fixture(name)
    published, ids = loaded.draft_logits(prompt), loaded.head.config.draft_ids
    ids = range(loaded.target.config.vocab_size) if ids is None else ids
    cycles = cycles_of(loaded.prompts[prompt], published, np.asarray(ids), loaded.plan.num_stages)
    cycles, expected = cycles[first : first + count], published[first : first + count]
    longest = max(64, 1 << len(cycles[-1][0]).bit_length())
    rows, fill = np.zeros((count, longest), np.int32), np.ones((count, 1), np.int32)
    for row, (tokens, in_flight) in enumerate(cycles):
        rows[row, : len(tokens)], fill[row] = tokens, in_flight
    if len(cycles) == count:
        assert set(fill[:, 0].tolist()) == set(range(1, loaded.plan.num_stages + 1))
    found = logits_of(loaded.head, loaded.plan, target(name), whole_rows(rows, fill))
    newest = [len(tokens) - 1 for tokens, _ in cycles]
    assert np.abs(expected).max() > 5
    return float(np.abs(found[np.arange(len(cycles)), newest] - expected).max())


@pytest.mark.parametrize("name", [n if n == NAMES[0] else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_training_logits_are_the_published_draft_logits(name: str):
    """The training pass at the fill of a cycle gives what the published code drafted from in that cycle."""
    assert largest_difference(name, 0, 0) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_training_logits_are_the_published_draft_logits_of_all_cycles(name: str):
    for prompt, golden in enumerate(fixture(name).prompts):
        for first in range(0, golden["cycles"], 32):
            assert largest_difference(name, prompt, first) < 2e-5, (prompt, first)
