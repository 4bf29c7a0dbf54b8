"""What a user asks of a training run: the fields of a YAML file and of the command line, and nothing else.

Values only; whether data, target and head fit each other is for who opens them to find out.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from spd_jax.config.run import Dtype, PipelineLayout, at_least


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """One run of train/distill.py.

    Args:
        target: the target model, frozen: a folder, a .gguf file, package:name/file.gguf, or a hub id org/name.
        out: folder of the run: states to resume from, best/ and last/ head, log, curves. The same command goes on where
            a run was stopped.
        data: folders written by train/prepare.py. Their training conversations are mixed.
        head: a head folder to go on from, with a new optimiser (its architecture is kept); or target, a head made from
            the target's own weights.
        stages: pipeline stages n that the head is made for.
        plan: layers of each stage, for example [5,4,4] (default: as even as they go).
        layout: where the draft layers live when decoding; separate (n + 1 devices) or beside the first stage (n).
        num_draft_layers: draft layers Ls.
        anchors: hidden state indices that are fused, beginning with 0 (default: the plan's).
        draft_vocabulary: number of tokens the head can propose, the most frequent of the data; 0 is all.
        lm_head: own trains rows of its own, target uses the target's rows, which need not be stored.
        projections: how they start: ridge fits them to what the draft layers expect, identity on the deepest anchor, or
            normal random numbers (standard deviation 0.02).
        first_layer: the first target layer (from 0) that the draft layers are copied from (default: the last ones).
        fit_batches: batches that ridge is fitted on.
        objective: what is minimised; see spd_jax/training/objectives.py.
        score_types: newest scores type 0 only, all scores every feature type.
        deeper_weight: of the other types' loss with score_types all.
        fill_acceptance: how many positions are in flight: as many as where decoding with this share of right drafts
            drafts (a rejection leaves one); null for all of them half of the time, else uniform, as published.
        optimizer: adamw or muon.
        learning_rate: at its highest.
        schedule: how it falls until the last step.
        final_rate: share of the learning rate that it has fallen to behind the last step.
        warmup_steps: steps in which it rises.
        weight_decay: of the optimiser.
        clip: largest norm of the gradient; null for none.
        b1: of Adam's first moment.
        b2: of Adam's second moment.
        epochs: how often the data is seen.
        max_steps: updates at most; null for as many as the epochs have.
        row_length: tokens of a packed row; longer conversations are cut.
        rows: rows of a micro-batch, over all devices.
        accumulate: micro-batches of an update.
        evaluate_every: updates between two looks at held-out data; 0 for never.
        evaluate_batches: micro-batches of a look.
        decode_every: updates between two real decodings; 0 for never.
        decode_prompts: a JSONL file of prompts for them.
        decode_limit: of these prompts, the first so many.
        decode_new_tokens: tokens to generate for each.
        save_every: updates between two saved states.
        keep: saved states to keep.
        training_devices: how many of the devices train (default: all).
        devices: how many devices there are, simulated on the CPU; left out, those that JAX finds.
        placement: replicated keeps all parameters on every device, sharded a slice of each.
        products: dtype of weights in matrix products.
        activations: dtype of what flows between them.
        chunk: positions whose logits exist at a time.
        seed: of the order of the data, the simulated fill and what starts at random.
        compilation_cache: folder where compiled programs are kept for the next run.
        patience: seconds after which a step that makes no progress is given up, with a line that says what waited;
            0 waits for ever.
        tensorboard: write TensorBoard events too.
        overwrite: begin anew where another run is.
    """

    target: str
    out: str
    data: tuple[str, ...] = ()
    head: str = "target"
    stages: int = 4
    plan: tuple[int, ...] | None = None
    layout: PipelineLayout = "separate"
    num_draft_layers: int = 3
    anchors: tuple[int, ...] | None = None
    draft_vocabulary: int = 0
    lm_head: Literal["own", "target"] = "own"
    projections: Literal["ridge", "identity", "normal"] = "ridge"
    first_layer: int | None = None
    fit_batches: int = 32
    objective: Literal["kl", "cross_entropy", "total_variation", "acceptance", "blend"] = "kl"
    score_types: Literal["newest", "all"] = "newest"
    deeper_weight: float = 1.0
    fill_acceptance: float | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-4
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    final_rate: float = 0.0
    warmup_steps: int = 0
    weight_decay: float = 0.0
    clip: float | None = 1.0
    b1: float = 0.9
    b2: float = 0.999
    epochs: int = 1
    max_steps: int | None = None
    row_length: int = 2048
    rows: int = 1
    accumulate: int = 1
    evaluate_every: int = 50
    evaluate_batches: int = 8
    decode_every: int = 0
    decode_prompts: str | None = None
    decode_limit: int = 8
    decode_new_tokens: int = 64
    save_every: int = 50
    keep: int = 2
    training_devices: int | None = None
    devices: int | None = None
    placement: Literal["replicated", "sharded"] = "replicated"
    products: Dtype = "bfloat16"
    activations: Dtype = "float32"
    chunk: int = 128
    seed: int = 0
    compilation_cache: str | None = None
    patience: float = 600.0
    tensorboard: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("no data: give --data FOLDER (one or more), written by train/prepare.py")
        positive = "stages num_draft_layers fit_batches epochs max_steps rows accumulate keep chunk evaluate_batches"
        positive += " decode_limit decode_new_tokens training_devices devices"
        countable = "draft_vocabulary evaluate_every decode_every save_every seed first_layer patience"
        least = {1: positive, 2: "row_length", 0: countable}
        for lowest, names in least.items():
            for name in names.split():
                at_least(lowest, name, getattr(self, name))
        if self.decode_every and self.decode_prompts is None:
            raise ValueError("decode_every needs decode_prompts, a JSONL file of prompts")
