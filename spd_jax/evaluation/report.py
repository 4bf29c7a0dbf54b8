"""What an evaluation has to say: one tree for a program, tables for a reader.

The tree is the summary file, and the tables and the picture are made from it alone. docs/metrics.md says what each
figure means. Prints nothing.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from spd_jax.evaluation.figures import grouped
from spd_jax.evaluation.job import AUTOREGRESSIVE, EvaluationJob
from spd_jax.evaluation.samples import Sample
from spd_jax.files import write_whole
from spd_jax.generation.report import shown, write_json

WIDTH, WIDEST_NAME = 132, 22


def summarise(job: EvaluationJob, warm_up_seconds: float = 0.0) -> dict[str, Any]:
    """The tree of the summary file, of the answers that are there.

    `decoders` are by label: what the head is, figures as `figures.grouped`, `finish_reasons`, `exact` (answers equal to
    autoregressive ones, compared, near-ties, and differences that are errors) and `times`. `autoregressive` has the
    times of plain decoding, or is None.
    """
    engine, sampling = job.engine, job.options.sampling
    answers = {
        label: [file.samples[key] for key in job.keys if key in file.samples] for label, file in job.files.items()
    }
    plain = answers.get(AUTOREGRESSIVE)
    decoders = {}
    for label, of_head in job.engines.items():
        n = of_head.plan.num_stages
        decoders[label] = {
            "head": of_head.config.head,
            "num_draft_layers": of_head.plan.num_draft_layers,
            "anchors": list(of_head.plan.anchors),
            **grouped(answers[label], n),
            "finish_reasons": _finish_reasons(answers[label]),
            "exact": _exact(answers[label]),
            "times": _times(answers[label]),
        }
    return {
        "settings": job.settings
        | {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p},
        "num_stages": engine.plan.num_stages,
        "simulated": engine.simulated,
        "missing": sum(job.missing(label) for label in job.files),
        "warm_up_seconds": warm_up_seconds,
        "decoders": decoders,
        "autoregressive": None if plain is None else {"tokens": sum(len(s.ids) for s in plain), **_times(plain)},
    }


def differs(summary: dict[str, Any]) -> bool:
    """Whether some ids differ from the autoregressive ones and no near-tie explains it: an error."""
    return any(decoder["exact"]["errors"] for decoder in summary["decoders"].values())


def write_results(job: EvaluationJob, summary: dict[str, Any]) -> list[Path]:
    """Write the summary and the picture beside the answers, each whole or not at all; returns all files of the run.

    One process of several writes them.
    """
    from spd_jax.evaluation.picture import draw_acceptance  # matplotlib is slow to import

    if not job.engine.leads:
        return []
    folder, suffix = Path(job.config.out), f"T{job.config.temperature:g}"
    written = [file.path for file in job.files.values() if file.samples]
    write_json(folder / f"summary-{suffix}.json", summary)
    write_whole(folder / f"acceptance-{suffix}.png", draw_acceptance(summary))
    return [*written, folder / f"summary-{suffix}.json", folder / f"acceptance-{suffix}.png"]


def _finish_reasons(samples: Sequence[Sample]) -> dict[str, int]:
    reasons = sorted({sample.finish_reason for sample in samples})
    return {reason: sum(sample.finish_reason == reason for sample in samples) for reason in reasons}


def _exact(samples: Sequence[Sample]) -> dict[str, int]:
    compared = [sample for sample in samples if sample.equal is not None]
    near = [sample for sample in compared if sample.difference is not None and sample.difference["near_tie"]]
    equal = sum(sample.equal is True for sample in compared)
    return {
        "equal": equal,
        "compared": len(compared),
        "near_ties": len(near),
        "errors": len(compared) - equal - len(near),
    }


def _times(samples: Sequence[Sample]) -> dict[str, float]:
    """Seconds summed over answers; tokens/s counts what decoding made: all tokens but the first of each answer."""
    seconds = sum(sample.decode_seconds for sample in samples)
    decoded = sum(max(len(sample.ids) - 1, 0) for sample in samples)
    return {
        "prefill_seconds": sum(sample.prefill_seconds for sample in samples),
        "decode_seconds": seconds,
        "tokens_per_second": decoded / seconds if seconds > 0 else 0.0,
    }


def tables(summary: dict[str, Any]) -> str:
    """The summary for a reader; tables are at most 132 columns wide, 116 where names are short."""
    settings, n = summary["settings"], summary["num_stages"]
    sampling = "greedy" if settings["temperature"] == 0.0 else f"temperature {settings['temperature']:g}"
    out = Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False)
    decoders = summary["decoders"]
    out.print(_by_dataset(decoders, f"By data set (n = {n}, {sampling}, at most {settings['max_new_tokens']} tokens)"))
    categories = {
        (label, f"{name}: {category}"): found
        for label, decoder in decoders.items()
        for name, of_set in decoder["by_category"].items()
        if len(of_set) > 1
        for category, found in of_set.items()
    }
    if categories:
        out.print(_figure_table("By category", "category", categories))
    for key, title, column in (
        ("by_context", "By context length (tokens before the token, prompt included)", "context"),
        ("by_place", "By place in the answer (token 1 comes from prefill)", "tokens"),
    ):
        rows = {(label, name): found for label, d in decoders.items() for name, found in d[key].items()}
        if rows:
            out.print(_figure_table(title, column, rows))
    out.print(_wall_clock(summary), "")
    for line in [*_exactness(summary), *_notes(summary)]:
        out.print(line, soft_wrap=True)
    text = out.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    return "\n".join(line.rstrip() for line in text.splitlines()).lstrip()


def _table(title: str, columns: Sequence[str], names: int = 2) -> Table:
    table = Table(
        title="\n" + title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.show_edge = table.pad_edge = False
    for index, column in enumerate(columns):
        is_name = index < names
        table.add_column(
            column, justify="left" if is_name else "right", no_wrap=True, max_width=WIDEST_NAME if is_name else None
        )
    return table


def _by_dataset(decoders: dict[str, Any], title: str) -> Table:
    columns = ["head", "data set", "answers", "tokens", "cycles", "S0", "S0 mean"]
    columns += ["(N-1)/K", "N/K mean", "alpha", "alpha mean", "undrafted"]
    table = _table(title, columns)
    for label, decoder in decoders.items():
        rows = dict(decoder["by_dataset"])
        if len(rows) > 1:
            rows |= {"all, pooled": decoder["overall"], "mean of sets": decoder["mean_of_datasets"]}
        for name, found in rows.items():
            counts = [str(found.get(key, "")) for key in ("samples", "tokens", "cycles")]
            ratios = [shown(found["s0"]), shown(found["s0_mean"]), shown(found["acceptance_rate"], 3)]
            ratios += [shown(found[key], 3) for key in ("published_acceptance_rate_mean", "alpha", "alpha_mean")]
            table.add_row(label if name == next(iter(rows)) else "", name, *counts, *ratios,
                          str(found.get("undrafted", "")))  # fmt: skip
        table.add_section()
    return table


def _figure_table(title: str, column: str, rows: dict[tuple[str, str], dict[str, Any]]) -> Table:
    columns = ["head", column, "answers", "decoded", "S0", "S0 mean", "(N-1)/K"]
    table = _table(title, [*columns, "accepted", "rejected", "alpha", "alpha mean", "undrafted"])
    last = None
    for (label, name), found in rows.items():
        if last not in (None, label):
            table.add_section()
        table.add_row(
            label if label != last else "",
            name,
            *(str(found[key]) for key in ("samples", "decoded")),
            *(shown(found[key]) for key in ("s0", "s0_mean")),
            shown(found["acceptance_rate"], 3),
            *(str(found[key]) for key in ("accepted", "rejected")),
            *(f"{found[key]:.3f}" for key in ("alpha", "alpha_mean")),
            str(found["undrafted"]),
        )
        last = label
    return table


def _wall_clock(summary: dict[str, Any]) -> Table:
    plain, devices = summary["autoregressive"], summary["settings"]["devices"]
    columns = ["decoder", "devices", "prefill s", "decode s", "tokens/s", "to autoregressive"]
    table = _table(f"Wall-clock time (batch {summary['settings']['batch']}, compilation apart)", columns)
    rows = {label: (devices, decoder["times"]) for label, decoder in summary["decoders"].items()}
    if plain is not None:
        rows[AUTOREGRESSIVE] = ("1 device", plain)
    for label, (kind, times) in rows.items():
        speed, base = times["tokens_per_second"], plain["tokens_per_second"] if plain else 0.0
        shown = [f"{times[key]:.1f}" for key in ("prefill_seconds", "decode_seconds", "tokens_per_second")]
        table.add_row(label, kind, *shown, f"{speed / base:.2f}" if base and speed else "")
    return table


def _exactness(summary: dict[str, Any]) -> list[str]:
    lines = []
    for label, decoder in summary["decoders"].items():
        exact = decoder["exact"]
        if exact["compared"]:
            line = f"{label}: ids equal to autoregressive decoding: {exact['equal']} of {exact['compared']}"
            if exact["near_ties"]:
                line += f", {exact['near_ties']} near-ties (rounding decides there, either is right)"
            if exact["errors"]:
                line += f", {exact['errors']} differ without reason: this is an error"
            lines.append(line)
    if summary["autoregressive"] is not None and summary["settings"]["temperature"] > 0.0:
        lines.append("Sampled answers are not compared: they have equal distributions but differ.")
    return lines


def _notes(summary: dict[str, Any]) -> list[str]:
    lines = ["S0 and alpha are pooled (sums first, then divided) unless they say mean (of the answers' own)."]
    missing, no_room = summary["missing"], {}
    for label, decoder in summary["decoders"].items():
        no_room[label] = decoder["finish_reasons"].get("context", 0)
    if any(no_room.values()):
        said = ", ".join(f"{count} of {label}" for label, count in no_room.items() if count)
        lines.append(f"Later turns for which the context had no room, without an answer: {said}.")
    if missing:
        lines.append(f"{missing} answers are missing: run the same command again to go on.")
    if summary["simulated"]:
        lines.append(
            f"{summary['settings']['devices']}: they share this machine's cores, so wall-clock time cannot beat "
            "autoregressive decoding here; S0 is what n real devices would give if draft, heads and exchange were "
            "free and all stages equal."
        )
    return lines
