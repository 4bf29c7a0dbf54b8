"""The timeline against examples worked out by hand, and the picture as far as a test can see it."""

import io

import pytest
from PIL import Image

from spd_jax.decode.options import CycleRecord, SequenceResult, Token
from spd_jax.decode.state import ACCEPTED, FILL, REJECTED, UNDRAFTED
from spd_jax.evaluation.timeline import Timeline, reconstruct
from spd_jax.evaluation.timeline_picture import draw_timeline


def rejection() -> SequenceResult:
    """Three stages, five tokens 10, 11, 12, 13, 14: the draft for token 2 (counted from 0) is wrong.

    cycle      1   2   3   4   5   6   7   8
    stage 3            0   1           2   3
    stage 2        0   1   2x      2   3   4
    stage 1    0   1   2x  3f  2   3   4   5u
    verified           1   2           3   4     x rejected, f flushed, u never judged
    """
    records = [
        CycleRecord(FILL, -1, 11),
        CycleRecord(FILL, -1, 99),
        CycleRecord(ACCEPTED, 11, 98),
        CycleRecord(REJECTED, 12, 97),
        CycleRecord(FILL, -1, 13),
        CycleRecord(FILL, -1, 14),
        CycleRecord(ACCEPTED, 13, 96),
        CycleRecord(ACCEPTED, 14, 95),
    ]
    events = [UNDRAFTED, ACCEPTED, REJECTED, ACCEPTED, ACCEPTED]
    tokens = [
        Token(10 + i, cycle, event, 0.0) for i, (cycle, event) in enumerate(zip((0, 3, 4, 7, 8), events, strict=True))
    ]
    return SequenceResult([1, 2], tokens, records, "length")


def test_positions_climb_and_a_wrong_draft_empties_the_pipeline():
    timeline = reconstruct(rejection(), 3)
    stages = [timeline.stages(cycle) for cycle in range(1, 9)]
    assert stages == [
        [0, None, None],
        [1, 0, None],
        [2, 1, 0],
        [3, 2, 1],
        [2, None, None],
        [3, 2, None],
        [4, 3, 2],
        [5, 4, 3],
    ]


def test_every_token_has_its_fate():
    cells = {(c.cycle, c.stage): (c.token, c.fate) for c in reconstruct(rejection(), 3).cells}
    assert cells[1, 1] == cells[3, 3] == (10, "verified")
    assert cells[2, 1] == cells[4, 3] == (11, "accepted")
    assert cells[3, 1] == cells[4, 2] == (99, "rejected")
    assert cells[4, 1] == (98, "flushed")
    assert cells[5, 1] == cells[7, 3] == (12, "verified")
    assert cells[8, 2] == (14, "accepted")
    assert cells[8, 1] == (96, "in flight")


def test_verdicts_carry_cycle_and_token():
    verdicts = reconstruct(rejection(), 3).verdicts
    assert [(v.cycle, v.index, v.token, v.accepted) for v in verdicts] == [
        (3, 1, 11, True),
        (4, 2, 12, False),
        (7, 3, 13, True),
        (8, 4, 14, True),
    ]


def test_one_stage_never_drafts():
    tokens = [Token(10 + i, i, UNDRAFTED, 0.0) for i in range(3)]
    result = SequenceResult([1], tokens, [CycleRecord(UNDRAFTED, 11, -1), CycleRecord(UNDRAFTED, 12, -1)], "length")
    timeline = reconstruct(result, 1)
    assert [timeline.stages(1), timeline.stages(2)] == [[0], [1]]
    assert {cell.fate for cell in timeline.cells} == {"verified"}


@pytest.mark.parametrize("tokens", [[], [Token(5, 0, UNDRAFTED, 0.0)]])
def test_no_cycles_give_an_empty_timeline(tokens: list[Token]):
    assert reconstruct(SequenceResult([1], tokens), 4) == Timeline(4, 0, (), ())


@pytest.mark.parametrize(
    ("cycle", "record", "message"),
    [
        (1, CycleRecord(ACCEPTED, 11, 12), "cycle 1: a verdict on token 1 while its predecessor was not"),
        (3, CycleRecord(FILL, -1, 12), "cycle 3: a cycle without a verdict"),
        (3, CycleRecord(ACCEPTED, 12, 12), "cycle 3: token 12 verified, which is not token 1"),
        (3, CycleRecord(REJECTED, 11, 12), "cycle 3: draft 11 against verified 11"),
        (3, CycleRecord(UNDRAFTED, 11, 12), "cycle 3: token 1 called undrafted"),
        (3, CycleRecord(9, 11, 12), "cycle 3: unknown event 9"),
    ],
)
def test_a_log_that_cannot_be_is_refused(cycle: int, record: CycleRecord, message: str):
    result = rejection()
    result.records[cycle - 1] = record
    with pytest.raises(ValueError, match=message):
        reconstruct(result, 3)


def test_a_log_that_ends_early_is_refused():
    result = rejection()
    result.records.pop()
    with pytest.raises(ValueError, match="verifies 3 tokens, the sequence has 5"):
        reconstruct(result, 3)


def oracle(num_tokens: int, num_stages: int) -> SequenceResult:
    """A long text whose every draft is right."""
    records = [CycleRecord(FILL, -1, i + 1) for i in range(num_stages - 1)]
    records += [CycleRecord(ACCEPTED, i, i + num_stages - 1) for i in range(1, num_tokens)]
    tokens = [Token(i, 0 if i == 0 else i + num_stages - 1, ACCEPTED, 0.0) for i in range(num_tokens)]
    return SequenceResult([1], tokens, records, "length")


@pytest.mark.parametrize(("num_tokens", "panels"), [(4, 1), (58, 1), (59, 2), (800, 5)])
def test_the_picture_grows_by_panels_and_stays_one_page_wide(num_tokens: int, panels: int):
    timeline = reconstruct(oracle(num_tokens, 4), 4)
    picture = Image.open(io.BytesIO(draw_timeline(timeline, "title $x", lambda token: f"世$ {token}\n")))
    assert picture.width <= 2000
    assert picture.height == pytest.approx(110 * (0.65 + panels * (0.62 + 4 * 0.24 + 0.42)), rel=0.2)
    assert len(picture.convert("RGB").getcolors(10**6) or []) > 20
