"""What a pipeline would give, as text: kinds of layers, the plans, what else the devices could do, and a verdict."""

from __future__ import annotations

from collections import Counter

from spd_jax.files import write_whole
from spd_jax.generation.report import write_json
from spd_jax.generation.verdicts import RIGHT, WRONG
from spd_jax.metrics import alpha
from spd_jax.models.shapes import num_parameters
from spd_jax.parallel.vocab import share_size
from spd_jax.plan import make_plan
from spd_jax.planning.cost_model import memory_of_ranks, rank_seconds
from spd_jax.planning.job import Planned
from spd_jax.planning.picture import draw_plan
from spd_jax.planning.planner import Candidate, best
from spd_jax.planning.simulator import simulate
from spd_jax.speculation.module import draft_layer_config

MIB, GB, MICRO = 2**20, 1e9, 1e6
PADDING_WORTH_SAYING = 0.25


def plan_report(planned: Planned) -> list[str]:
    """The report as lines of text."""
    config, model = planned.config, planned.model
    setting = planned.costs.setting
    drafted = "all tokens" if setting.draft_vocab is None else f"{setting.draft_vocab:,} tokens"
    return [
        f"model {config.target} ({model.family}): {model.num_layers} layers, hidden size {model.hidden_size}, "
        f"vocabulary {model.vocab_size:,}; {planned.weight_bytes / GB:.2f} GB in {config.dtype}",
        f"machine {planned.machine.name} ({planned.machine.description or 'of your own'}), {config.devices} devices; "
        f"{'measured here' if config.measure else 'predicted from its figures'}",
        f"{config.context:,} positions, B = {config.batch}, W = {config.width}, drafts out of {drafted}",
        "",
        *_kind_lines(planned),
        "",
        *_rival_lines(planned),
        "",
        *_candidate_lines(planned),
        "",
        *_cut_lines(planned),
        "",
        *_verdict_lines(planned),
    ]


def _kind_lines(planned: Planned) -> list[str]:
    counts = Counter(planned.model.layers)
    draft, width = draft_layer_config(planned.model), planned.config.width
    rows = [(kind.describe(), count, kind, width) for kind, count in counts.items()]
    draft_rows = planned.best.plan.num_stages * width + 1
    rows.append((f"draft layer ({draft.describe()}) on {draft_rows} rows", 0, draft, draft_rows))
    wide = max(len(name) for name, *_ in rows)
    lines = [f"{'kind':<{wide}}  layers   parameters       MiB         µs"]
    for name, count, kind, on in rows:
        parameters = num_parameters(kind)
        held = planned.costs.setting.itemsize * parameters / MIB
        spent = MICRO * planned.costs.layer(kind, on)
        lines.append(f"{name:<{wide}}  {count or '':>6}  {parameters:>11,}  {held:>8.1f}  {spent:>9,.1f}")
    return lines


def _rival_lines(planned: Planned) -> list[str]:
    config, found = planned.config, planned.rivals
    alone = "" if planned.weight_bytes <= planned.machine.memory else "; its memory does not hold the weights"
    lines = [f"{'without a pipeline':<48}  µs a token  tokens/s"]
    for name, seconds, note in (
        ("token by token, one device", found.autoregressive, alone),
        (f"token by token, tensor-parallel over {config.devices}", found.tensor_parallel, ""),
    ):
        lines.append(f"{name:<48}  {MICRO * seconds:>10,.0f}  {1 / seconds:>8,.0f}{note}")
    for right in config.alphas:
        speed, steps = found.serial_draft(right)
        name = f"the same, serial draft of {steps} steps (at α {right:g})"
        lines.append(f"{name:<48}  {MICRO / speed:>10,.0f}  {speed:>8,.0f}")
    return lines


def _candidate_lines(planned: Planned) -> list[str]:
    """For every number of stages and layout the draft layers that are best."""
    alphas = planned.config.alphas
    speeds = " ".join(f"{f'α {right:g}':>7}" for right in alphas)
    lines = [
        f"{'':<26} {'µs a cycle':>10} {'compute':>9} {'exchange':>9} {'heads':>7} {'enter':>7} {'control':>8} "
        f"{'idle':>5} {'GB a rank':>10} {'published':>10}   tokens/s at {speeds}"
    ]
    groups: dict[tuple[int, str], list[Candidate]] = {}
    for candidate in planned.candidates:
        groups.setdefault((candidate.plan.num_stages, candidate.plan.layout), []).append(candidate)
    for (n, layout), group in groups.items():
        one = best(group, planned.alpha)
        cycle = one.cycle
        parts = [MICRO * cycle.parts[name] for name in ("compute", "exchange", "heads", "enter", "control")]
        speeds = " ".join(f"{one.tokens_per_second(right):>7,.0f}" for right in alphas)
        mark = "*" if one == planned.best else " "
        held = max(cycle.memory) / GB
        lines.append(
            f"{mark} n = {n:<2} {layout:<8} Ls = {one.plan.num_draft_layers:<4} {MICRO * cycle.seconds:>10,.0f} "
            f"{parts[0]:>9,.0f} {parts[1]:>9,.0f} {parts[2]:>7,.0f} {parts[3]:>7,.0f} {parts[4]:>8,.0f} "
            f"{cycle.idle_share:>5.0%} {held:>9.2f}{' ' if planned.fits(one) else '!'} "
            f"{MICRO * one.published_seconds:>10,.0f}               {speeds}"
        )
    if any("! " in line for line in lines):
        lines.append(f"! more than the {planned.machine.memory / GB:.0f} GB of a device")
    return lines


