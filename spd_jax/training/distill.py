"""A training run from what a user asks: files opened, checked against each other, and put together.

Knows every part of training and none of decoding; who runs it hands an evaluator in, and shows the trainer's events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spd_jax.config.distill import DistillConfig
from spd_jax.data.mixture import Mixture
from spd_jax.data.packing import BatchStream
from spd_jax.data.prepared import PreparedData, open_prepared
from spd_jax.parallel.platform import set_up_platform
from spd_jax.parallel.watch import Watch
from spd_jax.plan import StagePlan, make_plan
from spd_jax.speculation.checkpoint import load_head, refuse_other_target, save_head
from spd_jax.speculation.manifest import read_manifest
from spd_jax.speculation.module import (
    HeadConfig,
    SpeculationModule,
    copied_layers,
    draft_layer_config,
    head_from_target,
)
from spd_jax.speculation.vocabulary import choose_draft_vocabulary, count_tokens
from spd_jax.training.checkpoints import LOG_FILE, STATES, Log, StateStore, open_run
from spd_jax.training.optimizer import OptimizerOptions, learning_rate, make_optimizer
from spd_jax.training.rows import Fills, make_fills
from spd_jax.training.sharding import data_mesh
from spd_jax.training.start import fit_projections
from spd_jax.training.step import PassOptions, Programs
from spd_jax.training.target import load_frozen_target
from spd_jax.training.trainer import Evaluator, Pace, Trainer, as_rows
from spd_jax.weights.ids import end_ids, unknown_id
from spd_jax.weights.load import Progress, open_target
from spd_jax.weights.mapping import TargetWeights, TensorMap, config_digest
from spd_jax.weights.tokenizer import Tokenizer, load_tokenizer

# Options that may differ when a run goes on: they change no number, or stand in run.json by what they point to.
UNCHANGING = {"out", "devices", "training_devices", "placement", "evaluate_every", "evaluate_batches", "decode_every"}
UNCHANGING |= {"decode_prompts", "decode_limit", "decode_new_tokens", "save_every", "keep", "chunk", "overwrite"}
UNCHANGING |= {"compilation_cache", "patience", "tensorboard", "target", "data", "head"}


@dataclasses.dataclass(frozen=True)
class Distillation:
    """A run that can start: nothing of the target's weights has been read yet.

    `fills` says how full the simulated pipeline is, `earlier` counts the tokens that the head has seen in runs before
    this one.
    """

    config: DistillConfig
    weights: TargetWeights
    tokenizer: Tokenizer
    plan: StagePlan
    head: HeadConfig
    data: Mixture
    held_out: Mixture | None
    coverage: float
    fills: Fills
    earlier: Mapping[str, int]
    resumes: bool

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return Path(self.config.out)

    def trainer(self, evaluator: Evaluator | None = None, progress: Progress | None = None) -> Trainer:
        """Read the target, make the head and compile nothing yet; the state is the newest saved one, if there is one.

        Raises:
            ValueError: weights that are damaged, nothing to learn in the data, or saved states that cannot be read.
        """
        config = self.config
        stream = BatchStream(self.data, rows=config.rows, row_length=config.row_length, seed=config.seed)
        held_out = None
        if self.held_out is not None:
            held_out = BatchStream(self.held_out, rows=config.rows, row_length=config.row_length, seed=0)
        steps, options = self.total_steps(stream), optimizer_options(config)
        fits = config.head == "target" and config.projections == "ridge"
        bounds = (*self.head.anchors, self._first_layer()) if fits else self.head.anchors
        target = load_frozen_target(self.weights, bounds, config.products, progress)
        passes = PassOptions(
            config.objective,
            config.score_types,
            config.deeper_weight,
            config.chunk,
            config.products,
            config.activations,
        )
        module = self._module()
        optimizer = make_optimizer(options, steps)
        mesh = data_mesh(config.training_devices)
        programs = Programs(mesh, module, self.plan, target, optimizer, passes, config.placement)
        store = StateStore(self.path / STATES, config.keep)
        if fits and store.latest() is None:
            last = range(stream.steps_per_epoch - 1, -1, -1)[: config.fit_batches]
            rows = (as_rows(stream.batch_at(index), self.fills.trained, seed=0, step=0) for index in last)
            fit_projections(programs, module, self._first_layer(), rows)
        pace = Pace(
            steps,
            config.accumulate,
            config.evaluate_every,
            config.evaluate_batches,
            config.decode_every,
            config.save_every,
        )
        trainer = Trainer(
            programs,
            module,
            stream,
            held_out,
            pace,
            fills=self.fills,
            seed=config.seed,
            store=store,
            log=Log(self.path / LOG_FILE),
            watch=Watch(config.patience),
            save_head=self._save,
            rate=learning_rate(options, steps),
            evaluator=evaluator,
            earlier=self.earlier,
        )
        trainer.resume()
        return trainer

    def total_steps(self, stream: BatchStream) -> int:
        """Updates of the run."""
        steps = max(self.config.epochs * stream.steps_per_epoch // self.config.accumulate, 1)
        return min(steps, self.config.max_steps or steps)

    def _first_layer(self) -> int:
        return copied_layers(self.head, self.weights.config, self.config.first_layer)[0]

    def _module(self) -> SpeculationModule:
        config = self.config
        if config.head != "target":
            return load_head(
                config.head,
                target_config=self.weights.config,
                target_digest=config_digest(self.weights),
                tokenizer_digest=self.tokenizer.digest,
                dtype=jnp.float32,
            )[0]
        # identity: a little noise, so that the projections' other parts have a gradient of their own
        noise = 0.02 if config.projections == "identity" else 0.0
        module = head_from_target(
            self.head,
            self.weights.config,
            TensorMap(self.weights),
            seed=config.seed,
            noise=noise,
            first_layer=self._first_layer(),
        )
        if config.projections == "normal":
            for index, projection in enumerate(module.projections):
                shape = projection.weight[...].shape
                random = np.random.default_rng([config.seed, index]).standard_normal(shape, np.float32)
                projection.weight.set_value(jnp.asarray(np.float32(0.02) * random))
        return module

    def _save(self, name: str, module: SpeculationModule, training: Mapping[str, Any]) -> None:
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(module))
        graphdef, _ = nnx.split(module)
        save_head(
            self.path / name,
            nnx.merge(graphdef, half),
            self.plan,
            target_digest=config_digest(self.weights),
            tokenizer_digest=self.tokenizer.digest,
            target_name=self.config.target,
            training={**training, "settings": settings(self.config)},
        )

    def describe(self) -> str:
        """What the run is, in a few lines."""
        ids = self.head.draft_vocab_size
        share = f", {100 * self.coverage:.1f} % of the assistant's tokens" if self.head.draft_ids else ""
        rows = "the target's own rows, frozen" if self.head.lm_head == "target" else "rows of its own"
        start = "made from the target"
        if self.config.head != "target":
            seen = self.earlier["earlier_supervised"]
            start = f"from {self.config.head} ({seen:,} supervised tokens seen), with a new optimiser"
        held_out = 0 if self.held_out is None else len(self.held_out)
        return (
            f"head {start}: {self.plan.describe()}\n"
            f"draft vocabulary: {ids:,} tokens{share}; {rows}\n"
            f"data: {len(self.data):,} conversations, {int(self.data.lengths.sum()):,} tokens; held out "
            f"{held_out:,}"
        )


def optimizer_options(config: DistillConfig) -> OptimizerOptions:
    """What of the options is the optimiser's.

    Raises:
        ValueError: as `OptimizerOptions`.
    """
    return OptimizerOptions(
        config.optimizer,
        config.learning_rate,
        config.schedule,
        config.warmup_steps,
        config.final_rate,
        config.weight_decay,
        config.clip,
        config.b1,
        config.b2,
    )


def settings(config: DistillConfig) -> dict[str, Any]:
    """The options that make a run what it is, as JSON."""
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in UNCHANGING}


def open_distillation(config: DistillConfig) -> Distillation:
    """Open what a run needs and see that it fits together; reads no weights.

    With `config.devices` this must run before the first use of JAX's devices.

    Raises:
        FileNotFoundError: target, tokenizer, data or head is not there.
        ValueError: they do not fit each other, or `out` holds another run.
    """
    set_up_platform(devices=config.devices, compilation_cache=config.compilation_cache)
    weights, tokenizer = open_target(config.target), load_tokenizer(config.target)
    parts = [open_prepared(folder, tokenizer_digest=tokenizer.digest) for folder in config.data]
    for part in parts:
        _refuse_unknown_ids(config, part, weights, tokenizer)
    data, held_out = Mixture(parts), _held_out(parts)
    if config.evaluate_every and held_out is None:
        raise ValueError(
            f"{', '.join(config.data)} hold(s) no conversation apart for evaluation: prepare with --held_out, or turn "
            "evaluation off with --evaluate_every 0"
        )
    plan, head, coverage, earlier = _head(config, weights, tokenizer, data)
    fills = make_fills(plan.num_stages, config.fill_acceptance)
    _refuse_misfits(config, weights, tokenizer, head)
    spec = {
        **settings(config),
        "target_digest": config_digest(weights),
        "data_digests": [part.digest for part in parts],
        "head": "target" if config.head == "target" else str(read_manifest(config.head).training),
    }
    resumes = open_run(Path(config.out), spec, overwrite=config.overwrite)
    return Distillation(config, weights, tokenizer, plan, head, data, held_out, coverage, fills, earlier, resumes)


def _held_out(parts: Sequence[PreparedData]) -> Mixture | None:
    """The held-out conversations of those folders that have any."""
    found = [
        open_prepared(part.path, split="held_out") for part in parts if part.manifest["splits"]["held_out"]["rows"]
    ]
    return Mixture(found) if found else None


def _refuse_unknown_ids(
    config: DistillConfig, part: PreparedData, weights: TargetWeights, tokenizer: Tokenizer
) -> None:
    """Raise for prepared data with ids that the target has no embedding for."""
    size = weights.config.vocab_size
    part.refuse_unknown_ids(size, lambda token: f"{unknown_id([token], size, tokenizer)} of {config.target}")


def _refuse_misfits(config: DistillConfig, weights: TargetWeights, tokenizer: Tokenizer, head: HeadConfig) -> None:
    """Raise for what would fail later, before a folder is made for the run."""
    optimizer_options(config)
    devices = data_mesh(config.training_devices).size
    if config.rows % devices:
        raise ValueError(
            f"rows {config.rows} of a micro-batch cannot be cut over {devices} devices: give a multiple, or fewer "
            "devices with --training_devices"
        )
    if config.head == "target":
        copied_layers(head, weights.config, config.first_layer)
        return
    refuse_other_target(
        config.head,
        read_manifest(config.head),
        target_config=weights.config,
        target_digest=config_digest(weights),
        tokenizer_digest=tokenizer.digest,
    )


def _head(
    config: DistillConfig, weights: TargetWeights, tokenizer: Tokenizer, data: Mixture
) -> tuple[StagePlan, HeadConfig, float, dict[str, int]]:
    """Plan and head of a run, coverage of its draft vocabulary, and tokens that the head has seen before."""
    target = weights.config
    if config.head != "target":
        manifest = read_manifest(config.head)
        seen = {
            name: manifest.training.get(name, 0) + manifest.training.get(f"earlier_{name}", 0)
            for name in ("tokens", "supervised")
        }
        earlier = {f"earlier_{name}": value for name, value in seen.items()}
        return manifest.plan, manifest.head, _coverage(manifest.head.draft_ids, data, tokenizer), earlier
    plan = make_plan(
        target.num_layers,
        None if config.plan else config.stages,
        num_draft_layers=config.num_draft_layers,
        layout=config.layout,
        stage_layers=config.plan,
        anchors=config.anchors,
    )
    ids, coverage = None, 1.0
    if config.draft_vocabulary:
        known = min(tokenizer.size, target.vocab_size)
        ends = [token for token in end_ids(target, tokenizer, config.target) if token < known]
        counts = count_tokens(_supervised(data), known)
        chosen = choose_draft_vocabulary(counts, config.draft_vocabulary, must_have=ends)
        ids, coverage = chosen.ids, chosen.coverage
    layer = draft_layer_config(target)
    head = HeadConfig(layer, config.num_draft_layers, plan.anchors, target.vocab_size, ids, config.lm_head)
    return plan, head, coverage, {}


def _supervised(data: Mixture) -> Iterator[np.ndarray]:
    return (example.ids[example.supervised] for example in (data[index] for index in range(len(data))))


def _coverage(ids: Sequence[int] | None, data: Mixture, tokenizer: Tokenizer) -> float:
    if ids is None:
        return 1.0
    counts = count_tokens(_supervised(data), tokenizer.size)
    return float(counts[list(ids)].sum() / max(counts.sum(), 1))
