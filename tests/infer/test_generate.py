"""infer/generate.py from end to end on a tiny target: what it prints, what it writes, and exact cycle counts."""

import dataclasses
import io
from pathlib import Path

import pytest

from spd_jax.decode.loop import PipelineDecoder
from spd_jax.generation.run import Decoders
from spd_jax.metrics import expected_cycles
from spd_jax.weights.tokenizer import load_tokenizer
from tests.infer.conftest import PROMPTS, Generate

N, STAGES = 14, 4
TOKENS = ["--max_new_tokens", str(N)]
KEYS = [
    "prompt_ids",
    "ids",
    "text",
    "finish_reason",
    "cycles",
    "accepted",
    "rejected",
    "verdicts",
    "acceptance_rate",
    "s0",
    "prefill_seconds",
    "decode_seconds",
    "autoregressive",
    "equal",
]


def test_a_file_of_prompts_beside_plain_decoding(
    generate: Generate, decoders: Decoders, prompts: Path, target: Path, tmp_path: Path
):
    trace = tmp_path / "trace.png"
    answer = generate(
        "--prompts", str(prompts), "--limit", "2", *TOKENS, "--compare", "true", "--trace", str(trace), "--batch", "2",
        with_decoders=decoders,
    )  # fmt: skip
    assert answer.code == 0, answer.err
    assert answer.err == ""
    summary, results = answer.json["summary"], answer.results
    assert answer.json.keys() == {"summary", "results"}
    tokenizer = load_tokenizer(target)
    for prompt, record in zip(PROMPTS, results, strict=True):
        assert list(record) == KEYS
        assert record["prompt_ids"] == [256, *prompt.encode()]
        assert record["autoregressive"].keys() == {"ids", "decode_seconds"}
        assert record["ids"] == record["autoregressive"]["ids"]
        assert record["equal"] is True
        assert len(set(record["ids"])) > 6  # a text, not one token again and again
        assert record["text"] == tokenizer.decode(record["ids"])
        assert record["finish_reason"] == "length"
        assert record["acceptance_rate"] == (N - 1) / record["cycles"]
        assert record["s0"] == STAGES * record["acceptance_rate"]
        assert record["accepted"] + record["rejected"] == N - 1
        assert (record["verdicts"][0], len(record["verdicts"])) == ("p", N)
        assert [record["verdicts"].count(letter) for letter in "ar"] == [record["accepted"], record["rejected"]]
        assert record["prefill_seconds"] > 0
        assert record["decode_seconds"] > 0
        assert record["text"] in answer.out
        assert prompt in answer.out
    assert summary["tokens"] == 2 * N
    assert summary["cycles"] == sum(record["cycles"] for record in results)
    assert summary["equal"] is True
    for said in ("equal to autoregressive: yes", "S0", "tokens/s", "acceptance rate", "share this machine's cores"):
        assert said in answer.out
    assert trace.read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "trace-2.png").read_bytes().startswith(b"\x89PNG")


def test_a_tree_writes_the_same_text_and_is_counted(generate: Generate, decoders: Decoders, tmp_path: Path):
    trace = tmp_path / "tree.png"
    arguments = ("--prompt", PROMPTS[0], *TOKENS, "--compare", "true", "--width", "3", "--trace", str(trace))
    answer = generate(*arguments, with_decoders=decoders)
    assert answer.code == 0, answer.err
    (record,) = answer.results
    assert list(record) == [*KEYS, "tree"]
    assert record["equal"] is True
    tree = record["tree"]
    assert sum(tree["accepted_by_branch"]) == record["accepted"]
    assert len(tree["accepted_by_branch"]) == 3
    assert tree["full_flushes"] == record["rejected"]
    assert 0 < tree["dead_rows"] < 1
    assert answer.json["summary"]["tree"] == tree
    assert answer.json["summary"]["width"] == 3
    assert "accepted by branch" in answer.out
    assert trace.read_bytes().startswith(b"\x89PNG")
    wrong = generate("--prompt", PROMPTS[0], "--width", "0", with_decoders=decoders)
    assert wrong.code == 2
    assert "width must be at least 1, found 0" in wrong.err


