"""From a configuration to decoders: whose plan it is, what a head folder must match, and what is refused early."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.config.run import EngineConfig
from spd_jax.generation.engine import Engine, open_engine
from spd_jax.speculation.checkpoint import save_head
from spd_jax.weights.mapping import config_digest
from tests.byte_text import TARGET, copy_target


def engine(**fields: Any) -> Engine:
    return open_engine(EngineConfig(**{"target": str(TARGET), "devices": 5} | fields))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head folder with two draft layers for the stages [1, 3, 4]."""
    made = engine(plan=(1, 3, 4), num_draft_layers=2)
    path = tmp_path_factory.mktemp("heads") / "head"
    digest = config_digest(made.weights)
    return save_head(path, made.head(), made.plan, target_digest=digest, tokenizer_digest=None, target_name="tiny")


def test_without_a_head_folder_the_plan_is_the_configurations():
    found = engine(stages=3, layout="beside", num_draft_layers=2)
    assert found.plan.num_stages == 3
    assert (found.plan.layout, found.plan.num_draft_layers, found.plan.num_ranks) == ("beside", 2, 3)
    assert found.mesh.devices.size == 3
    assert (found.simulated, found.tokenizer, found.max_length) == (True, None, 512)
    assert engine(stages=1, layout="beside").simulated is False


def test_a_head_folder_brings_its_plan(head: Path):
    found = engine(head=str(head))
    assert (found.plan.stage_layers, found.plan.num_draft_layers, found.plan.layout) == ((1, 3, 4), 2, "separate")
    decoder = found.pipeline()
    assert decoder.program.plan == found.plan
    assert decoder.params.embedding.dtype == jnp.float32


def test_another_cut_keeps_the_heads_anchors(head: Path):
    anchors = engine(head=str(head)).plan.anchors
    found = engine(head=str(head), stages=4, layout="beside")
    assert (found.plan.num_stages, found.plan.layout, found.plan.anchors) == (4, "beside", anchors)


def test_a_head_for_another_target_is_refused_when_it_is_loaded(head: Path, tmp_path: Path):
    other = copy_target(tmp_path / "other")
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    with pytest.raises(ValueError, match="this head was made for 'tiny', not for this target"):
        engine(target=str(other), head=str(head)).pipeline()


def test_a_head_with_other_draft_layers_is_refused(head: Path):
    with pytest.raises(ValueError, match="has 2 draft layers, not 3"):
        engine(head=str(head), num_draft_layers=3)


def test_a_broken_head_says_which_file(head: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        engine(head=str(tmp_path))
    with pytest.raises(FileNotFoundError, match="give a folder, target, oracle, anti or script"):
        engine(head=str(tmp_path / "nowhere"))


def test_weights_come_in_the_dtype_that_is_asked_for():
    found = engine(plan=(4, 4), dtype="bfloat16", num_draft_layers=1, max_length=100, cycles_per_dispatch=5)
    decoder = found.pipeline()
    assert decoder.params.embedding.dtype == jnp.bfloat16
    assert (decoder.max_length, decoder.cycles_per_dispatch) == (100, 5)


def test_further_heads_share_the_target(head: Path):
    """One load of the target serves a head folder, the untrained head and a script."""
    first = engine(head=str(head))
    others = [first.with_head(name) for name in ("target", "script:10", str(head))]
    assert [other.plan.stage_layers for other in others] == [(1, 3, 4)] * 3
    assert [other.plan.num_draft_layers for other in others] == [3, 3, 2]
    assert [other.script is None for other in others] == [True, False, True]
    assert all(other.weights is first.weights and other.mesh is first.mesh for other in others)
    decoder = first.pipeline()
    own = decoder.with_head(others[0].head(), others[0].plan)
    assert own.params.embedding is decoder.params.embedding
    with pytest.raises(FileNotFoundError, match="head 'nowhere' is no head folder"):
        first.with_head("nowhere")


def test_heads_for_different_cuts_run_apart_or_in_a_given_one(head: Path):
    with pytest.raises(ValueError, match=r"is for stages \[1, 3, 4\], head target for \[4, 4\]: give --stages"):
        dataclasses.replace(engine(plan=(4, 4)), config=EngineConfig(str(TARGET))).with_head(str(head))
    assert engine(plan=(4, 4)).with_head(str(head)).plan.stage_layers == (4, 4)


def test_progress_ends_at_the_whole():
    seen: list[tuple[int, int]] = []
    engine(plan=(4, 4), num_draft_layers=1).baseline(lambda done, total, name: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert np.all(np.diff([done for done, _ in seen]) > 0)


def test_stages_must_be_said():
    with pytest.raises(ValueError, match="give the pipeline's stages: --stages N, or --plan"):
        engine()
