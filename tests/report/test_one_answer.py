"""From the same records the terminal, Python and a report give the same answer: over all records of benchmarks/."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from castwise.accuracy.advice import answer_of
from castwise.analysis.decide import WORTHWHILE, Advice, changes_of, decide
from castwise.api import Comparison
from castwise.records.collector import gc_disabled
from castwise.records.schema import Trial
from castwise.records.store import load_folder
from castwise.registry.precisions import BASELINE, REFERENCE_WORDS, precision_row
from castwise.report.collection import collect
from castwise.report.conclusions import Answer, answer_table, answers_of, headline
from castwise.report.text_report import present
from castwise.show.run_report import present as present_run

RECORDS = Path(__file__).parents[2] / "benchmarks/records"
FOLDERS = [each for each in sorted(RECORDS.iterdir()) if any(each.rglob("*.json"))]


def run_on(trials: list[Trial], known: tuple[Trial, ...]) -> Comparison:
    """Return what castwise.run returns of a job that ended with these trials, on a machine with these records."""
    store = SimpleNamespace(load_more=lambda _: (dict(enumerate(known)), []))
    job = SimpleNamespace(rule=None, runner=SimpleNamespace(store=store, environment=None))
    rows, advice = answer_of(cast("Any", job), trials)
    return Comparison(tuple(trials), tuple(rows), tuple(advice))


def said(advice: Advice) -> tuple[object, ...]:
    return advice.decision, advice.precision, advice.techniques, advice.speedup, advice.accuracy, advice.sentence


def check_rules(advice: Advice) -> None:
    """Check the rules that hold of every answer, be it of timed steps or of training runs."""
    row, reference = advice.row, advice.reference
    if advice.decision != "take" or row is None or reference is None:
        return
    over = row.over(reference)
    assert over is not None
    assert advice.speedup == over.value >= WORTHWHILE, "the speed-up is over what the sentence names"
    assert REFERENCE_WORDS.get(reference.precision, BASELINE) in advice.sentence
    assert f"{over.value:.2f}×" in advice.sentence
    assert precision_row(row.precision).keeps_float32_weights or advice.is_as_accurate
    size = changes_of(row.trial.spec)
    if not advice.is_less_accurate and "no less accurate" not in advice.why:
        again = decide([each for each in advice.rows if changes_of(each.trial.spec) < size or each is reference])
        simpler = [each.row for each in again if each.decision == "take" and each.row is not None]
        fast = [each for each in simpler if (each.throughput or 0.0) * WORTHWHILE >= (row.throughput or 0.0)]
        assert not fast, "of loops within 3 % it is the simplest"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@gc_disabled()
def test_terminal_python_and_report_answer_alike(folder: Path) -> None:
    trials, _ = load_folder(folder)
    if not trials:
        return  # figures of a script of benchmarks/, and no records of trials
    collection = collect(trials)
    answers = answers_of(collection)
    page = present(collection).text("markdown")
    assert headline(collection, answers) in page.replace("\\", "")
    table = {(row["workload"], row["setting"]): row for row in answer_table(answers).rows}
    for group in collection.groups:
        own = [answer for answer in answers if answer.group is group]
        for answer in own:
            check_rules(answer.advice)
            shown = table[group.title, answer.setting]["take"]
            assert answer.advice.precision is None or loop(answer) in shown
        if group.is_training or not own:
            continue
        measured = [trial for row in group.configurations for trial in row.trials]
        comparison = run_on(measured, collection.trials)
        by_setting = {(each.batch_size, each.num_gpus): each for each in comparison.advice}
        terminal = present_run(comparison.rows, comparison.advice).text("markdown").replace("\\", "")
        document = {each["sentence"]: each for each in comparison.to_dict()["advice"]}
        for answer in own:
            advice = by_setting[answer.advice.batch_size, answer.advice.num_gpus]
            assert said(advice) == said(answer.advice)
            assert advice.sentence.removesuffix(f" {advice.command}") in terminal
            assert document[advice.sentence]["precision"] == advice.precision


def loop(answer: Answer) -> str:
    return REFERENCE_WORDS.get(answer.advice.precision or "", answer.advice.precision or "")
