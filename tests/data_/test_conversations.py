"""Records of data sets: what becomes a conversation, and what is skipped for which reason."""

from collections import Counter
from typing import Any

import pytest

from spd_jax.data.conversations import (
    ASSISTANT_FIRST,
    EMPTY_TURN,
    NO_ASSISTANT,
    NO_TEXT,
    NO_TURNS,
    NOT_AN_OBJECT,
    OUT_OF_ORDER,
    REASONING_NO_TEXT,
    REASONS,
    SURROGATE,
    TOOLS,
    UNKNOWN_ROLE,
    Conversation,
    ConversationError,
    Message,
    Skipped,
    parse_conversation,
)


def turns(*roles_and_texts: str, key: str = "messages") -> dict[str, Any]:
    pairs = zip(roles_and_texts[::2], roles_and_texts[1::2], strict=True)
    return {key: [{"role": role, "content": text} for role, text in pairs]}


def test_both_spellings_of_a_turn_mean_the_same():
    expected = (Message("system", "be brief"), Message("user", "hi"), Message("assistant", "yo"))
    plain = turns("system", "be brief", "user", "hi", "assistant", "yo")
    assert parse_conversation(plain, "here") == Conversation(expected, "here")
    for speaker, assistant in (("human", "gpt"), ("user", "chatgpt"), ("human", "bing"), ("human", "bard")):
        said = [("system", "be brief"), (speaker, "hi"), (assistant, "yo")]
        record = {"id": "x_0", "conversations": [{"from": role, "value": text} for role, text in said]}
        assert parse_conversation(record, "here") == Conversation(expected, "here")


def test_columns_that_a_record_does_not_use_are_null():
    """Parquet gives every turn every key, and older `datasets` a dict of lists."""
    record = {"messages": None, "conversations": {"from": ["human", "gpt"], "value": ["hi", "yo"]}}
    assert parse_conversation(record, "here") == Conversation(
        (Message("user", "hi"), Message("assistant", "yo")), "here"
    )
    both = {"role": None, "content": None, "from": "human", "value": "hi"}
    parsed = parse_conversation(
        {"messages": [both, {"role": "assistant", "content": "yo", "tool_calls": None}]}, "here"
    )
    assert isinstance(parsed, Conversation)


def test_text_parts_are_joined():
    record = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}]}
    record["messages"].append({"role": "assistant", "content": "c"})
    parsed = parse_conversation(record, "here")
    assert isinstance(parsed, Conversation)
    assert parsed.messages[0].content == "ab"


def test_the_last_turn_may_be_the_users():
    parsed = parse_conversation(turns("user", "a", "assistant", "b", "user", "c"), "here")
    assert isinstance(parsed, Conversation)
    assert len(parsed.messages) == 3


USER = {"role": "user", "content": "u"}
SKIPPED = [
    ({"conversations": []}, NO_TURNS),  # B04
    ([{"assistant": "x"}], NOT_AN_OBJECT),
    (turns("assistant", "x"), ASSISTANT_FIRST),  # B04
    (turns("system", "s"), NO_ASSISTANT),  # B04
    (turns("system", "s", "assistant", "x"), ASSISTANT_FIRST),
    (
        {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": None, "tool_calls": [1]}]},
        TOOLS,
    ),
    ({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": None}]}, NO_TEXT),  # B06
    ({"messages": [{"role": "user", "content": "u"}, {"role": "assistant"}]}, NO_TEXT),  # B06
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "x"}]}, NO_TEXT),
    (turns("user", "u", "tool", "t", "assistant", "x"), TOOLS),
    (turns("user", "u", "function", "t"), TOOLS),
    (turns("user", "u", "narrator", "x"), UNKNOWN_ROLE),
    ({"messages": [{"content": "u"}]}, UNKNOWN_ROLE),
    ({"messages": ["u"]}, NOT_AN_OBJECT),
    ({"messages": "u"}, NO_TURNS),
    ({"messages": {"role": 3}}, NO_TURNS),
    ({"text": "u"}, NO_TURNS),
    ({}, NO_TURNS),
    (None, NOT_AN_OBJECT),
    ("text", NOT_AN_OBJECT),
    (turns("user", "u", "assistant", " \n"), EMPTY_TURN),
    (turns("user", "", "assistant", "x"), EMPTY_TURN),
    (turns("user", "cut emoji \ud83d", "assistant", "x"), SURROGATE),
    (turns("system", "\udc00", "user", "u", "assistant", "x"), SURROGATE),
    ({"messages": [USER, {"role": "assistant", "content": "x", "reasoning": "cut \ud83d"}]}, SURROGATE),
    ({"messages": [USER, {"role": "assistant", "content": "x", "reasoning": {"effort": "low"}}]}, REASONING_NO_TEXT),
    (turns("user", "u"), NO_ASSISTANT),
    (turns("user", "u", "user", "v", "assistant", "x"), OUT_OF_ORDER),
    (turns("user", "u", "assistant", "x", "assistant", "y"), OUT_OF_ORDER),
    (turns("user", "u", "system", "s", "assistant", "x"), OUT_OF_ORDER),
]


