"""The timeline against examples worked out by hand, and the picture as far as a test can see it."""

import io

import pytest
from PIL import Image

from spd_jax.decode.options import CycleRecord, SequenceResult, Token
from spd_jax.decode.state import ACCEPTED, FILL, REJECTED, UNDRAFTED
from spd_jax.generation.timeline import Timeline, reconstruct
from spd_jax.generation.timeline_picture import draw_timeline


def chain(event: int, token: int, draft: int) -> CycleRecord:
    """A cycle of a chain."""
    return CycleRecord(event, token, (draft,), (0 if draft >= 0 else -1,), 0, 0, 0)


def rejection() -> SequenceResult:
    """Three stages, five tokens 10, 11, 12, 13, 14: the draft for token 2 (counted from 0) is wrong.

    cycle      1   2   3   4   5   6   7   8
    stage 3            0   1           2   3
    stage 2        0   1   2x      2   3   4
    stage 1    0   1   2x  3f  2   3   4   5u
    verified           1   2           3   4     x rejected, f flushed, u never judged
    """
    records = [
        chain(FILL, -1, 11),
        chain(FILL, -1, 99),
        chain(ACCEPTED, 11, 98),
        chain(REJECTED, 12, 97),
        chain(FILL, -1, 13),
        chain(FILL, -1, 14),
        chain(ACCEPTED, 13, 96),
        chain(ACCEPTED, 14, 95),
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
    result = SequenceResult([1], tokens, [chain(UNDRAFTED, 11, -1), chain(UNDRAFTED, 12, -1)], "length")
    timeline = reconstruct(result, 1)
    assert [timeline.stages(1), timeline.stages(2)] == [[0], [1]]
    assert {cell.fate for cell in timeline.cells} == {"verified"}


@pytest.mark.parametrize("tokens", [[], [Token(5, 0, UNDRAFTED, 0.0)]])
def test_no_cycles_give_an_empty_timeline(tokens: list[Token]):
    assert reconstruct(SequenceResult([1], tokens), 4) == Timeline(4, 0, (), ())


@pytest.mark.parametrize(
    ("cycle", "record", "message"),
    [
        (1, chain(ACCEPTED, 11, 12), "cycle 1: a verdict on token 1 while its predecessor was not"),
        (3, chain(FILL, -1, 12), "cycle 3: a cycle without a verdict"),
        (3, chain(ACCEPTED, 12, 12), "cycle 3: token 12 verified, which is not token 1"),
        (3, chain(REJECTED, 11, 12), "cycle 3: draft 11 against verified 11"),
        (3, chain(UNDRAFTED, 11, 12), "cycle 3: token 1 called undrafted"),
        (3, chain(9, 11, 12), "cycle 3: unknown event 9"),
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
    records = [chain(FILL, -1, i + 1) for i in range(num_stages - 1)]
    records += [chain(ACCEPTED, i, i + num_stages - 1) for i in range(1, num_tokens)]
    tokens = [Token(i, 0 if i == 0 else i + num_stages - 1, ACCEPTED, 0.0) for i in range(num_tokens)]
    return SequenceResult([1], tokens, records, "length")


@pytest.mark.parametrize(("num_tokens", "panels"), [(4, 1), (58, 1), (59, 2), (800, 5)])
def test_the_picture_grows_by_panels_and_stays_one_page_wide(num_tokens: int, panels: int):
    timeline = reconstruct(oracle(num_tokens, 4), 4)
    picture = Image.open(io.BytesIO(draw_timeline(timeline, "title $x", lambda token: f"世$ {token}\n")))
    assert picture.width <= 2000
    assert picture.height == pytest.approx(110 * (0.65 + panels * (0.62 + 4 * 0.24 + 0.42)), rel=0.2)
    assert len(picture.convert("RGB").getcolors(10**6) or []) > 20


def tree() -> SequenceResult:
    """Three stages, two rows: the second branch is right for token 1, the first of its children for token 2.

    cycle      1     2      3      4      5
    stage 3                10     -|11   -|12
    stage 2         10   90|11    -|12  92|93
    stage 1   10  90|11  91|12   92|93  94|-
    """
    records = [
        CycleRecord(FILL, -1, (90, 11), (0, 0), 0, 2, 3),
        CycleRecord(FILL, -1, (91, 12), (0, 1), 0, 3, 5),
        CycleRecord(ACCEPTED, 11, (92, 93), (1, 1), 0, 3, 4),
        CycleRecord(ACCEPTED, 12, (94, -1), (1, -1), 0, 3, 4),
        CycleRecord(ACCEPTED, 93, (95, 96), (0, 0), 0, 3, 4),
    ]
    tokens = [Token(10, 0, UNDRAFTED, 0.0), Token(11, 3, ACCEPTED, 0.0, 1)]
    tokens += [Token(12, 4, ACCEPTED, 0.0, 0), Token(93, 5, ACCEPTED, 0.0, 1)]
    return SequenceResult([1], tokens, records, "length")


def test_a_tree_keeps_the_branches_that_agree():
    timeline = reconstruct(tree(), 3)
    assert timeline.width == 2
    cells = {(c.cycle, c.stage, c.row): (c.token, c.fate) for c in timeline.cells}
    assert cells[2, 1, 0] == cells[3, 2, 0] == (90, "not taken")
    assert cells[2, 1, 1] == cells[4, 3, 1] == (11, "accepted")
    assert (4, 3, 0) not in cells  # dead rows are no cells
    assert cells[3, 1, 0] == (91, "not taken")
    assert cells[3, 1, 1] == cells[4, 2, 1] == (12, "accepted")
    assert cells[4, 1, 0] == (92, "not taken")
    assert cells[4, 1, 1] == (93, "accepted")
    assert cells[5, 1, 0] == (94, "in flight")


def test_a_column_that_died_leaves_a_gap():
    result = tree()
    result.records[1] = CycleRecord(FILL, -1, (91, -1), (0, -1), 0, 3, 4)  # only behind row 0, which is wrong
    result.records[2] = CycleRecord(ACCEPTED, 11, (92, 93), (0, 0), 1, 1, 1)
    result.records[3] = CycleRecord(UNDRAFTED, 12, (94, 95), (1, 1), 0, 1, 1)
    del result.records[4:], result.tokens[3:]
    timeline = reconstruct(result, 3)
    assert timeline.stages(4) == [None, None, 1]
    result.records[2] = CycleRecord(ACCEPTED, 11, (92, 93), (0, 0), 2, 1, 1)
    with pytest.raises(ValueError, match="cycle 3: 1 columns died, 2 logged"):
        reconstruct(result, 3)


def test_a_draft_behind_a_row_that_is_not_there_is_refused():
    result = tree()
    result.records[3] = CycleRecord(ACCEPTED, 12, (94, -1), (2, -1), 0, 3, 3)
    with pytest.raises(ValueError, match="cycle 4: a draft behind a row that is not there"):
        reconstruct(result, 3)


def test_the_picture_of_a_tree_has_strips():
    timeline = reconstruct(tree(), 3)
    picture = Image.open(io.BytesIO(draw_timeline(timeline, "title", str)))
    colours = {colour for _, colour in picture.convert("RGB").getcolors(10**6) or []}
    assert {(0x9C, 0xC9, 0xEA), (0xD9, 0xC9, 0xA3)} <= colours
