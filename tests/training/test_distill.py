"""A run from options and files: what fits is put together, what does not is refused before a folder is made."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spd_jax.config.run import EngineConfig
from spd_jax.decode.options import Options
from spd_jax.evaluation.acceptance import acceptance
from spd_jax.generation.engine import open_engine
from spd_jax.speculation.checkpoint import load_head
from spd_jax.speculation.module import HeadConfig, SpeculationModule, draft_layer_config, head_from_target
from spd_jax.training.distill import Distillation, open_distillation
from spd_jax.training.report import Reporter
from spd_jax.training.trainer import Event
from spd_jax.weights.load import open_target
from spd_jax.weights.mapping import TensorMap, config_digest
from spd_jax.weights.tokenizer import load_tokenizer
from tests.fixtures import DATA
from tests.training.world import conversations, distill_config, make_data, make_target

PROMPT, ANSWERED = 4, 28  # tokens of the one conversation: what is asked, and what the target says
STEPS = 300


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return make_data(tmp_path_factory.mktemp("data") / "some", target, conversations(16), held_out=4.0)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """Other conversations, none held out."""
    return make_data(tmp_path_factory.mktemp("data") / "bare", target, conversations(20)[16:])


def golden() -> tuple[list[int], list[int]]:
    """A prompt, and what the target says to it by itself, as Hugging Face decodes it."""
    prompt = json.loads((DATA / "tiny_llama" / "golden.json").read_text())["prompts"][0]
    assert len(prompt["prompt_ids"]) == PROMPT
    return prompt["prompt_ids"], prompt["autoregressive_ids"][:ANSWERED]


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Distillation:
    """Three hundred steps on one conversation of 32 tokens."""
    prompt, answer = golden()
    spans = [[PROMPT, PROMPT + ANSWERED]]
    record = {"ids": [*prompt, *answer], "supervised": spans, "tokenizer": load_tokenizer(str(target)).digest}
    folder = tmp_path_factory.mktemp("one")
    one = make_data(folder / "data", target, [record])
    options = {"epochs": STEPS, "max_steps": None, "evaluate_every": 0, "save_every": 0, "learning_rate": 3e-3}
    run = open_distillation(distill_config(target, one, folder / "run", **options))
    for _ in run.trainer().run():
        pass
    return run


def loaded(target: Path, head: Path) -> SpeculationModule:
    weights, tokenizer = open_target(str(target)), load_tokenizer(str(target))
    return load_head(
        head,
        target_config=weights.config,
        target_digest=config_digest(weights),
        tokenizer_digest=tokenizer.digest,
        dtype=jnp.float32,
    )[0]


# Training and decoding agree


def test_what_is_learnt_is_accepted(overfitted: Distillation, target: Path):
    """A01: one conversation by heart. Drafts are right in training, at whatever fill, and in the pipeline as well."""
    log = [json.loads(line) for line in (overfitted.path / "log.jsonl").read_text().splitlines()]
    top1 = float(np.mean([line["top1"] for line in log if line["kind"] == "step"][-20:]))
    before = next(line["top1"] for line in log if line["kind"] == "step")
    prompt, answer = golden()
    engine = open_engine(EngineConfig(str(target), head=str(overfitted.path / "last")))
    options = Options(max_new_tokens=ANSWERED, eos_ids=engine.weights.config.eos_token_ids)
    decoder = engine.pipeline()
    found = acceptance(decoder, [prompt], options)
    both = f"top-1 in training {before:.3f}, then {top1:.3f}; in decoding alpha {found.alpha:.3f}, S0 {found.s0:.2f}\n"
    sys.stdout.write(both)  # pytest -rP shows it
    assert decoder.generate([prompt], options).results[0].ids == answer
    assert before < 0.8, both
    assert top1 > 0.95, both
    assert found.alpha > 0.9, both
    assert found.s0 > 3.0, both


def test_the_head_says_what_it_has_seen(overfitted: Distillation):
    """Every token of the answer is predicted once a step."""
    training = json.loads((overfitted.path / "last" / "config.json").read_text())["training"]
    assert (training["step"], training["tokens"], training["supervised"]) == (STEPS, 32 * STEPS, STEPS * ANSWERED)
    assert training["settings"]["epochs"] == STEPS
    assert "out" not in training["settings"]


def test_a_warm_start_takes_the_head_and_a_new_optimiser(overfitted: Distillation, target: Path, data: Path):
    """Its parameters, its architecture whatever else is asked for, and what it has seen."""
    head = overfitted.path / "last"
    run = open_distillation(distill_config(target, data, overfitted.path.parent / "warm", head=str(head), stages=2))
    assert run.earlier == {"earlier_tokens": 32 * STEPS, "earlier_supervised": STEPS * ANSWERED}
    assert f"head from {head} (8,400 supervised tokens seen), with a new optimiser: 4 stages" in run.describe()
    trainer = run.trainer()
    assert trainer.describe() == "4 steps"
    wanted = nnx.state(loaded(target, head))
    for (path, a), b in zip(jax.tree.leaves_with_path(trainer.state.params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(trainer.state.optimizer))


# What a user sees


def test_a_step_is_a_line_from_time_to_time(overfitted: Distillation, monkeypatch: pytest.MonkeyPatch):
    reporter, now = Reporter(overfitted), [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    values = {"loss": 1.25, "gradient_norm": 0.5, "tokens_per_second": 123.4, "eta_seconds": 3723.9}
    step = Event("step", 7, {**values, "supervised": 1000, "earlier_supervised": 234})
    said = "loss 1.2500, gradient 0.50, 123 tokens/s, 1,234 supervised tokens seen, 1:02:03 left"
    assert reporter.line(step) == f"step 7: {said}"
    assert reporter.line(step) is None
    assert reporter.status(step) == said
    now[0] += 31
    assert reporter.line(step) == f"step 7: {said}"
    assert reporter.line(Event("decoding", 8, {"s0": 1.5, "alpha": 0.25})) == "step 8: decoded: s0 1.500, alpha 0.250"
    assert reporter.line(Event("save", 8, {"best": 1.0})) is None
    assert reporter.status(Event("save", 8, {"best": 1.0})) == ""


def test_curves_are_drawn_of_a_run_that_is_stopped(overfitted: Distillation):
    picture = overfitted.path / "curves.png"
    assert not picture.exists()
    with pytest.raises(KeyboardInterrupt), Reporter(overfitted) as reporter:
        raise KeyboardInterrupt
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert reporter.files() == [str(overfitted.path / name) for name in ("last", "log.jsonl", "curves.png")]
    assert not list(overfitted.path.glob(".*"))


# Where training starts


def first_look(target: Path, data: Path, out: Path, **options: Any) -> float:
    trainer = open_distillation(distill_config(target, data, out, **options)).trainer()
    return next(trainer.run()).values["draft_loss"]


@pytest.mark.slow
def test_a_ridge_start_is_ahead_of_the_identity(target: Path, data: Path, tmp_path: Path):
    ridge = first_look(target, data, tmp_path / "ridge")
    identity = first_look(target, data, tmp_path / "identity", projections="identity")
    assert ridge < 0.9 * identity


def test_layers_are_copied_from_where_one_says(target: Path):
    """`first_layer`: the last ones by default."""
    weights = open_target(str(target))
    tensors = TensorMap(weights)
    assert list(tensors) == weights.paths()
    assert len(tensors) == len(weights.paths())
    config = weights.config
    head = HeadConfig(draft_layer_config(config), 1, (0, 2), config.vocab_size)
    for first, wanted in ((None, 7), (0, 0), (3, 3)):
        module = head_from_target(head, config, tensors, first_layer=first)
        found = np.asarray(module.layers[0].mlp.down.weight[...])
        np.testing.assert_array_equal(found, tensors[f"layers.{wanted}.mlp.down.weight"])
    with pytest.raises(ValueError, match="1 layers can be copied from layer 0 to 7 on, found 8"):
        head_from_target(head, config, tensors, first_layer=8)


# Options and files


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows": 3, "training_devices": 2}, "rows 3 of a micro-batch cannot be cut over 2 devices"),
        ({"training_devices": 99}, "asked for 99 devices, found 12"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"first_layer": 8}, "1 layers can be copied from layer 0 to 7 on, found 8"),
        ({"num_draft_layers": 9}, "9 draft layers cannot be copied from 8 target layers"),
        ({"stages": 9}, "9"),
        ({"anchors": (0, 9)}, "9"),
        ({"draft_vocabulary": 1000}, "1000"),
    ],
)
def test_what_cannot_be_trained_leaves_no_folder(
    target: Path, data: Path, tmp_path: Path, options: dict[str, Any], said: str
):
    with pytest.raises(ValueError, match=said):
        open_distillation(distill_config(target, data, tmp_path / "run", **options))
    assert not (tmp_path / "run").exists()


def test_a_head_of_another_target_is_refused(overfitted: Distillation, data: Path, tmp_path: Path):
    other = make_target(tmp_path / "target")
    file = other / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_parameters": {"rope_theta": 5000.0}}))
    config = distill_config(other, data, tmp_path / "run", head=str(overfitted.path / "last"))
    with pytest.raises(ValueError, match="not for this target: found digest of the target's config"):
        open_distillation(config)
    assert not (tmp_path / "run").exists()


def test_data_of_another_tokenizer_are_refused(target: Path, data: Path, tmp_path: Path):
    other = shutil.copytree(target, tmp_path / "target")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<unused>", "<free>"))
    with pytest.raises(ValueError, match="prepared with the tokenizer whose digest is"):
        open_distillation(distill_config(other, data, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_evaluation_needs_conversations_of_its_own(target: Path, data: Path, bare: Path, tmp_path: Path):
    """With evaluation off none are needed, and of several folders one with some will do."""
    with pytest.raises(ValueError, match="prepare with --held_out, or turn evaluation off with --evaluate_every 0"):
        open_distillation(distill_config(target, bare, tmp_path / "run"))
    run = open_distillation(distill_config(target, bare, tmp_path / "run", evaluate_every=0))
    assert run.held_out is None
    assert "data: 4 conversations" in run.describe()
    assert "held out 0" in run.describe()
    config = distill_config(target, data, tmp_path / "both")
    both = open_distillation(dataclasses.replace(config, data=(str(data), str(bare))))
    assert both.held_out is not None
    assert (len(both.data), len(both.held_out)) == (16, 4)


def test_the_draft_vocabulary_is_the_most_frequent_of_the_data(target: Path, data: Path, tmp_path: Path):
    run = open_distillation(distill_config(target, data, tmp_path / "run", draft_vocabulary=8))
    ids = run.head.draft_ids
    assert ids is not None
    assert len(ids) == 8
    assert 257 in ids  # the end of a turn, whatever its share
    assert ord("e") in ids
    assert 0.4 < run.coverage < 0.95
    assert f"draft vocabulary: 8 tokens, {100 * run.coverage:.1f} % of the assistant's tokens" in run.describe()


def test_what_makes_a_run_what_it_is(target: Path, data: Path, bare: Path, tmp_path: Path):
    """Options that change no number may differ when it goes on; any other, and other data, is another run."""
    config = distill_config(target, data, tmp_path / "run")
    assert not open_distillation(config).resumes
    same: dict[str, Any] = {"evaluate_every": 1, "save_every": 1, "keep": 5, "chunk": 32, "tensorboard": True}
    assert open_distillation(dataclasses.replace(config, **same)).resumes
    for changes, said in (
        ({"learning_rate": 1e-3}, "learning_rate was 0.002, now 0.001"),
        ({"max_steps": 5}, "max_steps was 4, now 5"),
        ({"data": (str(data), str(bare))}, "data_digests was"),
    ):
        with pytest.raises(ValueError, match=f"holds another run: {said}"):
            open_distillation(dataclasses.replace(config, **changes))
    assert not open_distillation(dataclasses.replace(config, max_steps=5, overwrite=True)).resumes
