"""What a user asks of an evaluation: heads, prompt files, how to decode, and a folder for what comes of it.

Values only, as in `spd_jax.config.run`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from spd_jax.config.run import DecodingConfig, EngineConfig, PipelineConfig

Turns = Literal["first", "all"]


@dataclasses.dataclass(frozen=True)
class EvaluateConfig(DecodingConfig):
    """One run of infer/evaluate.py: several heads over the same prompts, on one load of the target.

    Args:
        heads: the speculation heads, each a head folder; target (made from the target's own weights, untrained); or,
            to demonstrate exact cycle counts, oracle, anti or script:1101... as in infer/generate.py.
        prompts: JSONL files with turns, prompt or prompt_ids in a line, and question_id and category where there are
            any. The name of a file without its ending is the name of the data set.
        turns: first answers the first turn of a prompt; all answers every turn, with the model's own earlier answers
            as context.
        compare: decode the same prompts autoregressively too, on one device; when greedy, compare the ids.
        out: folder for the samples, the summary and the picture. A second run of the same command goes on where the
            first one ended.
    """

    heads: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    turns: Turns = "first"
    compare: bool = True
    out: str = "out/evaluation"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.heads:
            raise ValueError("heads is empty: give --heads with head folders, target, oracle, anti or script:1101...")
        if not self.prompts:
            raise ValueError("prompts is empty: give --prompts with one JSONL file or more")
        for what, names in (("heads", self.heads), ("prompts", [Path(path).stem for path in self.prompts])):
            twice = [name for name in names if list(names).count(name) > 1]
            if twice:
                raise ValueError(f"{what} holds {twice[0]!r} twice: their results could not be told apart")

    def engine(self, head: str) -> EngineConfig:
        """The engine of one of the heads."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(PipelineConfig)}
        return EngineConfig(**fields, head=head)
