"""How many drafts of a head are accepted when it really decodes: the figures that training watches.

Knows ids and decoders, neither text nor files. Training never imports this: the script that trains hands the trainer a
function that decodes with the head as trained so far,

    decoder = engine.pipeline().with_head(module, plan)    # once: load the target, place it on the mesh
    evaluator = lambda module: acceptance(decoder.with_head(module), prompts, options)

and since heads of one make share their programs, only the first call compiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from spd_jax.decode.host import FaultError
from spd_jax.decode.loop import PipelineDecoder
from spd_jax.decode.options import Options, SequenceResult
from spd_jax.metrics import acceptance_rates, alpha, projected_accept_length


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Figures pooled over prompts (docs/metrics.md); `decode_seconds` without compilation and prefill.

    Without an answer of two tokens or more there are no cycles, and rate and S0 are None. `s0_projected` is what alpha
    alone lets expect of long answers, n / (1 + (1 - alpha)(n - 1)).
    """

    prompts: int
    tokens: int
    cycles: int
    accepted: int
    rejected: int
    undrafted: int
    acceptance_rate: float | None
    s0: float | None
    alpha: float
    s0_projected: float | None
    decode_seconds: float


def acceptance(
    decoder: PipelineDecoder,
    prompts: Sequence[Sequence[int]],
    options: Options,
    *,
    batch: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Acceptance:
    """Decode prompts and count; arguments and errors as `decode_in_batches`."""
    results, seconds = decode_in_batches(decoder, prompts, options, batch=batch, progress=progress)
    n = decoder.program.plan.num_stages
    accepted, rejected = sum(r.accepted for r in results), sum(r.rejected for r in results)
    rates = acceptance_rates([(len(r.ids), r.cycles) for r in results], n)
    share = alpha(accepted, rejected)
    return Acceptance(
        prompts=len(results),
        tokens=sum(len(r.ids) for r in results),
        cycles=sum(r.cycles for r in results),
        accepted=accepted,
        rejected=rejected,
        undrafted=sum(r.undrafted for r in results),
        acceptance_rate=rates.rate.pooled,
        s0=rates.s0.pooled,
        alpha=share,
        s0_projected=None if rates.s0.pooled is None else projected_accept_length(n, share),
        decode_seconds=seconds,
    )


def decode_in_batches(
    decoder: PipelineDecoder,
    prompts: Sequence[Sequence[int]],
    options: Options,
    *,
    batch: int = 1,
    progress: Callable[[int], None] | None = None,
) -> tuple[list[SequenceResult], float]:
    """Decode prompts; returns the results and the decode seconds, without compilation and prefill.

    The last batch is filled up with a prompt of its own that is not counted again, so that all run the same programs.

    Args:
        prompts: token ids of each.
        options: one generation request for all; its `sequences` and `forced_drafts` go by prompt.
        batch: prompts decoded together.
        progress: called with the number of prompts done.

    Raises:
        BatchError: a prompt that cannot be decoded.
        FaultError: a rank produced NaN or infinity; names the prompts.
        ValueError: no prompts, or a batch below 1.
    """
    if batch < 1 or not prompts:
        raise ValueError(f"expected prompts and a batch of at least 1, found {len(prompts)} prompts and batch {batch}")
    results: list[SequenceResult] = []
    seconds, size = 0.0, min(batch, len(prompts))
    for start in range(0, len(prompts), size):
        rows = [row if row < len(prompts) else start for row in range(start, start + size)]
        chosen, of_rows = [prompts[row] for row in rows], _rows_of(options, rows)
        decoder.warm_up(chosen, of_rows)
        try:
            generation = decoder.generate(chosen, of_rows)
        except FaultError as error:
            raise FaultError(f"prompts {start} to {min(start + size, len(prompts)) - 1}: {error}") from error
        results += generation.results[: len(prompts) - start]
        seconds += generation.decode_seconds
        if progress is not None:
            progress(len(results))
    return results, seconds


def _rows_of(options: Options, rows: Sequence[int]) -> Options:
    """The options of some of the prompts; each keeps its own random numbers."""
    forced = options.forced_drafts
    return dataclasses.replace(
        options,
        sequences=tuple(rows if options.sequences is None else [options.sequences[row] for row in rows]),
        forced_drafts=None if forced is None else [forced[row] for row in rows],
    )
