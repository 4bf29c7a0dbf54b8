"""The tiny published heads under tests/data, and what their own implementation made of them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from spd_jax.models.decoder import Decoder
from spd_jax.plan import StagePlan
from spd_jax.published.convert import from_published
from spd_jax.published.torch_file import read_torch_file
from spd_jax.speculation.module import SpeculationModule
from spd_jax.weights.load import load_decoder, open_target

DATA = Path(__file__).parent / "data"


@dataclasses.dataclass(frozen=True)
class Fixture:
    """A target, its head, the plan they were made for, and the golden outputs."""

    target: Decoder
    head: SpeculationModule
    plan: StagePlan
    golden: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def prompts(self) -> list[dict[str, Any]]:
        return self.golden["prompts"]

    def draft_logits(self, prompt: int) -> np.ndarray:
        """`[cycles, Vd]`"""
        return self.arrays[f"draft_logits_{prompt}"]


def load_fixture(name: str) -> Fixture:
    folder = DATA / name
    target = load_decoder(open_target(folder / "target"), jnp.float32)
    golden = json.loads((folder / "golden.json").read_text())
    with np.load(folder / "golden.npz") as file:
        arrays = dict(file)
    num_stages = golden["num_stages"]
    stage_layers = (target.config.num_layers // num_stages,) * num_stages
    plan = StagePlan(stage_layers, golden["num_draft_layers"], "separate", tuple(golden["anchors"]))
    assert list(plan.anchor_type) == golden["anchor_type_of_depth"]
    head = from_published(read_torch_file(folder / "head_v11.pt"), target.config)
    assert head.plan == plan
    return Fixture(target, head.module, plan, golden, arrays)
