"""The loss in chunks is the loss over whole logits, with its gradients, its figures and a fraction of its memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.training.loss import Figures, Scores, scored_first, scored_loss
from spd_jax.training.objectives import OBJECTIVES, Objective, ObjectiveName

R, A, D, V = 11, 2, 8, 23
IDS = np.asarray([0, 2, 3, 7, 9, 11, 12, 15, 20, 22])
REST = np.setdiff1d(np.arange(V), IDS)
WEIGHTS = (0.25, 1.0)
SCORED = np.asarray([1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0], bool)
HEADS = ("own rows", "the target's rows", "own rows, draft vocabulary", "the target's rows, draft vocabulary")


def case(head: str, seed: int = 0) -> dict[str, Any]:
    """Hidden states of the draft and the teacher, the teacher's head, and the rows of a draft's."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    every, ids = normal(V, D), IDS if "vocabulary" in head else np.arange(V)
    own = every[ids] + 0.5 * normal(len(ids), D) if head.startswith("own") else None  # some drafts are right
    rest = every[REST] if "vocabulary" in head else None
    rows = Scores(own, every[ids], rest)
    teacher = normal(R, D)
    hidden = teacher[:, None] + 0.5 * normal(R, A, D)
    return {"hidden": hidden, "teacher": teacher, "every": every, "ids": ids, "rows": rows}


def dense(objective: Objective, hidden: Any, teacher: Any, every: Any, draft: Any, ids: np.ndarray) -> jax.Array:
    """The sum over whole logits, all at once."""
    logits = teacher @ every.T
    covered = jnp.asarray(SCORED) & jnp.isin(jnp.argmax(logits, axis=-1), jnp.asarray(ids))
    log_p = jax.nn.log_softmax(logits[:, ids])
    losses = jnp.stack([objective(log_p, jax.nn.log_softmax(hidden[:, kind] @ draft.T)) for kind in range(A)], axis=1)
    return jnp.sum(jnp.where(covered[:, None], losses, 0.0) * jnp.asarray(WEIGHTS, jnp.float32))


@functools.cache
def losses_of(head: str, chunk: int, names: tuple[ObjectiveName, ...]) -> dict[str, tuple[Any, Any]]:
    """For each of these objectives: value, figures and gradients in chunks, and value and gradients at once."""
    made = case(head)
    ids, trained = made["ids"], made["rows"].draft is not None

    @jax.jit
    def run(hidden: Any, teacher: Any, every: Any, rows: Scores) -> Any:
        found = {}
        for name in names:
            objective = OBJECTIVES[name]
            loss = functools.partial(scored_loss, objective, WEIGHTS, chunk)
            chunked = jax.value_and_grad(loss, (0, 1, 3), has_aux=True)(hidden, teacher, jnp.asarray(SCORED), rows)
            draft = rows.draft if trained else rows.teacher
            at_once = functools.partial(dense, objective, ids=ids)
            found[name] = chunked, jax.value_and_grad(at_once, (0, 3))(hidden, teacher, every, draft)
        return found

    return jax.device_get(run(made["hidden"], made["teacher"], made["every"], made["rows"]))


SLOW = pytest.mark.slow
SOME: tuple[ObjectiveName, ...] = ("kl", "blend")
EVERY = tuple(OBJECTIVES)
CHUNKED = [(HEADS[2], 4, SOME)]
CHUNKED += [
    pytest.param(head, chunk, EVERY, marks=SLOW)
    for head, chunk in ((HEADS[0], 4), (HEADS[1], 3), (HEADS[2], 1), (HEADS[3], 64))
]


@pytest.mark.parametrize(("head", "chunk", "names"), CHUNKED)
def test_chunks_change_nothing(head: str, chunk: int, names: tuple[ObjectiveName, ...]):
    """O02: values and gradients in chunks are those over whole logits; the teacher has none."""
    for name, (chunked, at_once) in losses_of(head, chunk, names).items():
        ((total, _), (d_hidden, d_teacher, d_rows)), (expected, (wanted_hidden, wanted_draft)) = chunked, at_once
        assert expected > 0.5
        assert total == pytest.approx(float(expected), rel=1e-5), name
        np.testing.assert_allclose(d_hidden, wanted_hidden, atol=1e-5, err_msg=name)
        assert np.abs(d_hidden).max() > 1e-2
        assert not d_teacher.any()
        assert not d_rows.teacher.any()
        assert d_rows.teacher_rest is None or not d_rows.teacher_rest.any()
        if d_rows.draft is not None:
            np.testing.assert_allclose(d_rows.draft, wanted_draft, atol=1e-5, err_msg=name)
            assert np.abs(d_rows.draft).max() > 1e-2


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("head", [pytest.param(h, marks=() if h == HEADS[2] else SLOW) for h in HEADS])
def test_figures_are_what_counting_gives(head: str):
    """C04: target ids are compared with target ids; acceptance takes p over the whole vocabulary."""
    made = case(head)
    hidden, teacher, every = (np.asarray(made[name], np.float64) for name in ("hidden", "teacher", "every"))
    draft = np.asarray(made["rows"].teacher if made["rows"].draft is None else made["rows"].draft, np.float64)
    ids = made["ids"].tolist()
    count, covered, right, accepted = 0, 0, [0, 0], 0.0
    for row in np.flatnonzero(SCORED):
        p = softmax(every @ teacher[row])
        count, covered = count + 1, covered + (p.argmax() in ids)
        for kind in range(A):
            q = softmax(draft @ hidden[row, kind])
            right[kind] += ids[q.argmax()] == p.argmax()
        accepted += sum(min(p[token], q[place]) for place, token in enumerate(ids))
    for name, (((_, figures), _), _) in losses_of(head, 4, SOME).items():
        assert isinstance(figures, Figures)
        assert (figures.count, figures.covered) == (count, covered), name
        assert figures.right_A.tolist() == right
        assert figures.accepted == pytest.approx(accepted, rel=1e-5)
    assert 0 < covered < count or "vocabulary" not in head
    assert sum(right) > 0


