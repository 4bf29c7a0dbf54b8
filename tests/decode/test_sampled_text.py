"""Sampled pipelined text has exactly the target's distribution: by enumeration on a vocabulary of seven tokens."""

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from spd_jax import struct
from spd_jax.decode.autoregressive import AutoregressiveDecoder
from spd_jax.decode.loop import PipelineDecoder
from spd_jax.decode.options import Options
from spd_jax.decode.sampling import Sampling
from spd_jax.decode.tree import Tree
from spd_jax.plan import Layout, make_plan
from spd_jax.weights.load import load_decoder
from spd_jax.weights.random_model import RandomWeights
from tests.decode.engine import make_pipeline, model_config, random_head
from tests.naive import Filters, probabilities

VOCAB, LAYERS, COUNT, ROWS = 7, 3, 4, 32
PROMPT = [1, 4]


@functools.cache
def weights() -> RandomWeights:
    return RandomWeights(model_config(LAYERS, vocab_size=VOCAB), seed=3)


@functools.cache
def decoder(num_stages: int, layout: Layout, draft_ids: tuple[int, ...] | None = None) -> PipelineDecoder:
    plan = make_plan(LAYERS, num_stages, num_draft_layers=1, layout=layout)
    head = random_head(weights().config, plan, draft_ids=draft_ids)
    return make_pipeline(weights(), head, plan, cycles_per_dispatch=12)  # enough for COUNT tokens


@functools.cache
def autoregressive() -> AutoregressiveDecoder:
    return AutoregressiveDecoder(load_decoder(weights(), jnp.float32), steps_per_dispatch=8, prefill_chunk=4)


@functools.cache
def enumerated_logits() -> np.ndarray:
    """`[7^COUNT, COUNT, V]`: the target's logits for every token of every text."""
    texts = np.asarray(list(itertools.product(range(VOCAB), repeat=COUNT)))
    ids = np.concatenate([np.tile(PROMPT, (len(texts), 1)), texts[:, :-1]], axis=1)
    return np.asarray(load_decoder(weights(), jnp.float32)(jnp.asarray(ids)))[:, len(PROMPT) - 1 :]


def exact(sampling: Sampling, forbidden: tuple[int, ...] = ()) -> np.ndarray:
    """`[V] * COUNT`: the probability of every text under the target."""
    filters = Filters(sampling.temperature, sampling.top_k or None, sampling.top_p)
    p = np.ones(VOCAB**COUNT)
    for t in range(COUNT):
        step = VOCAB ** (COUNT - t)  # texts with the same first t tokens lie together
        for start in range(0, len(p), step):
            logits = enumerated_logits()[start, t].copy()
            logits[list(forbidden)] = -np.inf
            shares = probabilities(logits, filters)
            p[start : start + step] *= np.repeat(shares, step // VOCAB)
    return p.reshape((VOCAB,) * COUNT)


def sample(decoder: Any, sampling: Sampling, repeats: int, seed: int = 0, **more: Any) -> tuple[np.ndarray, float]:
    """`[samples, COUNT]` texts, and the share of tested drafts that were rejected."""
    texts, rejected, tested = [], 0, 0
    for repeat in range(repeats):
        numbers = tuple(range(repeat * ROWS, (repeat + 1) * ROWS))
        options = Options(max_new_tokens=COUNT, sampling=sampling, seed=seed, sequences=numbers, **more)
        for result in decoder.generate([PROMPT] * ROWS, options).results:
            texts.append(result.ids)
            rejected += result.rejected
            tested += result.accepted + result.rejected
    return np.asarray(texts), rejected / max(tested, 1)


def assert_drawn_from(texts: np.ndarray, p: np.ndarray) -> None:
    """Every position's tokens, every pair of neighbours, and whole texts (rare ones together)."""
    counts = np.zeros(p.shape)
    np.add.at(counts, tuple(texts.T), 1)
    assert counts[p == 0].sum() == 0, "a token outside the filtered support"
    views = [(i,) for i in range(COUNT)] + [(i, i + 1) for i in range(COUNT - 1)] + [tuple(range(COUNT))]
    for view in views:
        others = tuple(i for i in range(COUNT) if i not in view)
        wanted, found = (len(texts) * p).sum(others).ravel(), counts.sum(others).ravel()
        large = wanted >= 5
        if (~large).any() and wanted[~large].sum() > 0:
            wanted = np.append(wanted[large], wanted[~large].sum())
            found = np.append(found[large], found[~large].sum())
        used = wanted > 0
        assert used.sum() > 1
        result = stats.chisquare(found[used], wanted[used] * found.sum() / wanted.sum())
        assert result.pvalue > 1e-4, (view, result)


MODES = {"warm": Sampling(1.0), "cool": Sampling(0.7), "top-p": Sampling(0.5, 0, 0.9), "both": Sampling(0.7, 4, 0.95)}
SMALL = (0, 2, 3, 5)  # a draft vocabulary smaller than the target's


@pytest.mark.parametrize(
    "name", ["warm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cool", "top-p", "both"))]
)
def test_sampled_texts_have_the_targets_distribution(name: str):
    """Also H06: the same filters for target and draft."""
    p = exact(MODES[name])
    texts, rejected = sample(decoder(3, "separate", SMALL), MODES[name], repeats=160)
    assert 0.1 < rejected < 0.9, "drafts must be both accepted and rejected for this to say anything"
    assert_drawn_from(texts, p)
    for t in range(COUNT):
        marginal = p.sum(tuple(i for i in range(COUNT) if i != t))
        frequencies = np.bincount(texts[:, t], minlength=VOCAB) / len(texts)
        assert np.abs(frequencies - marginal).sum() / 2 < 0.02


