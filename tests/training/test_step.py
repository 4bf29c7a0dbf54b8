"""A step is the same step on any number of devices, however parameters lie and however the batch is cut."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

from spd_jax import struct
from spd_jax.data.prepared import Example
from spd_jax.nn import blockwise
from spd_jax.training.rows import Rows, document_starts, draw_fill, fill_shares
from spd_jax.training.sharding import Placement, data_mesh
from spd_jax.training.step import PassOptions, Programs, TrainState
from spd_jax.weights.random_model import RandomWeights
from tests.decode.engine import model_config, random_head
from tests.training.passes import (
    ROWS,
    TRAINED,
    UPDATES,
    frozen,
    packed,
    programs,
    random_ids,
    rows_of,
    sums_of,
    trainee,
    whole_rows,
)


def batch(step: int) -> Rows:
    """Eight rows of one to three documents, some positions scored, fills drawn."""
    rng = np.random.default_rng([7, step])

    def document(length: int) -> Example:
        return Example(random_ids(length, seed=int(rng.integers(1 << 30))), rng.random(length) < 0.7)

    made = packed(*([document(int(size)) for size in rng.integers(3, 11, count)] for count in (3, 1, 2, 2, 3, 1, 2, 3)))
    return rows_of(made, draw_fill(document_starts(made.segments), fill_shares(TRAINED.num_stages), seed=0, step=step))


def some_rows(rows: Rows, kept: slice) -> Rows:
    """The batch with all other rows unscored."""
    mask = np.zeros((ROWS, 1), bool)
    mask[kept] = True
    return struct.replace(rows, scored=rows.scored & mask)


def train(made: Programs, state: TrainState, steps: range, pieces: int = 1) -> tuple[TrainState, list[float]]:
    """Updates on the batches of `steps`, each in `pieces` micro-batches of a part of its rows."""
    losses, size = [], ROWS // pieces
    for step in steps:
        whole = batch(step)
        parts = [some_rows(whole, slice(i * size, (i + 1) * size)) for i in range(pieces)] if pieces > 1 else [whole]
        state, found = made.update(state, sums_of(made, state, *parts))
        assert bool(found["finite"])
        losses.append(float(found["loss"]))
    return state, losses


def values(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(tree))]


@functools.cache
def expected() -> tuple[list[np.ndarray], list[float]]:
    """Parameters and losses of one device."""
    made = programs()
    state, losses = train(made, made.start(trainee()), range(UPDATES))
    assert losses[0] > 0.5
    before = values(made.start(trainee()).params)
    assert min(np.abs(a - b).max() for a, b in zip(values(state.params), before, strict=True)) > 1e-3
    return values(state.params), losses


def assert_equal_run(params: Any, losses: list[float]) -> None:
    wanted, expected_losses = expected()
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for ours, theirs in zip(values(params), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


SLOW = pytest.mark.slow
MESHES = [(2, "sharded")]
MESHES += [pytest.param(n, placement, marks=SLOW) for n in (4, 8) for placement in ("replicated", "sharded")]


@pytest.mark.parametrize(("devices", "placement"), MESHES)
def test_any_mesh_and_placement_learn_the_same(devices: int, placement: Placement):
    made = programs(devices, placement)
    start = made.start(trainee())
    places = [leaf.sharding for leaf in jax.tree.leaves(start)]
    largest = max(jax.tree.leaves(start.params), key=lambda leaf: leaf.size)
    share = largest.addressable_shards[0].data.size / largest.size
    assert share == (1 / devices if placement == "sharded" else 1)
    state, losses = train(made, start, range(UPDATES))
    assert_equal_run(state.params, losses)
    assert int(state.step) == UPDATES
    after = zip(jax.tree.leaves(state), places, strict=True)
    assert all(leaf.sharding.is_equivalent_to(place, leaf.ndim) for leaf, place in after)


def test_accumulating_micro_batches_is_one_batch():
    """Halves and quarters with unequal numbers of scored positions weigh by position, not by micro-batch."""
    made = programs()
    for pieces in (2, 4):
        state, losses = train(made, made.start(trainee()), range(UPDATES), pieces)
        assert_equal_run(state.params, losses)


def test_a_state_moves_to_another_mesh():
    """P01: two updates on eight devices, the rest on one."""
    many, one = programs(8, "sharded"), programs()
    state, losses = train(many, many.start(trainee()), range(2))
    here = one.start(trainee())
    moved = jax.tree.map(lambda x, like: jax.device_put(np.asarray(x), like.sharding), state, here)
    state, rest = train(one, moved, range(2, UPDATES))
    assert_equal_run(state.params, losses + rest)


@pytest.mark.parametrize("where", ["a gradient", "the loss", "a figure"])
def test_what_is_not_finite_changes_no_state(where: str):
    made = programs()
    state, _ = train(made, made.start(trainee()), range(1))
    before = values(state)
    sums = sums_of(made, state, batch(1))
    if where == "the loss":
        sums = struct.replace(sums, total=sums.total * np.float32(np.inf))
    elif where == "a figure":
        accepted = sums.figures.accepted * np.float32(np.nan)
        sums = struct.replace(sums, figures=struct.replace(sums.figures, accepted=accepted))
    else:
        leaves, tree = jax.tree.flatten(sums.gradients)
        leaves[-1] = leaves[-1].at[(0,) * leaves[-1].ndim].set(np.nan)
        sums = struct.replace(sums, gradients=jax.tree.unflatten(tree, leaves))
    state, found = made.update(state, sums)
    assert not bool(found["finite"])
    assert all(np.array_equal(a, b) for a, b in zip(values(state), before, strict=True))
    state, found = made.update(state, sums_of(made, state, batch(1)))
    assert bool(found["finite"])
    assert int(state.step) == 2


def test_an_update_takes_the_mean_over_positions_that_have_a_loss():
    """Scored positions whose likeliest token the head cannot propose do not thin the others' gradient."""
    made = programs()
    state = made.start(trainee())
    sums = sums_of(made, state, batch(0))
    count, covered, total = (float(x) for x in (sums.figures.count, sums.figures.covered, sums.total))
    norm = np.sqrt(sum(float(np.square(g).sum()) for g in values(sums.gradients)))
    assert 0 < covered < count
    _, found = made.update(state, sums)
    assert float(found["loss"]) == pytest.approx(total / covered, rel=1e-6)
    assert float(found["gradient_norm"]) == pytest.approx(norm / covered, rel=1e-5)