@pytest.mark.parametrize(("record", "reason"), SKIPPED)
def test_what_cannot_be_used_is_skipped_with_a_reason(record: Any, reason: str):
    """B04, B06: counted, never an exception."""
    assert parse_conversation(record, "here:3") == Skipped(reason, "here:3")


def test_reasons_can_be_counted():
    found = Counter(getattr(parse_conversation(record, "x"), "reason", None) for record, _ in SKIPPED)
    assert set(found) == set(REASONS)
    assert found[NO_TEXT] == 3


@pytest.mark.parametrize(
    ("record", "where"),
    [
        (turns("user", "u", "narrator", "x"), "rows.jsonl:3, turn 2: role 'narrator'"),
        ({"conversations": [{"from": "h\ud83d", "value": "u"}]}, "rows.jsonl:3, turn 1: role 'h\\ud83d'"),
        ({"messages": [{"content": "u"}]}, "rows.jsonl:3, turn 1: role None"),
        (turns("user", "u", "assistant", "\ud83d"), "rows.jsonl:3, turn 2: half of a surrogate pair, U+D83D, at cha"),
        (turns("user", "u"), "rows.jsonl:3"),
    ],
)
def test_what_was_found_is_named_with_its_row(record: Any, where: str):
    found = parse_conversation(record, "rows.jsonl:3")
    assert isinstance(found, Skipped)
    assert found.where.startswith(where)


def test_reasoning_is_kept_under_each_of_its_names():
    for key in ("reasoning_content", "reasoning", "thinking"):
        answer = {"role": "assistant", "content": "4", "reasoning_content": None, key: "two and two"}
        found = parse_conversation({"messages": [USER | {key: "nobody's"}, answer]}, "here")
        assert isinstance(found, Conversation)
        assert found.messages == (Message("user", "u"), Message("assistant", "4", "two and two"))
        assert found.messages[1].fields() == {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    for nothing in (None, "", " \n", [], False):
        found = parse_conversation(turns("user", "u", "assistant", "4") | {}, "here")
        again = parse_conversation(
            {"messages": [USER, {"role": "assistant", "content": "4", "reasoning": nothing}]}, "here"
        )
        assert found == again
    assert Message("assistant", "4").fields() == {"role": "assistant", "content": "4"}


def with_ids(**changes: Any) -> dict[str, Any]:
    return {"ids": [5, 6, 7, 8, 9], "supervised": [[1, 3], [4, 5]], "tokenizer": "abc"} | changes


def test_ids_are_taken_as_they_are():
    """B11: the target's own tokens."""
    parsed = parse_conversation(with_ids() | turns("user", "a", "assistant", "b"), "here")
    assert parsed == Conversation(
        (Message("user", "a"), Message("assistant", "b")), "here", (5, 6, 7, 8, 9), ((1, 3), (4, 5)), "abc"
    )
    without_text = parse_conversation(with_ids(), "here")
    assert isinstance(without_text, Conversation)
    assert without_text.messages == ()
    assert parse_conversation(with_ids(supervised=[]), "here") == Skipped(NO_ASSISTANT, "here")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ids": "567"}, "ids must be a list of token ids"),
        ({"ids": [5, True]}, "ids must be a list of token ids"),
        ({"ids": [5, -1]}, "none negative"),
        ({"tokenizer": None}, "without the digest of their tokenizer"),
        ({"supervised": None}, r"a list of \[start, end\) pairs"),
        ({"supervised": [3]}, r"a list of \[start, end\) pairs"),
        ({"supervised": [[1, 6]]}, "within the 5 ids"),
        ({"supervised": [[-1, 2]]}, "within the 5 ids"),
        ({"supervised": [[2, 2]]}, "not empty"),
        ({"supervised": [[3, 4], [1, 2]]}, "in order"),
        ({"supervised": [[1, 3], [2, 4]]}, "apart"),
    ],
)
def test_ids_that_cannot_be_are_an_error(changes: dict[str, Any], said: str):
    with pytest.raises(ConversationError, match=f"^here:7: .*{said}"):
        parse_conversation(with_ids(**changes), "here:7")
