"""The library call: text in, text and counts out, whole, in pieces and in batches; and the README's own lines."""

import re
from pathlib import Path
from typing import Any

import pytest

import spd_jax
from spd_jax.config.run import EngineConfig, GenerateConfig
from spd_jax.generation.engine import open_engine
from spd_jax.generation.pipeline import TextPipeline
from spd_jax.speculation.checkpoint import save_head
from spd_jax.weights.mapping import config_digest
from tests.byte_text import copy_target

ROOT = Path(__file__).parents[2]
PROMPTS = ["The", "Here is a list of"]
N = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_target(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def head(target: Path) -> Path:
    made = open_engine(EngineConfig(target=str(target), stages=4, devices=5, num_draft_layers=1))
    assert made.tokenizer is not None
    digests = {"target_digest": config_digest(made.weights), "tokenizer_digest": made.tokenizer.digest}
    return save_head(target.parent / "head", made.head(), made.plan, target_name="tiny", **digests)


@pytest.fixture(scope="module")
def pipeline(target: Path, head: Path) -> TextPipeline:
    return spd_jax.open_pipeline(
        str(target), str(head), devices=5, prefill_chunk=16, max_length=128, max_new_tokens=N, eos_ids=[257, 258, 259]
    )


def test_a_text_comes_with_its_counts(pipeline: TextPipeline):
    answer = pipeline.generate(PROMPTS[0])
    assert answer.tokens == len(answer.ids) == len(answer.text) == N
    assert answer.text == bytes(answer.ids).decode()
    assert answer.accepted + answer.rejected == N - 1
    assert answer.alpha == answer.accepted / (N - 1)
    assert answer.s0 == 4 * (N - 1) / answer.cycles
    assert answer.finish_reason == "length"
    assert answer.log_probs is None
    assert answer.counts.startswith(f"{N} tokens in {answer.cycles} cycles, accepted {answer.accepted}")
    short = pipeline.generate(PROMPTS[0], max_new_tokens=1)
    assert (short.text, short.s0, short.alpha) == (answer.text[:1], None, None)


def test_pieces_are_the_text(pipeline: TextPipeline):
    stream = pipeline.stream(PROMPTS[0])
    first = next(stream)
    with pytest.raises(ValueError, match="not complete"):
        _ = stream.answer
    pieces = [first, *stream]
    assert len(pieces) > 1
    assert "".join(pieces) == stream.answer.text == pipeline.generate(PROMPTS[0]).text


def test_a_list_is_answered_in_its_order_whatever_is_decoded_together(pipeline: TextPipeline):
    alone = [pipeline.generate(prompt).ids for prompt in PROMPTS]
    for batch in (1, 2):
        assert [answer.ids for answer in pipeline.generate(PROMPTS, batch=batch)] == alone
    spelled = [[256, *prompt.encode()] for prompt in PROMPTS]
    assert [answer.ids for answer in pipeline.generate(spelled, batch=2)] == alone
    assert pipeline.generate([]) == []


def test_options_are_those_of_the_command_line(pipeline: TextPipeline):
    whole = pipeline.generate(PROMPTS[0])
    stop = whole.text[4:6]
    stopped = pipeline.generate(PROMPTS[0], stop=stop)
    assert (stopped.text, stopped.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    with pytest.raises(ValueError, match="no option max_tokens: there are batch, chat"):
        pipeline.generate(PROMPTS[0], max_tokens=3)
    with pytest.raises(ValueError, match="devices is settled when a pipeline is opened"):
        pipeline.generate(PROMPTS[0], devices=3)
    with pytest.raises(ValueError, match="prompt 2: prompt is empty"):
        pipeline.generate(["a", ""])
    with pytest.raises(ValueError, match=r"prompt 1: expected a text or a list of ids, found \[True\]"):
        pipeline.generate([[True]])


def test_what_cannot_be_opened_is_refused(target: Path):
    with pytest.raises(ValueError, match="no option stage: there are batch"):
        spd_jax.open_pipeline(str(target), stage=4)
    with pytest.raises(ValueError, match="head oracle is a demonstration"):
        spd_jax.open_pipeline(str(target), "oracle", stages=4, devices=5)
    with pytest.raises(AttributeError, match="no attribute 'open_pipelines'"):
        _ = spd_jax.open_pipelines


def readme_block() -> str:
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    return block


def test_the_lines_of_the_readme_run(
    pipeline: TextPipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    opened: list[GenerateConfig] = []

    def open_tiny(target: str, head: str, **options: Any) -> TextPipeline:
        opened.append(GenerateConfig(target=target, head=head, **options))
        return pipeline

    monkeypatch.setattr("spd_jax.generation.pipeline.open_pipeline", open_tiny)
    assert len([line for line in readme_block().splitlines() if line.strip()]) < 10
    exec(compile(readme_block(), "README.md", "exec"), {})
    (config,) = opened
    assert (ROOT / config.head / "head.safetensors").is_file()
    assert config.target in (ROOT / "configs/smollm2_135m/generate.yaml").read_text()
    assert "S0" in capsys.readouterr().out


@pytest.mark.slow
def test_the_lines_of_the_readme_run_as_they_are(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    exec(compile(readme_block(), "README.md", "exec"), {})
    assert "The capital of France is Paris." in capsys.readouterr().out