def test_nothing_to_learn_moves_nothing_but_the_optimiser():
    """A batch without a scored position: no division by its zero positions."""
    made = programs()
    _, found = made.update((start := made.start(trainee())), sums_of(made, start, some_rows(batch(0), slice(0, 0))))
    assert (float(found["loss"]), float(found["gradient_norm"]), bool(found["finite"])) == (0.0, 0.0, True)


def test_uneven_rows_are_refused():
    """Q09: 7 rows on 8 devices would leave one waiting."""
    rows = batch(0)
    seven = jax.tree.map(lambda x: x[:7], rows)
    with pytest.raises(ValueError, match="a batch of 7 rows cannot be cut over 8 devices"):
        programs(8, "sharded").rows(seven)


def test_the_module_comes_back_as_it_went_in():
    made = programs(8, "sharded")
    module = made.module(made.start(trainee()))
    assert module.config == trainee().config
    for ours, theirs in zip(values(jax.tree.leaves(module)), values(jax.tree.leaves(trainee())), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.slow
def test_held_out_figures_are_those_of_training():
    made = programs()
    state = made.start(trainee())
    figures, sums = made.held_out(state, batch(0)), sums_of(made, state, batch(0))
    for ours, theirs in zip(values(figures), values(sums.figures), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.slow
def test_scoring_all_types_adds_their_losses():
    made, newest = programs(score_types="all", deeper_weight=0.25), programs()
    state = made.start(trainee())
    sums, alone = sums_of(made, state, batch(0)), sums_of(newest, newest.start(trainee()), batch(0))
    losses = np.asarray(sums.figures.loss_A)
    assert losses.shape == (3,)
    assert losses[-1] == pytest.approx(float(alone.figures.loss_A[0]), rel=1e-5)
    assert float(sums.total) == pytest.approx(losses[-1] + 0.25 * losses[:-1].sum(), rel=1e-5)
    _, found = made.update(state, sums)
    assert float(found["loss"]) == pytest.approx(float(sums.total / sums.figures.covered) / 1.5, rel=1e-5)


@pytest.mark.slow
def test_bfloat16_products_learn_much_the_same():
    made = programs(products="bfloat16")
    state, losses = train(made, made.start(trainee()), range(UPDATES))
    assert losses == pytest.approx(expected()[1], rel=0.02)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype(np.float32)}
    half = programs(products="bfloat16", activations="bfloat16")
    assert train(half, half.start(trainee()), range(2))[1] == pytest.approx(expected()[1][:2], rel=0.05)


@pytest.mark.slow
def test_memory_of_a_step_falls_with_the_chunk(monkeypatch: pytest.MonkeyPatch):
    """O01: the compiled step at B = 1, S = 256, V = 32,768, draft vocabulary of 512."""
    monkeypatch.setattr(blockwise, "TILE", 1 << 16)  # scores of attention, which would be most of what is left
    config = model_config(3, vocab_size=32768)
    head = random_head(config, TRAINED, draft_ids=tuple(range(0, 32768, 64)))
    target, rows = frozen(RandomWeights(config), TRAINED.anchors), whole_rows(random_ids(1, 256), 3)
    found = {}
    for chunk in (16, 256):
        passes = PassOptions(chunk=chunk, products="float32")
        made = Programs(data_mesh(1), head, TRAINED, target, optax.sgd(0.0), passes)
        state = made.start(head)
        arguments = (made.zeros(state), state.params, made.target, made._tables, made.rows(rows))
        compiled = made.accumulate.lower(*arguments).compile()
        found[chunk] = compiled.memory_analysis().temp_size_in_bytes, float(compiled(*arguments).total)
    (small, loss), (large, expected_loss) = found.values()
    assert small < large / 4, found
    assert loss == pytest.approx(expected_loss, rel=1e-5)
