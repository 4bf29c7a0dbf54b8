"""Training and decoding see the same: type-0 logits of the training pass are the draft logits of the decode loop.

The decode loop stands here as the naive decoder, which recomputes everything every cycle (`tests/decode` holds the
engine to it), and as the published implementation's own decoding.

A cycle with F positions in flight is a training row with fill F, read at the newest position: F = min(c, n) in the
c-th cycle after the prefill or after a rejection. With n + 1 types both agree exactly. With fewer, a row of a depth
that shares its type with a shallower one, and that is not the richest type, attends in training as that shallower depth
does; one draft layer cannot tell, more layers can.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from spd_jax.config.model import MlpConfig
from spd_jax.models.decoder import Decoder
from spd_jax.plan import StagePlan
from spd_jax.speculation.module import SpeculationModule
from tests.decode.engine import LAYER, random_head, target, weights
from tests.naive import CycleInput, ModuleDraft, NaiveDecoder, NaiveResult
from tests.training.passes import PLAN, frozen, logits_of, tiny_head, whole_rows

LENGTH, TOKENS, CYCLES = 32, 16, 40
OWN_LAYER = dataclasses.replace(
    LAYER.with_attention(qk_norm=True, qkv_bias=True, gated=True, score_cap=1.5, scale=0.8),
    mlp=MlpConfig(24, bias=True),
    post_norms=True,
)  # what the target's layers are not


@dataclasses.dataclass
class Recorded:
    """Draft logits of a module, with the tokens and the number of positions in flight of every cycle.

    Most drafts are replaced by the target's own token, so that the pipeline fills and stays full for a while.
    """

    module: ModuleDraft
    num_stages: int
    cycles: list[tuple[tuple[int, ...], int, np.ndarray]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = self.module.token_ids

    def __call__(self, cycle: CycleInput) -> np.ndarray:
        logits = self.module(cycle)
        newest = len(cycle.tokens) - 1
        in_flight = int((cycle.depths < self.num_stages).sum())
        self.cycles.append((cycle.tokens, in_flight, logits))
        known = np.flatnonzero(self.token_ids == cycle.target_logits[newest].argmax())
        if newest % 5 and known.size:
            return np.where(np.arange(logits.size) == known[0], np.float32(0), np.float32(-1e9))
        return logits


def decoded(model: Decoder, plan: StagePlan, head: SpeculationModule) -> tuple[Recorded, NaiveResult]:
    naive = NaiveDecoder(model, plan, head, length=LENGTH)
    assert isinstance(naive.draft, ModuleDraft)
    naive.draft = recorded = Recorded(naive.draft, plan.num_stages)
    return recorded, naive.generate([5, 17, 3], max_new_tokens=TOKENS)


def differences(recorded: Recorded, plan: StagePlan, head: SpeculationModule) -> tuple[np.ndarray, np.ndarray]:
    """For every cycle: positions in flight, and the largest difference of a logit to the training pass."""
    cycles = recorded.cycles[:CYCLES]
    ids = np.zeros((CYCLES, LENGTH), np.int32)
    fill = np.ones((CYCLES, 1), np.int32)
    for row, (tokens, in_flight, _) in enumerate(cycles):
        ids[row, : len(tokens)], fill[row] = tokens, in_flight
    source = weights(plan.num_layers)
    trained = logits_of(head, plan, frozen(source, plan.anchors), whole_rows(ids, fill))
    seen = np.stack([logits for _, _, logits in cycles])
    assert np.abs(seen).max() > 1
    newest = [len(tokens) - 1 for tokens, _, _ in cycles]
    found = np.abs(trained[np.arange(len(cycles)), newest] - seen).max(axis=1)
    return fill[: len(cycles), 0], found


def exact_fills(plan: StagePlan) -> set[int]:
    """Fills at which every depth in flight attends in training as it does in decoding."""
    kinds = plan.anchor_type
    same = [k == kinds.index(kinds[k]) or kinds[k] == kinds[-1] for k in range(plan.num_stages)]
    return {fill for fill in range(1, plan.num_stages + 1) if all(same[:fill])}


def expected_fills(result: NaiveResult, num_stages: int) -> list[int]:
    """min(c, n) in the c-th cycle after the prefill or a rejection."""
    flushes = [c for c, verdict in zip(result.verified_in, result.verdicts, strict=True) if verdict == "rejected"]
    return [min(c - max([0, *(f for f in flushes if f < c)]), num_stages) for c in range(1, result.cycles + 1)]


UNEVEN = StagePlan((1, 3, 2, 2), 3, "beside", (0, 1, 4, 6, 8))
HEADS: dict[str, tuple[StagePlan, dict[str, Any]]] = {
    "three stages": (PLAN, {}),
    "uneven stages": (UNEVEN, {}),
    "inside stages": (StagePlan((1, 3, 2, 2), 2, "separate", (0, 1, 3, 5, 7)), {"draft_ids": (0, 3, 4, 9, 17, 31, 60)}),
    "the target's rows": (PLAN, {"lm_head": "target", "draft_ids": (0, 3, 4, 9, 17, 18, 30, 41, 44, 58, 60)}),
    "its own layers": (
        PLAN,
        {"layer": OWN_LAYER},
    ),
}


def gated(names: Iterable[str], gate: str) -> list[Any]:
    """Parameters of which one runs in the gate, the others only with the slow tests."""
    return [pytest.param(name, marks=() if name == gate else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", gated(HEADS, "three stages"))
def test_training_logits_are_the_draft_logits_of_every_cycle(name: str):
    """A01's root: the same rows, the same numbers, at full fill and at every partial one; anchor L among them (A09)."""
    plan, changes = HEADS[name]
    n = plan.num_stages
    assert len(plan.types) == n + 1
    head = random_head(weights(plan.num_layers).config, plan, **changes)
    recorded, result = decoded(target(plan.num_layers), plan, head)
    fill, found = differences(recorded, plan, head)
    assert set(fill.tolist()) == set(range(1, n + 1)) == exact_fills(plan)
    assert (fill == n).sum() >= 8
    assert found.max() < 1e-5
    assert [in_flight for _, in_flight, _ in recorded.cycles] == expected_fills(result, n)


def test_another_fill_is_another_result():
    """The test above can fail: with full fill throughout, the cycles that fill the pipeline differ."""
    recorded, _ = decoded(target(3), PLAN, tiny_head())
    recorded.cycles = [(tokens, 3, logits) for tokens, in_flight, logits in recorded.cycles if in_flight < 3]
    _, found = differences(recorded, PLAN, tiny_head())
    assert found.min() > 1e-3


FEWER = {
    "two depths of one type": ((0, 1, 3), 2, {1, 2}),
    "two depths of one type, one draft layer": ((0, 1, 3), 1, {1, 2, 3}),
    "all deeper ones of the richest type": ((0, 1), 2, {1, 2, 3}),
}


@pytest.mark.parametrize("name", gated(FEWER, "two depths of one type"))
def test_with_fewer_types_they_differ_where_a_depth_has_no_type_of_its_own(name: str):
    """Depth 2 attends as depth 1 does where both have type 1; only a second draft layer reads what that makes."""
    anchors, num_layers, equal = FEWER[name]
    plan = StagePlan((1, 1, 1), num_layers, "separate", anchors)
    assert exact_fills(plan) == (equal if num_layers > 1 else {1, 2})
    head = random_head(weights(3).config, plan)
    fill, found = differences(decoded(target(3), plan, head)[0], plan, head)
    same = np.isin(fill, list(equal))
    assert same.any()
    assert found[same].max() < 1e-5
    if len(equal) < 3:
        assert found[~same].min() > 1e-4