def _cut_lines(planned: Planned) -> list[str]:
    """The best plan: its stages, whether even ones would do, and what its slots hold for nothing."""
    model, plan, costs = planned.model, planned.best.plan, planned.costs
    even = make_plan(model.num_layers, plan.num_stages, num_draft_layers=plan.num_draft_layers, layout=plan.layout)
    slowest, of_even = (max(rank_seconds(model, one, costs)) for one in (plan, even))
    held, used = memory_of_ranks(plan, model, costs.setting.itemsize)
    padding = 1 - sum(used) / (held * len(used))
    layers = f"layers of its stages {list(plan.stage_layers)}"
    if of_even > 1.001 * slowest:
        layers += f"; even ones {list(even.stage_layers)} would be {of_even / slowest:.2f} times as slow"
    vocabulary, drafted = model.vocab_size, costs.setting.draft_vocab or model.vocab_size
    rows, drafts = (share_size(count, plan.num_ranks) for count in (vocabulary, drafted))
    heads = f"{rows:,} of {vocabulary:,} tokens for the target, {drafts:,} of {drafted:,} for the draft"
    lines = [
        f"* {plan.num_stages} stages, {plan.num_draft_layers} draft layers, {plan.layout}: {layers}",
        f"  heads: a rank scores {heads}",
        f"  layer weights a rank: {held / MIB:,.0f} MiB held, {min(used) / MIB:,.0f} to {max(used) / MIB:,.0f} used, "
        f"{100 * padding:.0f} % padding",
    ]
    if padding > PADDING_WORTH_SAYING:
        less = [] if plan.layout == "beside" else ["--layout beside"]
        less += ["stages that repeat the model's pattern of layers", "fewer draft layers"]
        lines.append("  less padding: " + "; ".join(less))
    return lines


def _verdict_lines(planned: Planned) -> list[str]:
    config, found, right = planned.config, planned.best, planned.alpha
    serial, steps = planned.rivals.serial_draft(right)
    speeds = {
        "token by token on one device": 1 / planned.rivals.autoregressive,
        "tensor parallelism": 1 / planned.rivals.tensor_parallel,
        f"tensor parallelism with a serial draft of {steps} steps": serial,
        "the speculative pipeline": found.tokens_per_second(right),
    }
    speed = speeds.pop("the speculative pipeline")
    fastest = max(speeds, key=lambda name: speeds[name])
    times = ", ".join(f"{speed / other:.2f} times {name}" for name, other in speeds.items())
    saved = 1 - found.cycle.seconds / found.published_seconds
    heads = "save" if saved >= 0 else "cost"
    lines = [
        f"best pipeline at α {right:g}: n = {found.plan.num_stages}, {found.plan.layout}, "
        f"{found.plan.num_draft_layers} draft layers; {speed:,.0f} tokens/s",
        f"  {times}",
        f"  fastest on these devices: {'the pipeline' if speed >= speeds[fastest] else fastest}",
        f"  its cycle is bound by {found.cycle.bottleneck}; heads shared by all ranks {heads} {abs(saved):.0%} of the "
        f"published layout's cycle",
    ]
    for other in config.alphas:
        plan = planned.best_at(other).plan
        if plan != found.plan:
            cut = f"n = {plan.num_stages}, {plan.layout}, {plan.num_draft_layers} draft layers"
            lines.append(f"  at α {other:g} it would be {cut}")
    limit, here = planned.break_even, MICRO * planned.latency
    if limit is None:
        lines.append("  tensor parallelism is faster at every latency of an exchange up to 10 ms")
    elif limit == 0.0:
        lines.append("  it beats tensor parallelism whatever the latency of an exchange")
    else:
        lines.append(
            f"  it beats tensor parallelism where an exchange takes {MICRO * limit:.1f} µs and more; here {here:.1f}"
        )
    return lines


def replay_lines(planned: Planned, traces: list[str]) -> list[str]:
    """Recorded answers replayed over the best plan, and what the formula says for the same share of right drafts."""
    config, found = planned.config, planned.best
    n, costs = found.plan.num_stages, planned.costs
    run = simulate(found.plan, found.cycle, traces, batch=config.batch, jitter=config.jitter, shared=costs.shared)
    accepted, rejected = (sum(trace.count(letter) for trace in traces) for letter in (RIGHT, WRONG))
    share = alpha(accepted, rejected)
    formula = config.batch * found.cycle.tokens_per_second(n, share)
    busy = " ".join(f"{part:.0%}" for part in run.busy_stages)
    return [
        "",
        f"replayed: {len(traces)} answers, α {share:.3f}, {run.tokens:,} tokens in {run.cycles:,} cycles, "
        f"{config.batch} at a time, jitter {config.jitter:g}",
        f"  {run.tokens_per_second:,.1f} tokens/s (the formula for long texts without jitter: {formula:,.1f}); "
        f"a token takes {MICRO * run.percentile(50):,.0f} µs (p50), {MICRO * run.percentile(99):,.0f} µs (p99)",
        f"  stages compute {busy} of the time, the draft {run.busy_draft:.0%}",
    ]


def write_outputs(planned: Planned) -> list[str]:
    """Write the files that were asked for; returns their paths."""
    config = planned.config
    written = []
    if config.json is not None:
        write_json(config.json, planned.tree())
        written.append(config.json)
    if config.plot is not None:
        write_whole(config.plot, draw_plan(planned))
        written.append(config.plot)
    return written
