"""Answers written anew: ids fed back, spans, several turns, and a file that can be continued (B11).

The target here is a function from prompts to ids, so every expectation is exact; tests/train decodes.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from spd_jax.data.conversations import Conversation, Message, Skipped
from spd_jax.data.dialogue import (
    NEXT_TOO_LONG,
    NO_MESSAGES,
    OTHER_END,
    REWRITES,
    TOO_LONG,
    Answer,
    Dialogue,
    open_dialogue,
)
from spd_jax.data.regenerate import Plan, Progress, RegenerateError, manifest_path, regenerate
from spd_jax.data.sources import read_conversations
from spd_jax.weights.template import REFUSED
from tests.data_.chat import CHATML, GEMMA, byte_tokenizer

MERGED = byte_tokenizer(merges=[("h", "i")])  # writes "hi" as one id
END = MERGED.inner.convert_tokens_to_ids("<|im_end|>")
OTHER = MERGED.inner.convert_tokens_to_ids("</s>")


def talk(*turns: str, system: str | None = None) -> Conversation:
    roles = ("user", "assistant")
    messages = [Message(roles[index % 2], turn) for index, turn in enumerate(turns)]
    return Conversation((*([Message("system", system)] if system else []), *messages), "here:1")


def opened(conversation: Conversation, tokenizer: Any = MERGED, room: int = 1000, turns: int | None = None) -> Dialogue:
    dialogue = open_dialogue(conversation, 0, tokenizer, room, turns)
    assert isinstance(dialogue, Dialogue), dialogue
    return dialogue


def said(text: str, end: int | None = END) -> Answer:
    """An answer spelt byte by byte, as the tokenizer would not spell it."""
    return Answer((*text.encode(), *([] if end is None else [end])), end is not None)


def test_ids_are_fed_back_and_never_tokenised_again():
    """B11: "hi" written as two ids stays two ids in the next prompt, though its text would be one."""
    dialogue = opened(talk("q", "old", "r", "old", "s", "old"))
    first = list(dialogue.ids)
    assert first == MERGED.chat([{"role": "user", "content": "q"}])
    dialogue.take(said("hi"))
    assert dialogue.asks
    more = "\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    assert dialogue.ids == [*first, *b"hi", END, *MERGED.encode(more)]
    whole = MERGED.chat_text(
        [{"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "hi"), ("user", "r"))]
    )
    assert MERGED.decode(dialogue.ids, skip_special=False) == whole
    assert MERGED.encode(whole) != dialogue.ids, "a tokenizer that gives the same ids proves nothing here"


def test_the_spans_are_what_the_target_wrote_with_its_end():
    dialogue = opened(talk("q", "old", "r", "old"))
    answers = [said("one"), said("cut", end=None)]
    for answer in answers:
        dialogue.take(answer)
    record = dialogue.record()
    assert [record["ids"][start:end] for start, end in record["supervised"]] == [list(a.ids) for a in answers]
    assert record["finish"] == ["stop", "length"]
    assert [(m["role"], m["content"]) for m in record["messages"]] == [
        ("user", "q"),
        ("assistant", "one"),
        ("user", "r"),
        ("assistant", "cut"),
    ]
    assert not dialogue.asks
    assert dialogue.ended is None


def test_the_end_of_an_answer_that_was_cut_is_prompt():
    dialogue = opened(talk("q", "old", "r", "old"))
    dialogue.take(said("cut", end=None))
    (start, end) = dialogue.spans[0]
    assert dialogue.ids[start:end] == [*b"cut"]
    assert dialogue.ids[end] == END


def test_a_character_that_was_cut_keeps_its_ids():
    dialogue = opened(talk("q", "old", "r", "old"))
    dialogue.take(Answer(tuple("é".encode()[:1]), stopped=False))
    assert dialogue.messages[1].content == "\ufffd"
    assert dialogue.ids[dialogue.spans[0][0]] == "é".encode()[0]
    assert dialogue.asks


@pytest.mark.parametrize(("turns", "asked"), [(None, 3), (1, 1), (2, 2), (9, 3)])
def test_so_many_turns_are_asked(turns: int | None, asked: int):
    dialogue = opened(talk("a", "x", "b", "x", "c"), turns=turns)  # the last turn has no answer: it is given one
    count = 0
    while dialogue.asks:
        dialogue.take(said("ok"))
        count += 1
    assert count == asked
    assert dialogue.ended is None
    assert len(dialogue.messages) == 2 * asked


@pytest.mark.parametrize(
    ("template", "answer", "room", "reason"),
    [
        (GEMMA, " hi ", 1000, REWRITES),
        (CHATML, "fine", 80, NEXT_TOO_LONG),
        (CHATML.replace("<|im_end|>", "."), "fine", 1000, OTHER_END),
    ],
)
def test_a_conversation_ends_before_a_turn_that_cannot_be_asked(template: str, answer: str, room: int, reason: str):
    tokenizer = byte_tokenizer(template)
    dialogue = opened(talk("q", "old", "a long question " * 4, "old"), tokenizer, room)
    before = list(dialogue.ids)
    end = tokenizer.inner.convert_tokens_to_ids("<end_of_turn>" if template == GEMMA else "<|im_end|>")
    dialogue.take(said(answer, end))
    assert (dialogue.asks, dialogue.ended) == (False, reason)
    assert dialogue.ids == [*before, *answer.encode(), end]
    assert [message.role for message in dialogue.messages] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("conversation", "template", "reason"),
    [
        (talk("q" * 100, "old"), CHATML, TOO_LONG),
        (Conversation((), "here", (1, 2), ((0, 2),), "x"), CHATML, NO_MESSAGES),
        (talk("q", "old", system="be kind"), GEMMA, REFUSED),
    ],
)
def test_what_cannot_be_asked_at_all_is_skipped_with_a_reason(conversation: Conversation, template: str, reason: str):
    found = open_dialogue(conversation, 0, byte_tokenizer(template), 60, None)
    assert isinstance(found, Skipped)
    assert found.reason == reason


# ------------------------------------------------------------------------------------------------ the file

COUNT, BATCH = 50, 4


def records() -> Iterator[Conversation | Skipped]:
    for number in range(COUNT):
        question = "q" * (1 + number * 7 % 23)
        yield Skipped("no turns", "there") if number % 10 == 3 else talk(question, "old", "and then?", "old")


def begin(number: int, conversation: Conversation) -> Dialogue | Skipped:
    return open_dialogue(conversation, number, MERGED, 1000, None)


class Target:
    """Answers with the conversation's number and the prompt's length; remembers what it was asked."""

    def __init__(self, most: int | None = None):
        self.asked: list[tuple[bool, list[int]]] = []
        self.most = most

    def __call__(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int], greedy: bool) -> list[Answer]:
        if self.most is not None and len(self.asked) >= self.most:
            raise KeyboardInterrupt
        self.asked.append((greedy, list(numbers)))
        return [said(f"{n} {len(p)} {greedy}") for n, p in zip(numbers, prompts, strict=True)]


def plan(**changes: Any) -> Plan:
    facts = {"source": "somewhere", "seed": 0} | changes
    return Plan(BATCH, 0.5, facts["seed"], {"temperature": 0.7}, facts)


def write(path: Path, target: Target, limit: int | None = None, **changes: Any) -> Progress:
    return regenerate(path, plan(**changes), records(), begin, target, limit=limit)


def test_every_conversation_is_there_once_and_half_of_them_greedy(tmp_path: Path):
    target = Target()
    progress = write(tmp_path / "out" / "a.jsonl", target)
    rows = [json.loads(line) for line in (tmp_path / "out" / "a.jsonl").read_bytes().splitlines()]
    assert sorted(row["number"] for row in rows) == [n for n in range(COUNT) if n % 10 != 3]
    for row in rows:
        greedy = row["number"] % 2 == 1
        assert row["sampling"] == {"temperature": 0.0 if greedy else 0.7}
        assert row["messages"][1]["content"].endswith(str(greedy))
        assert row["tokenizer"] == MERGED.digest
    assert (progress.lines, progress.kept, progress.turns) == (45, 0, 90)
    assert progress.tokens == sum(end - start for row in rows for start, end in row["supervised"])
    assert progress.skipped == {"no turns": 5}
    assert progress.left_out()[1:] == ["5 skipped: no turns (first: there)"]
    assert all(len(numbers) <= BATCH for _, numbers in target.asked)
    greedily = {n for greedy, numbers in target.asked if greedy for n in numbers}
    assert greedily == {n for n in range(1, COUNT, 2) if n % 10 != 3}


def test_the_file_is_a_source_of_training_data(tmp_path: Path):
    write(tmp_path / "a.jsonl", Target())
    found = list(read_conversations(tmp_path / "a.jsonl"))
    assert len(found) == 45
    for conversation in found:
        assert isinstance(conversation, Conversation)
        assert conversation.ids is not None
        assert conversation.supervised is not None
        assert conversation.tokenizer == MERGED.digest
        start, end = conversation.supervised[1]
        assert MERGED.decode(conversation.ids[start : end - 1]) == conversation.messages[3].content


def test_stopped_anywhere_and_continued_is_never_stopped(tmp_path: Path):
    write(tmp_path / "whole.jsonl", Target())
    whole, path = (tmp_path / "whole.jsonl").read_bytes(), tmp_path / "a.jsonl"
    with pytest.raises(KeyboardInterrupt):
        write(path, Target(most=7))  # in the second turns of its fourth batch
    assert whole.startswith(path.read_bytes())
    assert path.read_bytes().count(b"\n") == 3 * BATCH
    path.write_bytes(whole[: len(path.read_bytes()) + 700])  # some lines of a batch, and a half one
    target = Target()
    progress = write(path, target)
    assert path.read_bytes() == whole
    assert (progress.kept, progress.lines) == (12, 45)
    assert sum(len(numbers) for _, numbers in target.asked) == 2 * 33
    again = Target()
    write(path, again)
    assert again.asked == []
    assert path.read_bytes() == whole


def test_a_higher_limit_goes_on(tmp_path: Path):
    """The limit is reached with whole batches and decides about no line."""
    write(tmp_path / "whole.jsonl", Target())
    path = tmp_path / "a.jsonl"
    assert write(path, Target(), limit=5).lines == 8
    assert write(path, Target(), limit=8).kept == 8
    assert write(path, Target()).kept == 8
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_nothing_to_answer_is_an_error_and_no_file(tmp_path: Path):
    refusing = byte_tokenizer("{{ raise_exception('no') }}")
    found: list[tuple[list[Conversation | Skipped], str]] = [
        (
            [Skipped("no turns", "there:1"), talk("q", "old")],
            r"1 skipped: no turns \(first: there:1\); 1 skipped: the ",
        ),
        ([], "there is none"),
    ]
    for rows, said in found:
        with pytest.raises(RegenerateError, match=rf"^here\.jsonl: no conversation can be answered: {said}"):
            regenerate(
                tmp_path / "a.jsonl",
                plan(),
                iter(rows),
                lambda number, one: open_dialogue(one, number, refusing, 1000, None),
                Target(),
                source="here.jsonl",
            )
        assert not list(tmp_path.iterdir())


def test_another_specification_is_an_error_that_names_what_differs(tmp_path: Path):
    """C03."""
    path = tmp_path / "a.jsonl"
    write(path, Target(), limit=4)
    before = path.read_bytes()
    with pytest.raises(RegenerateError, match=r"a\.jsonl was made from something else: seed was 0, now 1\. Give"):
        write(path, Target(), seed=1)
    assert path.read_bytes() == before
    manifest_path(path).unlink()
    with pytest.raises(RegenerateError, match=r"a\.jsonl is there, but not .*a\.jsonl\.run\.json"):
        write(path, Target())
    assert path.read_bytes() == before


def test_lines_that_were_moved_are_an_error(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    write(path, Target(), limit=8)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[4:], *lines[:4]]))
    with pytest.raises(RegenerateError, match=r"a\.jsonl:1: expected conversation \d+, found \d+"):
        write(path, Target())
    assert path.read_bytes() == b"".join([*lines[4:], *lines[:4]])


@pytest.mark.parametrize("lost", [False, True])
def test_an_error_before_the_first_answers_is_its_own_and_leaves_nothing(tmp_path: Path, lost: bool):
    """Also where the file is no more when the error comes: tidying up must not hide it."""
    path = tmp_path / "a.jsonl"

    def fail(prompts: Sequence[Sequence[int]], numbers: Sequence[int], greedy: bool) -> list[Answer]:
        if lost:
            path.unlink()
        raise ValueError("no answers")

    with pytest.raises(ValueError, match="no answers"):
        regenerate(path, plan(), records(), begin, fail)
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_opened_is_named_as_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError("no leave to write")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError, match="no leave to write"):
        write(tmp_path / "a.jsonl", Target())
