"""What a chat template reads of a message is found out, and text that it would drop is an error."""

import pytest

from spd_jax.weights.template import REASONING_LOST, REFUSED, TEXT_LOST, TemplateRefusal
from spd_jax.weights.tokenizer import Tokenizer
from tests.data_.chat import CHATML, GEMMA, byte_tokenizer

CONTENT = "{{ message.content }}"
PARTS = "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
BOTH = "{% if message.content is string %}" + CONTENT + "{% else %}" + PARTS + "{% endif %}"
FIRST = "{{ message.content[0]['text'] | trim }}"
JOINED = "{{ message.content | map(attribute='text') | join }}"
USERS_PARTS = "{% if message.role == 'user' %}" + PARTS + "{% else %}" + CONTENT + "{% endif %}"
STRICT = "{% if message.content is string %}{{ raise_exception('a list') }}{% endif %}" + PARTS
NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('A system message is required') }}{% endif %}"
MESSAGES = [
    {"role": role, "content": text}
    for role, text in (("system", "be kind"), ("user", "hi"), ("assistant", "yo"), ("user", " and\nso "))
]
ASKED = MESSAGES[1:2]


def reading(content: str, before: str = "") -> Tokenizer:
    """A tokenizer whose template is ChatML with another way to read content."""
    return byte_tokenizer(before + CHATML.replace(CONTENT, content))


@pytest.mark.parametrize("content", [PARTS, BOTH, JOINED, USERS_PARTS, STRICT])
@pytest.mark.parametrize("before", ["", NEEDS_SYSTEM])
def test_content_is_given_as_the_template_wants_it(content: str, before: str):
    assert reading(content, before).chat_text(MESSAGES) == byte_tokenizer(CHATML).chat_text(MESSAGES)


def test_text_is_text_where_both_are_read():
    for content, parts in ((CONTENT, set()), (BOTH, set()), (USERS_PARTS, {"user"}), (PARTS, {"system", "user"})):
        assert reading(content).reads.parts - {"assistant"} == parts
        assert not reading(content).reads.ignored


def test_white_space_and_switches_are_the_templates_own():
    assert "\nand\nso<|im_end|>" in reading(FIRST).chat_text(MESSAGES)
    switched = reading("{{ message.content.replace('/no_think', '') }}")
    asked = [{"role": "user", "content": "what now? /no_think"}]
    assert switched.chat_text(asked) == byte_tokenizer(CHATML).chat_text(asked).replace("/no_think", "")


@pytest.mark.parametrize("content", ["{{ message.text }}", "{{ message.content[0].picture }}", "", "asks"])
def test_a_users_text_that_is_nowhere_is_an_error(content: str):
    """Also one that stands in the header: what is read does not depend on the text."""
    for said in ("hi", "user", "asks"):
        with pytest.raises(TemplateRefusal, match=rf"^{TEXT_LOST}: '{said}', said by the user") as refused:
            reading(content).chat_text([{"role": "user", "content": said}])
        assert refused.value.reason == TEXT_LOST


def test_text_that_is_cut_or_left_out_now_and_then_is_an_error():
    for template in (CHATML.replace(CONTENT, "{{ message.content[:9] }}"), "{{ messages[-1].content }}"):
        tokenizer = byte_tokenizer(template)
        assert tokenizer.chat_text(ASKED)
        with pytest.raises(TemplateRefusal, match=TEXT_LOST):
            tokenizer.chat_text([{"role": "user", "content": "one two three"}, *MESSAGES[2:]])


def test_a_system_message_that_is_never_read_is_an_error():
    tokenizer = reading("{% if message.role != 'system' %}" + CONTENT + "{% endif %}")
    assert tokenizer.chat_text(MESSAGES[1:])
    with pytest.raises(TemplateRefusal, match=rf"^{TEXT_LOST}: 'be kind', said by the system"):
        tokenizer.chat_text(MESSAGES)


THINKS = CHATML.replace(CONTENT, "{% if message.KEY %}<think>{{ message.KEY }}</think>{% endif %}" + CONTENT)
ANSWERED = [*ASKED, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_handed_over_under_the_name_that_is_read(key: str):
    tokenizer = byte_tokenizer(THINKS.replace("KEY", key))
    for given in ("reasoning_content", "reasoning", "thinking"):
        messages = [*ASKED, ANSWERED[1] | {given: "2 + 2"}]
        assert "<|im_start|>assistant\n<think>2 + 2</think>4<|im_end|>" in tokenizer.chat_text(messages)
    assert "think" not in tokenizer.chat_text(ANSWERED)


def test_reasoning_without_a_place_is_refused():
    messages = [*ASKED, ANSWERED[1] | {"reasoning_content": "two and two"}]
    with pytest.raises(TemplateRefusal, match=rf"^{REASONING_LOST}: 'two and two'") as refused:
        byte_tokenizer().chat_text(messages)
    assert refused.value.reason == REASONING_LOST
    assert byte_tokenizer().chat_text(ANSWERED)


def test_a_refusal_stays_one():
    """Nothing is known of a role that no rendering shows."""
    with pytest.raises(TemplateRefusal, match=rf"^{REFUSED}: System role not supported \(chat template of") as refused:
        byte_tokenizer(GEMMA).chat_text(MESSAGES)
    assert refused.value.reason == REFUSED
    with pytest.raises(TemplateRefusal, match=f"^{REFUSED}: no "):
        byte_tokenizer("{{ raise_exception('no') }}").chat_text(ASKED)