def scored_with(hidden: Any, teacher: Any, scored: Any, rows: Scores, chunk: int = 4) -> Any:
    one = functools.partial(scored_loss, OBJECTIVES["kl"], (1.0,), chunk)
    value = jax.jit(jax.value_and_grad(one, (0, 3), has_aux=True))
    return jax.device_get(value(*map(jnp.asarray, (hidden, teacher, scored)), rows))


def test_labels_are_places_in_the_draft_vocabulary():
    """C04: V = 64, kept ids 3, 9, 40, teacher on 40: right where the draft is on its place 2. Teacher on 5: no loss."""
    every = np.eye(64, dtype=np.float32)
    ids = [3, 9, 40]
    rows = Scores(jnp.eye(3, 64), jnp.asarray(every[ids]), jnp.asarray(np.delete(every, ids, axis=0)))
    teacher = 9 * every[[40, 40, 5]]
    hidden = 9 * every[[2, 1, 0]][:, None]
    (_, figures), (d_hidden, _) = scored_with(hidden, teacher, np.ones(3, bool), rows)
    assert (figures.count, figures.covered, figures.right_A.tolist()) == (3, 2, [1])
    assert figures.accepted == pytest.approx(1.0, abs=0.05)
    assert np.abs(d_hidden[1]).max() > 0.1
    assert not d_hidden[2].any()


def test_nothing_scored_costs_nothing_and_teaches_nothing():
    made = case(HEADS[2])
    (total, figures), gradients = scored_with(made["hidden"][:, :1], made["teacher"], np.zeros(R, bool), made["rows"])
    assert total == figures.count == figures.covered == figures.accepted == 0
    assert all(not np.asarray(g).any() for g in jax.tree.leaves(gradients))


def test_scored_positions_come_first():
    scored = np.asarray([[0, 1, 0, 1], [1, 0, 0, 1]], bool)
    assert scored_first(jnp.asarray(scored)).tolist() == [1, 3, 4, 7, 0, 2, 5, 6]


def test_memory_falls_with_the_chunk():
    """O01, O02: B = 1, S = 256, V = 32,768, draft vocabulary of 512: a quarter of whole logits' memory at most."""
    count, vocab, drafts, size = 256, 32768, 512, 16
    rng = np.random.default_rng(0)
    every, draft = (jnp.asarray(rng.standard_normal((n, size)), jnp.float32) for n in (vocab, drafts))
    hidden, teacher = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((count, 1, size),) * 2)
    rows = Scores(draft, every[:drafts], every[drafts:])

    def chunked(hidden: Any, teacher: Any, rows: Scores, chunk: int) -> Any:
        return scored_loss(OBJECTIVES["kl"], (1.0,), chunk, hidden, teacher[:, 0], jnp.ones(count, bool), rows)[0]

    def at_once(hidden: Any, teacher: Any, rows: Scores, _: int) -> Any:
        logits = teacher[:, 0] @ jnp.concatenate([rows.teacher, rows.teacher_rest]).T
        covered = jnp.argmax(logits, axis=-1) < drafts
        losses = OBJECTIVES["kl"](jax.nn.log_softmax(logits[:, :drafts]), jax.nn.log_softmax(hidden[:, 0] @ draft.T))
        return jnp.sum(jnp.where(covered, losses, 0.0))

    found = {}
    for name, loss, chunk in (("16", chunked, 16), ("64", chunked, 64), ("at once", at_once, 0)):
        compiled = jax.jit(jax.value_and_grad(loss), static_argnums=3).lower(hidden, teacher, rows, chunk).compile()
        found[name] = compiled.memory_analysis().temp_size_in_bytes, float(compiled(hidden, teacher, rows)[0])
    (small, loss_small), (middle, loss_middle), (whole, loss_whole) = found.values()
    assert small < middle < whole / 4, found
    assert loss_small == pytest.approx(loss_whole, rel=1e-5)
    assert loss_middle == pytest.approx(loss_whole, rel=1e-5)
