"""From what a user asks for to decoders that are ready to run.

In two steps, so that nothing slow happens before everything cheap has been checked: `open_engine` reads descriptions
and settles plan, devices and lengths; the decoders then load weights. Knows no prompts and no text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from spd_jax.config.run import EngineConfig
from spd_jax.decode.autoregressive import AutoregressiveDecoder
from spd_jax.decode.loop import PipelineDecoder
from spd_jax.generation.scripted import Script, parse_script
from spd_jax.models.decoder import Decoder
from spd_jax.parallel.mesh import stage_mesh
from spd_jax.parallel.platform import set_up_platform
from spd_jax.parallel.stack import make_program, stack_params
from spd_jax.parallel.watch import Watch
from spd_jax.plan import StagePlan, make_plan
from spd_jax.speculation.checkpoint import load_head
from spd_jax.speculation.manifest import HeadManifest, read_manifest
from spd_jax.speculation.module import HeadConfig, SpeculationModule, draft_layer_config, head_from_target
from spd_jax.weights.load import load_decoder, open_target
from spd_jax.weights.mapping import TargetWeights, TensorMap, config_digest
from spd_jax.weights.tokenizer import Tokenizer, load_tokenizer

OWN_HEAD = "target"
DEFAULT_DRAFT_LAYERS = 3

Progress = Callable[[int, int, str], None]
"""Called with (bytes done, bytes in all, name of the tensor just done)."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """A target, a plan and a mesh that fit together; no weights are loaded yet.

    `tokenizer` is None for a model without one (it decodes ids only); `script` is set for a scripted head; `manifest`
    for a head folder; `max_length` is the longest sequence, prompt included.
    """

    config: EngineConfig
    weights: TargetWeights
    tokenizer: Tokenizer | None
    plan: StagePlan
    mesh: Mesh
    max_length: int
    script: Script | None
    manifest: HeadManifest | None

    @property
    def vocab_size(self) -> int:
        """Embedding rows V."""
        return self.weights.config.vocab_size

    @property
    def num_tokens(self) -> int:
        """Ids that stand for a token; the rest of the vocabulary is padding and never emitted."""
        return self.vocab_size if self.tokenizer is None else min(self.tokenizer.size, self.vocab_size)

    @property
    def simulated(self) -> bool:
        """Whether several devices share one CPU."""
        return self.plan.num_ranks > 1 and all(device.platform == "cpu" for device in self.mesh.devices.flat)

    @property
    def leads(self) -> bool:
        """Whether this process prints and writes (the others compute along)."""
        return jax.process_index() == 0

    def describe_head(self) -> str:
        """The head in a few words."""
        if self.script is not None:
            return f"{self.config.head} (drafts from the autoregressive ids)"
        if self.manifest is None:
            return "made from the target's own weights, untrained"
        return self.config.head

    def with_head(self, head: str) -> Engine:
        """The same target, cut and devices with another head; only the head's description is read.

        The decoder of the result is `decoder.with_head(engine.head(), engine.plan)`, without loading the target again.

        Raises:
            FileNotFoundError, ValueError: as `open_engine`; a head folder for another cut (give --stages or --plan).
        """
        script, manifest = _read_head(head)
        config = dataclasses.replace(self.config, head=head)
        cut = config if manifest is not None else dataclasses.replace(config, stages=None, plan=self.plan.stage_layers)
        plan = _plan(dataclasses.replace(cut, layout=cut.layout or self.plan.layout), self.plan.num_layers, manifest)
        if plan.stage_layers != self.plan.stage_layers:
            raise ValueError(
                f"head {head} is for stages {list(plan.stage_layers)}, head {self.config.head} for "
                f"{list(self.plan.stage_layers)}: give --stages or --plan to run both in the same, or run them apart"
            )
        return dataclasses.replace(self, config=config, plan=plan, script=script, manifest=manifest)

    def pipeline(self, progress: Progress | None = None) -> PipelineDecoder:
        """Load the target and the head onto the mesh."""
        head = self.head()
        program = make_program(self.weights.config, head, self.plan)
        dtype = jnp.dtype(self.config.dtype)
        params = stack_params(
            program, self.weights, head, self.mesh, dtype=dtype, num_tokens=self.num_tokens, progress=progress
        )
        return PipelineDecoder(
            program,
            params,
            self.mesh,
            max_length=self.max_length,
            cycles_per_dispatch=self.config.cycles_per_dispatch,
            prefill_chunk=self.config.prefill_chunk,
            watch=Watch(self.config.patience),
        )

    def baseline(self, progress: Progress | None = None) -> tuple[AutoregressiveDecoder, Decoder]:
        """Load the target onto the first device; the decoder and the model that it runs."""
        model = load_decoder(self.weights, jnp.dtype(self.config.dtype), progress)
        decoder = AutoregressiveDecoder(
            model,
            max_length=self.max_length,
            steps_per_dispatch=self.config.cycles_per_dispatch,
            prefill_chunk=self.config.prefill_chunk,
            num_tokens=self.num_tokens,
            watch=Watch(self.config.patience),
        )
        return decoder, model

    def head(self) -> SpeculationModule:
        """The speculation module: the head folder's, or one made from the target's own weights."""
        target = self.weights.config
        if self.manifest is not None:
            module, _ = load_head(
                self.config.head,
                target_config=target,
                target_digest=config_digest(self.weights),
                tokenizer_digest=None if self.tokenizer is None else self.tokenizer.digest,
                dtype=jnp.dtype(self.config.dtype),
            )
            return module
        config = HeadConfig(
            layer=draft_layer_config(target),
            num_layers=self.plan.num_draft_layers,
            anchors=self.plan.anchors,
            vocab_size=target.vocab_size,
            lm_head="target",
        )
        return head_from_target(config, target, TensorMap(self.weights))


def open_engine(config: EngineConfig) -> Engine:
    """Settle everything that can be settled without reading weights.

    With `config.devices` this must run before the first use of JAX's devices.

    Raises:
        FileNotFoundError: no target, or no head, is there.
        ValueError: a config, head or plan that does not fit the target; too few devices (says how many were found and
            how to get more); a `max_length` beyond the model's positions.
        TimeoutError: with `config.coordinator`, process 0 does not answer.
        RuntimeError: devices were to be simulated after JAX had started with fewer.
    """
    script, manifest = _read_head(config.head)
    set_up_platform(
        devices=config.devices,
        compilation_cache=config.compilation_cache,
        coordinator=config.coordinator,
        num_processes=config.num_processes,
        process_id=config.process_id,
    )
    weights = open_target(config.target)
    plan = _plan(config, weights.config.num_layers, manifest)
    beside = (plan.num_stages, "--layout beside") if plan.layout == "separate" else None
    mesh = stage_mesh(plan.num_ranks, fewer=beside)
    longest = weights.config.context
    if config.max_length is not None and not 1 < config.max_length <= longest:
        raise ValueError(f"max_length must lie in 2..{longest} (the model's positions), found {config.max_length}")
    return Engine(
        config, weights, _tokenizer(config.target), plan, mesh, config.max_length or longest, script, manifest
    )


def _read_head(head: str) -> tuple[Script | None, HeadManifest | None]:
    script = parse_script(head)
    return script, None if script is not None or head == OWN_HEAD else _manifest(head)


def _manifest(head: str) -> HeadManifest:
    try:
        return read_manifest(head)
    except ValueError as error:
        if "is missing" not in str(error):
            raise
        raise FileNotFoundError(
            f"head {head!r} is no head folder ({error}); give a folder, {OWN_HEAD}, oracle, anti or script:1101..."
        ) from error


def _tokenizer(target: str) -> Tokenizer | None:
    try:
        return load_tokenizer(target)
    except FileNotFoundError:  # the target itself is there, so it comes without a tokenizer
        return None


def _plan(config: EngineConfig, num_layers: int, manifest: HeadManifest | None) -> StagePlan:
    if manifest is None:
        if config.stages is None and config.plan is None:
            raise ValueError("give the pipeline's stages: --stages N, or --plan [5,4,4,...] with the layers of each")
        return make_plan(
            num_layers,
            config.stages,
            num_draft_layers=config.num_draft_layers or min(DEFAULT_DRAFT_LAYERS, num_layers),
            layout=config.layout or "separate",
            stage_layers=config.plan,
        )
    head = manifest.plan
    if config.num_draft_layers not in (None, head.num_draft_layers):
        raise ValueError(f"head {config.head} has {head.num_draft_layers} draft layers, not {config.num_draft_layers}")
    cut_given = config.stages is not None or config.plan is not None
    return make_plan(
        num_layers,
        config.stages,
        num_draft_layers=head.num_draft_layers,
        layout=config.layout or head.layout,
        stage_layers=config.plan if cut_given else head.stage_layers,
        anchors=head.anchors,
    )
