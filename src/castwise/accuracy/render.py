"""What `castwise accuracy` found as a table and sentences."""

from dataclasses import replace
from typing import Any

from castwise.accuracy.result import AccuracyResult, Metric, Runs
from castwise.analysis.statistics import has_interval
from castwise.analysis.training_metrics import epochs_of
from castwise.registry.techniques import join
from castwise.registry.workloads import find_workload
from castwise.show.console import took_words
from castwise.show.fields import (
    FlatRow,
    column,
    estimate_columns,
    in_tables,
    short_columns,
    short_ratio_text,
    trial_values,
    values_of,
)
from castwise.show.notes import machine_line
from castwise.show.presentation import Grid, Lines, Presentation, paragraph
from castwise.show.table import DataTable, json_document, json_records, plain, short_table_of
from castwise.show.units import format_ratio, pluralize
from castwise.spec.quantities import TOO_NOISY, format_interval, format_share, with_interval
from castwise.spec.recipe import Recipe
from castwise.spec.typed import advised_line
from castwise.spec.user_model import is_object

_ENDS = ("low", "high")
_MANY_SKIPPED = 0.01  # of the steps: more may cost accuracy
_HUGE = 10.0  # times the baseline's score: differences above it have no figures
# All columns, as CSV and JSON have them.
COLUMNS = (
    *(column(name, place="files") for name in ("workload", "data_set")),
    column("precision", short="precision", format=lambda row: row["name"]),
    column("loss_scale"),
    *(column(name, place="files") for name in ("techniques", "batch_size")),
    column("seeds", lambda runs: len(runs.trials), short="runs"),
    column("num_diverged", lambda runs: 0 if runs.failed else sum(score is None for score in runs.scores)),
    column("score", short="score"),
    column("score_spread", "spread"),
    column("area", lambda runs: None if runs.mean_area is None else runs.metric.shown(runs.mean_area)),
    column("difference", short="difference"),
    *(column(f"difference_{end}", place="files") for end in _ENDS),
    column("verdict", lambda runs: verdict_text(runs), short="verdict"),  # noqa: PLW0108  it is defined below
    column("pairs_needed", lambda runs: runs.verdict and runs.verdict.pairs_needed, place="files"),
    *estimate_columns("speedup", "speedup", short="speed-up"),
    *estimate_columns("step_efficiency", "step_efficiency"),
    *estimate_columns("gain", "gain", short="× to score"),
)


def flat_row(runs: Runs) -> dict[str, Any]:
    """Return the values of a precision's runs by field name, as they are shown; a difference above 0 is better."""
    metric, verdict = runs.metric, runs.verdict
    shown = None if runs.mean is None else metric.shown(runs.mean)
    difference = verdict.difference if verdict is not None else None
    ends = {} if difference is None else {end: getattr(difference, end) for end in ("value", *_ENDS)}
    of_difference = {name: metric.shown_difference(value) for name, value in ends.items()}
    return {
        **trial_values(runs.trials[-1]),
        **values_of(COLUMNS, runs),
        "name": runs.name,
        "seeds_text": str(len(runs.trials)),
        "score": shown,
        "score_text": "–" if shown is None else _score_text(shown, metric),
        "difference": of_difference.get("value"),
        "difference_text": _difference_text(of_difference) if of_difference else "",
        **{f"difference_{end}": of_difference.get(end) for end in _ENDS},
    }


def verdict_text(runs: Runs) -> str:
    verdict = runs.verdict
    if verdict is None and runs.failed is not None:
        return runs.failed.status
    if verdict is None:
        return "baseline" if runs.mean is not None else "baseline, diverged"
    # As many as the baseline's are no verdict, unless no run is left.
    has_diverged = verdict.kind == "diverged" or runs.mean is None
    return f"diverged {verdict.num_diverged} of {verdict.num_runs}" if has_diverged else verdict.kind