@pytest.mark.parametrize("head", ["oracle", "anti", "script:1110110111011", "script:00", "script:11111111111110"])
def test_scripted_heads_take_exactly_the_cycles_they_must(generate: Generate, decoders: Decoders, head: str):
    answer = generate("--prompt", PROMPTS[0], *TOKENS, "--head", head, with_decoders=decoders)
    assert answer.code == 0, answer.err
    (record,) = answer.results
    bits = {"oracle": "", "anti": "0" * N}.get(head, head.removeprefix("script:")).ljust(N, "1")
    judged = bits[1 : N - 1]  # tokens 2 to N - 1, counted from 1
    assert record["cycles"] == expected_cycles(N, STAGES, judged.count("1"), judged.count("0"))
    assert record["cycles"] == {"oracle": N + STAGES - 2, "anti": STAGES * (N - 1)}.get(head, record["cycles"])
    assert record["accepted"] == bits[1:].count("1")
    assert record["rejected"] == bits[1:].count("0")
    assert record["equal"] is True


def test_one_compilation_serves_all_scripts(generate: Generate, decoders: Decoders):
    arguments = ("--prompt", PROMPTS[0], *TOKENS)
    generate(*arguments, "--head", "oracle", with_decoders=decoders)
    compiled = {mode: program.count() for mode, program in decoders.pipeline._dispatches.items()}
    generate(*arguments, "--head", "script:10110", with_decoders=decoders)
    assert {mode: program.count() for mode, program in decoders.pipeline._dispatches.items()} == compiled


STOPPED = ("--head", "script:1101101101101101", "--max_new_tokens", "30", "--stop", "r a", "zzz")


def test_a_stop_string_cuts_ids_and_text_at_one_place(generate: Generate, decoders: Decoders, tmp_path: Path):
    whole = generate("--prompt", PROMPTS[0], *STOPPED[:-3], with_decoders=decoders).results[0]
    assert "r a" in whole["text"]
    answer = generate("--prompt", PROMPTS[0], *STOPPED, "--trace", str(tmp_path / "x.png"), with_decoders=decoders)
    (record,) = answer.results
    kept = whole["text"].index("r a") + len("r a")
    assert record["ids"] == whole["ids"][:kept] == record["autoregressive"]["ids"]
    assert record["text"] == whole["text"][: whole["text"].index("r a")]
    assert record["finish_reason"] == "stop"
    assert record["text"] + "\n[" in answer.out
    bits = "1101101101101101".ljust(kept, "1")[1 : kept - 1]
    assert record["cycles"] == expected_cycles(kept, STAGES, bits.count("1"), bits.count("0"))


@pytest.mark.slow
def test_a_stop_string_that_is_a_special_token_ends_a_text(generate: Generate, decoders: Decoders, marked: Path):
    """The token has no text, so the string never comes."""
    two_ends = ("--eos_ids", "257", "258")  # with the stop as many as other runs have
    prompt = ("--target", str(marked), "--prompt", "The", "--compare", "true", *TOKENS)
    answer = generate(*prompt, *two_ends, "--stop", "<mark>", "zzz", with_decoders=decoders)
    assert (answer.code, answer.err) == (0, "")
    (record,) = answer.results
    assert record["finish_reason"] == "stop"
    assert bytes(record["ids"]) == b" server and"
    assert record["text"] == " server an"
    assert record["equal"] is True


def test_cycles_do_not_depend_on_how_often_the_host_looks(generate: Generate, decoders: Decoders):
    expected = generate("--prompt", PROMPTS[0], *STOPPED, with_decoders=decoders).results[0]
    pipeline = decoders.pipeline
    often = PipelineDecoder(
        pipeline.program, pipeline.params, pipeline.mesh, max_length=128, cycles_per_dispatch=3, prefill_chunk=16
    )
    changed = dataclasses.replace(decoders, pipeline=often)
    found = generate("--prompt", PROMPTS[0], *STOPPED, with_decoders=changed).results[0]
    for key in ("ids", "text", "cycles", "accepted", "rejected", "finish_reason"):
        assert found[key] == expected[key]


