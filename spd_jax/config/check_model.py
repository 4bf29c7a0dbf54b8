"""What a user asks of infer/check_model.py: the fields of its command line, and nothing else."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class CheckModelConfig:
    """One run of infer/check_model.py: our hidden states and logits of a text beside those of transformers.

    Args:
        target: the model: a folder with config.json and safetensors, a .gguf file, package:name/file.gguf or a hub id.
        prompt: the text; encoded by the model's tokenizer, without a chat template.
        prompt_ids: token ids in place of a text, as 1 2 3 or [1, 2, 3].
        tolerance: largest difference that counts as rounding, as a share of the spread (standard deviation) of what is
            compared.
    """

    target: str
    prompt: str = "The quick brown fox jumps over the lazy dog. In 1969, 3 people flew to the moon"
    prompt_ids: tuple[int, ...] | None = None
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        if self.tolerance <= 0:
            raise ValueError(f"tolerance must be above 0, found {self.tolerance}")
        if self.prompt_ids is not None and not self.prompt_ids:
            raise ValueError("prompt_ids is empty: give at least one token id")