def sentences(result: AccuracyResult) -> list[str]:
    """Return the answer in words, a sentence or two for each precision compared with the baseline."""
    first = result.baseline
    lines = _why_no_baseline(first)
    # Without a score of the baseline there is nothing to say of the others, but for those that failed.
    lines += [_sentence(each, result) for each in result.runs[1:] if first.mean is not None or each.failed is not None]
    lines += [*_how_sure(result), *filter(None, map(_skipped_steps, result.runs))]
    if (bad := _worse_by_themselves(result)) and not is_object(first.spec.workload):
        line = advised_line("why", first.spec.workload, {"precision": ",".join(bad)}, result.typed)
        lines.append(f"`{line} --numerics` shows in which layers numbers are lost.")
    scores = [score for each in result.runs for score in each.scores]
    if len(scores) > len(result.runs) and len(set(scores)) == 1 and scores[0] is not None:
        lines.append("Every run has the same score, whatever its seed: it does not depend on what the model learned.")
    facts = [trial.facts for trial in result.trials if trial.facts is not None]
    lines += dict.fromkeys(f"Note: {note}." for fact in facts for note in fact.notes)
    if find_workload(first.spec.workload).pretrained and first.spec.weights is None:
        lines.append("The weights were random at first, and not the source's pretrained ones.")
    if result.budget_ended:
        lines.append("The budget ended. The same command with a longer --budget goes on.")
    return lines


def _worse_by_themselves(result: AccuracyResult) -> list[str]:
    """Return the precisions that are less accurate, with nothing else in fewer bits."""
    return [each.name for each in result.runs if each.is_less_accurate and each.name == each.spec.precision]


def _why_no_baseline(runs: Runs) -> list[str]:
    if runs.failed is not None:
        return [f"{runs.name}, the baseline, gave no score: {runs.failed.message.rstrip('.')}."]
    if runs.mean is not None:
        return []
    how = "diverged" if any(trial.status == "diverged" for trial in runs.trials) else "gave no finite score"
    return [f"{runs.name}, the baseline, {how} in every run: nothing can be compared with it."]


def _how_sure(result: AccuracyResult) -> list[str]:
    """Return what the margin is if the score is near 0, how often verdicts are wrong, and what they cannot see.

    Source: benchmarks/accuracy_errors.py.
    """
    given = [each.verdict for each in result.runs if each.verdict is not None and each.verdict.is_decided]
    given = [verdict for verdict in given if verdict.kind != "diverged"]
    lines = ["The mean score is near 0: the margin is a share of the spread between seeds, which is larger."]
    lines = lines if result.metric.is_near_zero else []
    if not given:
        return lines
    several = " (one or more of seven in up to 21 %)" if len(given) > 1 else ""
    line = f"A verdict is wrong in at most 5 % of cases{several}, in up to 14 % if differences are skewed."
    if fewest := min((verdict.num_pairs for verdict in given if verdict.kind == "as good"), default=0):
        unseen = 1 - 0.05 ** (1 / fewest)  # so many runs without one have a chance of 5 %
        line += f" {fewest} pairs cannot rule out that up to {format_share(unseen)} of runs collapse."
    return [*lines, line]


def _skipped_steps(runs: Runs) -> str:
    """Return what share of its steps a worse precision skipped; empty if that is little."""
    if runs.verdict is None or runs.verdict.kind != "worse":
        return ""
    epochs = [epoch for trial in runs.trials for epoch in epochs_of(trial)]
    skipped, steps = sum(epoch.skipped_steps for epoch in epochs), sum(epoch.num_steps for epoch in epochs)
    if not steps or skipped < _MANY_SKIPPED * steps:
        return ""
    share = f"{runs.name} skipped {format_share(skipped / steps)} of its steps"
    return f"{share}, until its loss scale fitted. Longer runs or --loss-scale may do."


def _sentence(runs: Runs, result: AccuracyResult) -> str:
    name, other = runs.name, result.baseline.name
    verdict = runs.verdict
    if verdict is None:
        assert runs.failed is not None
        return f"{name} gave no score: {runs.failed.message.rstrip('.')}."
    compared = compared_text(runs)
    too = f"in {verdict.num_others}" if verdict.num_others else "not"
    diverged = f"{name} diverged in {verdict.num_diverged} of {verdict.num_runs} runs. {other} did {too}."
    match verdict.kind:
        case "diverged":
            return diverged
        case "not enough runs" if verdict.diverges_more:
            return f"{diverged} That may be chance: more --seeds tell."
        case "not enough runs" if not compared:
            pairs = pluralize(verdict.num_pairs, "pair") + " of runs"
            return f"{name} cannot be compared with {other}: {pairs} with a score, and 2 are the fewest."
        case "not enough runs":
            more, needed = "", verdict.pairs_needed
            if needed:
                more = f" About {needed} would do{'' if result.budget_ended else f': --seeds {needed}'}."
            return f"{name} is undecided compared with {other}: {compared}.{more}"
    line = f"{name} is {verdict.kind}{' as' if verdict.kind == 'as good' else ' than'} {other}: {compared}."
    return f"{line} {_sooner(runs, other)}"