TREES = [Tree(2, "sample"), Tree(4, "top"), Tree(4, "sample"), Tree(2, "top")]
IN_GATE = [(TREES[0], "both")]


@pytest.mark.parametrize(
    ("tree", "name"),
    [
        pytest.param(tree, name, marks=() if (tree, name) in IN_GATE else pytest.mark.slow)
        for tree in TREES
        for name in MODES
    ],
)
def test_trees_sample_texts_with_the_targets_distribution(tree: Tree, name: str):
    """Several siblings a position, after whole and partial rollbacks; q has no mass on three of the seven tokens."""
    texts, rejected = sample(decoder(3, "separate", SMALL), MODES[name], repeats=160, tree=tree)
    assert 0.05 < rejected < 0.9
    assert_drawn_from(texts, exact(MODES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("tree", [Tree(3, "sample"), Tree(3, "top"), Tree(1, "top"), Tree(3, survivors="best")])
def test_trees_sample_with_any_plan(tree: Tree):
    """Also what is there to compare with: only the best branch kept, everything dropped."""
    for found in (decoder(2, "separate"), decoder(3, "beside")):
        for form in (tree, dataclasses.replace(tree, rollback="full")):
            texts, rejected = sample(found, MODES["warm"], repeats=160, seed=6, tree=form)
            assert 0.05 < rejected < 0.9
            assert_drawn_from(texts, exact(MODES["warm"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["warm", "top-p", "both"])
@pytest.mark.parametrize(("num_stages", "layout"), [(2, "separate"), (3, "beside")])
def test_sampled_texts_have_the_targets_distribution_with_any_plan(num_stages: int, layout: Layout, name: str):
    texts, rejected = sample(decoder(num_stages, layout), MODES[name], repeats=320, seed=5)
    assert 0.1 < rejected < 0.9
    assert_drawn_from(texts, exact(MODES[name]))


def greedy_text() -> list[int]:
    """What the target says greedily."""
    text: list[int] = []
    for t in range(COUNT):
        at = sum(token * VOCAB ** (COUNT - 1 - i) for i, token in enumerate(text))
        text.append(int(enumerated_logits()[at, t].argmax()))
    return text


@pytest.mark.parametrize(("tree", "filters"), [(Tree(), (0, 1.0)), (TREES[0], (4, 0.95))])
def test_next_to_temperature_0_the_text_is_the_greedy_one(
    tree: Tree, filters: tuple[int, float], monkeypatch: pytest.MonkeyPatch
):
    """Whatever T and the size of the logits: 1/T and logits/T may be infinite, and T 0 in float32."""
    pipeline = decoder(3, "separate", SMALL)
    params = pipeline.params
    for factor in (1, 64):
        heads = {name: getattr(params, name) * factor for name in ("head", "draft_head")}
        monkeypatch.setattr(pipeline, "params", struct.replace(params, **heads))
        for temperature in (5e-324, 1e-40, 1e-8):
            options = Options(COUNT, Sampling(temperature, *filters), tree=tree)
            results = pipeline.generate([PROMPT] * ROWS, options).results
            assert [result.ids for result in results] == [greedy_text()] * ROWS
            assert any(result.rejected for result in results), "a wrong draft must be there to be refused"


def test_ids_that_must_not_occur_leave_the_others_their_proportions():
    """I06, C08 when sampling: forbidden ids are masked in the target and in the head before anything is drawn."""
    texts, rejected = sample(
        decoder(3, "separate", SMALL), MODES["warm"], repeats=80, seed=9, eos_ids=(2, 6), ignore_eos=True
    )
    assert 0.1 < rejected < 0.9
    assert not np.isin(texts, (2, 6)).any()
    assert_drawn_from(texts, exact(MODES["warm"], (2, 6)))


@pytest.mark.slow
def test_one_stage_draws_what_autoregressive_decoding_draws():
    """The same numbers for the same sequence and position: not only the distribution, the very tokens."""
    options = Options(max_new_tokens=12, sampling=Sampling(1.0), seed=4)
    prompts = [PROMPT] * ROWS
    ours = decoder(1, "beside").generate(prompts, options).results
    theirs = autoregressive().generate(prompts, options).results
    assert [r.ids for r in ours] == [r.ids for r in theirs]
    assert len({tuple(r.ids) for r in ours}) > ROWS / 2


@pytest.mark.slow
def test_autoregressive_texts_have_the_targets_distribution():
    sampling = MODES["warm"]
    assert_drawn_from(sample(autoregressive(), sampling, repeats=100)[0], exact(sampling))