def test_several_ids_may_end_a_text(generate: Generate, decoders: Decoders):
    answer = generate("--prompt", PROMPTS[0], "--head", "oracle", *TOKENS, "--eos_ids", "[257,101,114]",
                      with_decoders=decoders)  # fmt: skip
    (record,) = answer.results
    assert record["ids"][-1] in (101, 114)
    assert not set(record["ids"][:-1]) & {257, 101, 114}
    assert record["finish_reason"] == "stop"


@pytest.mark.parametrize(("most", "cycles"), [(0, 0), (1, 0), (2, 4)])
def test_few_tokens(generate: Generate, decoders: Decoders, most: int, cycles: int):
    answer = generate("--prompt", PROMPTS[0], "--head", "oracle", "--max_new_tokens", str(most), with_decoders=decoders)
    (record,) = answer.results
    assert (len(record["ids"]), record["cycles"], record["finish_reason"]) == (most, cycles, "length")


@pytest.mark.slow
def test_sampling_is_repeatable_and_records_log_probabilities(generate: Generate, decoders: Decoders):
    arguments = ["--prompt", PROMPTS[0], *TOKENS, "--temperature", "1"]
    arguments += ["--log_probs", "true"]
    first = generate(*arguments, "--seed", "3", with_decoders=decoders)
    again = generate(*arguments, "--seed", "3", with_decoders=decoders)
    other = generate(*arguments, "--seed", "4", with_decoders=decoders)
    assert first.code == 0, first.err
    assert first.results[0]["ids"] == again.results[0]["ids"] != other.results[0]["ids"]
    assert first.results[0]["equal"] is None
    log_probs = first.results[0]["log_probs"]
    assert len(log_probs) == N
    assert all(value <= 0 for value in log_probs)


@pytest.mark.parametrize("arguments", [[], ["--prompt", "-"]])
def test_a_text_on_standard_input_is_a_prompt(
    generate: Generate, decoders: Decoders, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
):
    monkeypatch.setattr("sys.stdin", io.StringIO("The\n"))
    answer = generate(*arguments, *TOKENS, "--head", "oracle", with_decoders=decoders)
    assert answer.code == 0, answer.err
    assert answer.results[0]["prompt_ids"] == [256, *b"The"]


def test_records_on_standard_input(generate: Generate, decoders: Decoders, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt_ids": [256, 84]}\n{"prompt": "u"}\n'))
    answer = generate("--prompts", "-", "--limit", "1", *TOKENS, "--head", "oracle", with_decoders=decoders)
    assert [record["prompt_ids"] for record in answer.results] == [[256, 84]]


def test_a_target_without_tokenizer_decodes_ids(generate: Generate, decoders: Decoders, tmp_path: Path):
    from tests.byte_text import TARGET

    path = tmp_path / "ids.jsonl"
    path.write_text('{"prompt_ids": [256, 84, 104, 101]}\n')
    arguments = ("--target", str(TARGET), "--prompts", str(path), *TOKENS, "--head", "oracle")
    answer = generate(*arguments, with_decoders=decoders)
    (record,) = answer.results
    assert record["text"] is None
    assert len(record["ids"]) == N
    assert " ".join(map(str, record["ids"])) in answer.out


def test_ids_that_differ_without_reason_end_in_an_error(generate: Generate, decoders: Decoders):
    class Forgetful(type(decoders.plain)):
        def generate(self, prompts, options):
            generation = super().generate(prompts, options)
            generation.results[0].tokens.pop()
            return generation

    assert decoders.plain is not None
    wrong = object.__new__(Forgetful)
    wrong.__dict__.update(decoders.plain.__dict__)
    answer = generate("--prompt", PROMPTS[0], *TOKENS, "--compare", "true", "--head", "oracle",
                      with_decoders=dataclasses.replace(decoders, plain=wrong))  # fmt: skip
    assert answer.code == 1
    assert answer.results[0]["equal"] is False
    assert "equal to autoregressive: no" in answer.out