def _sooner(runs: Runs, other: str) -> str:
    if runs.gain is None:
        return f"In this length it does not reach {other}'s {runs.metric.name}."
    # Without an interval, some of the runs alone do not reach it.
    interval = format_interval(runs.gain.value, runs.gain.low, runs.gain.high) if has_interval(runs.gain) else TOO_NOISY
    if interval == TOO_NOISY:
        return f"How much sooner it reaches {other}'s {runs.metric.name} is too noisy to say."
    return f"It reaches {other}'s {runs.metric.name} {with_interval(format_ratio(runs.gain.value), interval)} as fast."


def _score_text(value: float, metric: Metric) -> str:
    return f"{100 * value:.2f} %" if metric.name == "accuracy" else f"{value:.4g}"


def difference_unit(metric: Metric) -> str:
    """Return what differences are in, with a space before it."""
    return " points" if metric.name == "accuracy" else " %"


def _difference_text(values: FlatRow) -> str:
    """Return a difference as `+0.02 [−0.05, +0.09]`, in points of accuracy or per cent of the perplexity."""
    texts = {
        name: (f"{100 * value:+z.2f}" if value > -_HUGE else f"<-{100 * _HUGE:g}").replace("-", "−")
        for name, value in values.items()
    }
    return f"{texts['value']} [{texts['low']}, {texts['high']}]"


def compared_text(runs: Runs) -> str:
    """Return the difference from the baseline, over how many pairs, and the margin; empty without a difference."""
    verdict, unit = runs.verdict, difference_unit(runs.metric)
    if verdict is None or verdict.difference is None:
        return ""
    pairs = pluralize(verdict.num_pairs, "pair")
    margin = f"{'usual ' if runs.margin_share == runs.metric.usual_margin else ''}margin {100 * runs.margin_share:.4g}"
    return f"{flat_row(runs)['difference_text']}{unit} over {pairs} of runs, {margin}{unit}"


def headline(result: AccuracyResult) -> str:
    spec = result.baseline.spec
    loop = f", {join(spec.techniques).replace('+', ' + ')}" if spec.techniques else ""
    data = f"on {spec.data_set}, batch {spec.batch_size}" if spec.user_model is None else "on its training set"
    return f"{spec.workload} {data}, {length_text(result.baseline.recipe)}{loop}"


def length_text(recipe: Recipe) -> str:
    """Return how long a run is: "2 of 14 epochs of 20 steps"."""
    short = "" if recipe.num_epochs == recipe.epochs else f"{recipe.num_epochs} of "
    steps = "" if recipe.max_steps is None else f" of {pluralize(recipe.max_steps, 'step')}"
    return f"{short}{pluralize(recipe.epochs, 'epoch')}{steps}"


def table_of(result: AccuracyResult, *, wide: bool = False) -> DataTable[FlatRow]:
    rows: list[FlatRow] = [flat_row(runs) for runs in result.runs]
    titles = {"score": result.metric.name, "difference": f"difference,{difference_unit(result.metric)}"}
    titles["speedup"] = f"× {result.baseline.name}"
    if wide:
        return DataTable([replace(each, title=titles.get(each.name, each.title)) for each in in_tables(COLUMNS)], rows)
    formats = {"gain": lambda row: short_ratio_text("gain")(row) if row["gain_low"] is not None else "–"}
    return short_table_of(
        short_columns(COLUMNS, titles), rows, formats=formats, wraps=("precision", "verdict", "difference")
    )


def present(result: AccuracyResult, *, wide: bool = False) -> Presentation:
    return Presentation(
        [
            paragraph(headline(result)),
            Grid(table_of(result, wide=wide)),
            machine_line(result.runs, is_brief=not wide),
            Lines(sentences(result), gap=True),
            Lines([f"{took_words(len(result.trials), result.num_recorded, result.seconds)}."], "dim"),
        ],
        lambda: DataTable(COLUMNS, [flat_row(runs) for runs in result.runs]),
        lambda: document(result),
    )


def document(result: AccuracyResult) -> dict[str, Any]:
    """Return what `--format json` prints: a row for each precision, the sentences, and whole records."""
    return json_document(
        workload=result.baseline.spec.workload,
        metric=result.metric.name,
        margin=result.baseline.margin_share,
        precisions=[plain(COLUMNS, flat_row(runs)) for runs in result.runs],
        sentences=sentences(result),
        seconds=result.seconds,
        num_recorded=result.num_recorded,
        trials=json_records(result.trials),
    )
