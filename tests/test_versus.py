"""Machines side by side: ratios, intervals, verdicts, speed-ups and refusals."""

import math

import pytest
from fake_engine import fake_environment, fake_epoch, fake_run, fake_spec, fake_training, fake_trial
from fake_records import other_machine, steady

from castwise.analysis.statistics import independent_ratio
from castwise.records.schema import Trial
from castwise.registry.published import find_published
from castwise.report.machine_comparison import ComparisonRow, MachineComparison, compare_machines, headline, tally
from castwise.report.machine_report import reason_lines, refusal_line
from castwise.report.machines import Origin, measured_machines, published_machine


def elsewhere(trial: Trial, **changes: object) -> Trial:
    return trial.model_copy(update={"environment": fake_environment(**{"gpu": "Other GPU"} | changes)})


def beside(*sides: list[Trial], margin: float = 0.01) -> MachineComparison:
    machines = measured_machines([Origin(f"side-{number}", trials) for number, trials in enumerate(sides)])
    return compare_machines([machine for of_origin in machines for machine in of_origin], margin)


def rounds(precision: str, *seconds: float, **changes: object) -> list[Trial]:
    return [
        fake_trial(fake_spec(precision, repeat=repeat, **changes), step_seconds=(each,) * 5)
        for repeat, each in enumerate(seconds)
    ]


def only(comparison: MachineComparison) -> ComparisonRow:
    (line,) = comparison.rows
    return line


def test_a_ratio_is_that_of_independent_means_with_welch_s_interval() -> None:
    here, there = (0.30, 0.303, 0.297), (0.1, 0.101, 0.0995)
    place = only(beside(rounds("fp32", *here), [elsewhere(t) for t in rounds("fp32", *there)])).results[1]
    expected = independent_ratio(here, there)
    assert place.ratio is not None
    assert place.verdict is not None
    assert (place.ratio.value, place.ratio.low, place.ratio.high) == pytest.approx(
        (expected.value, expected.low, expected.high)
    )
    assert place.verdict.kind == "faster"


@pytest.mark.parametrize(
    ("there", "margin", "kind"),
    [
        ((0.1, 0.1001, 0.0999), 0.01, "same"),
        ((0.105, 0.1051, 0.1049), 0.01, "slower"),
        ((0.105, 0.1051, 0.1049), 0.1, "same"),
        ((0.095, 0.0951, 0.0949), 0.01, "faster"),
        ((0.09, 0.11, 0.1), 0.01, "inconclusive"),
        ((0.2,), 0.01, "inconclusive"),
    ],
)
def test_verdicts(there: tuple[float, ...], margin: float, kind: str) -> None:
    others = [elsewhere(trial) for trial in rounds("fp32", *there)]
    comparison = beside(rounds("fp32", 0.1, 0.1001, 0.0999), others, margin=margin)
    (verdict,) = comparison.verdicts
    assert verdict.kind == kind
    assert bool(comparison.slower) == (kind == "slower")


def test_one_process_gives_a_ratio_and_no_verdict_and_that_is_said() -> None:
    comparison = beside([steady()], [other_machine(steady())])
    place = only(comparison).results[1]
    assert place.ratio is not None
    assert place.ratio.value == pytest.approx(0.5)
    assert math.isnan(place.ratio.low)
    assert place.verdict is not None
    assert place.verdict.reason == "one process on Fake GPU and on Slow GPU: no interval"
    assert "no ratio has an interval" in tally(comparison)


def test_precision_s_speed_up_stands_side_by_side() -> None:
    trials = [steady("fp32"), steady("bf16-mixed")]
    comparison = beside(trials, [other_machine(trials[0]), elsewhere_slow(trials[1])])
    mixed = comparison.rows[1]
    gains = [place.speedup.value for place in mixed.results if place.speedup is not None]
    assert gains == pytest.approx([2.5, 5.0], rel=0.01)
    assert [place.speedup for place in comparison.rows[0].results] == [None, None]


def elsewhere_slow(trial: Trial) -> Trial:
    """Return the same trial on the slow GPU, where it is as fast as here."""
    return trial.model_copy(update={"environment": fake_environment(gpu="Slow GPU")})


def test_the_headline_says_it_by_precision() -> None:
    trials = [steady("fp32"), steady("bf16-mixed")]
    comparison = beside(trials, [other_machine(trials[0]), elsewhere_slow(trials[1])])
    assert (
        headline(comparison)
        == "Beside Fake GPU, Slow GPU is 0.50× as fast in fp32 and 1.00× in bf16-mixed, in resnet50."
    )
    several = [steady(workload=name, factor=factor) for name, factor in (("resnet50", 1.0), ("dpn92", 2.0))]
    others = [elsewhere_slow(several[0]), other_machine(several[1])]
    assert (
        headline(beside(several, others))
        == "Beside Fake GPU, Slow GPU is 0.50 to 1.00× as fast in fp32, in 2 workloads."
    )


def test_what_differs_in_more_than_the_machine_is_refused_with_what_it_is() -> None:
    comparison = beside([steady(), steady("tf32")], [elsewhere(steady(batch_size=8)), elsewhere(steady("tf32"))])
    assert [line.spec.precision for line in comparison.rows] == ["tf32"]
    reasons = {(each.machine.name, each.labels, each.reason) for each in comparison.incomparable}
    assert ("Fake GPU", ("resnet50 fp32 batch 256",), "the nearest cell of Other GPU differs in batch size") in reasons
    other = beside([steady(), steady("tf32")], [elsewhere(steady("tf32")), elsewhere(steady(workload="dpn92"))])
    assert [each.reason for each in other.incomparable][1] == "no other machine has this workload"


def test_steady_state_is_never_compared_with_a_training_run() -> None:
    comparison = beside([steady()], [elsewhere(fake_run(fake_training()))])
    assert comparison.rows == []
    assert "steady-state steps here, a training run on Other GPU" in comparison.incomparable[0].reason


def test_whole_runs_are_compared_by_wall_time_and_cut_ones_by_throughput_and_never_mixed() -> None:
    whole, cut = fake_training(), fake_training(recipe={"stop_after": 1})
    by_time = only(beside([fake_run(whole)], [elsewhere(fake_run(whole))]))
    assert by_time.is_whole
    by_rate = only(beside([fake_run(cut)], [elsewhere(fake_run(cut))]))
    assert not by_rate.is_whole
    assert by_rate.results[1].ratio is not None
    place = only(beside([fake_run(whole)], [elsewhere(fake_run(cut))])).results[1]
    assert place.ratio is None
    assert place.verdict is not None
    assert place.verdict.kind == "incomparable"
    assert "cut short (1 of 2 epochs) on Other GPU" in place.verdict.reason


def test_a_slower_validation_is_in_the_ratio_of_whole_runs() -> None:
    spec = fake_training()
    slow = fake_run(
        spec, *(fake_epoch(spec, number).model_copy(update={"validation_seconds": 1e4}) for number in (0, 1))
    )
    place = only(beside([fake_run(spec)], [elsewhere(slow)])).results[1]
    assert place.ratio is not None
    assert place.ratio.value < 0.1


def test_a_cell_that_no_longer_ends_well_is_a_regression_and_one_that_never_did_is_none() -> None:
    failed = fake_trial(steady().spec, status="oom", message="no memory", step_seconds=())
    comparison = beside([steady(), steady("tf32")], [elsewhere(failed), elsewhere(steady("tf32"))])
    ((line, place),) = comparison.slower
    assert (line.spec.precision, place.broke) == ("fp32", True)
    assert place.verdict is not None
    assert place.verdict.reason == "oom on Other GPU: no memory"
    assert beside([failed, steady("tf32")], [elsewhere(failed), elsewhere(steady("tf32"))]).slower == []


def test_three_machines_are_each_compared_with_the_first() -> None:
    comparison = beside([steady()], [other_machine(steady())], [elsewhere(steady(factor=0.5))])
    ratios = [place.ratio.value if place.ratio else None for place in only(comparison).results]
    assert ratios == [None, pytest.approx(0.5), pytest.approx(2.0)]


def test_published_figures_stand_beside_a_run_of_the_suite() -> None:
    figures = {f.published.precision: f for f in find_published("P100").figures}
    runs = [fake_run(f.spec) for f in figures.values() if f.spec is not None]
    machines = [published_machine(find_published("P100")), *measured_machines([Origin("mine", runs)])[0]]
    lines = {line.spec.precision: line for line in compare_machines(machines).rows}
    place = lines["fp16-mixed"].results[1]
    total = sum(epoch.seconds + epoch.validation_seconds for epoch in runs[1].ranks[0].epochs)
    assert place.ratio is not None
    assert place.ratio.value == pytest.approx(figures["fp16-mixed"].published.seconds / total)
    first = lines["fp16-mixed"].results[0]
    assert first.throughput is not None, "the same samples in the published time"
    assert place.throughput is not None
    assert place.throughput.value / first.throughput.value == pytest.approx(place.ratio.value)
    assert first.speedup is not None
    seconds = figures["fp32"].published.seconds, figures["fp16-mixed"].published.seconds
    assert first.speedup.value == pytest.approx((seconds[0] or 0) / (seconds[1] or 1))


def test_speed_ups_are_over_the_batch_that_the_source_paired() -> None:
    published = find_published("2080Ti")
    specs = [f.spec for f in published.figures if f.published.workload == "fastai-resnet18" and f.spec is not None]
    machines = [published_machine(published), *measured_machines([Origin("mine", [fake_run(s) for s in specs])])[0]]
    line = next(line for line in compare_machines(machines).rows if line.spec.precision == "fp16-master")
    assert line.baseline_batch == 408
    assert all(place.speedup is not None for place in line.results)


def test_thousands_of_cells_that_have_no_partner_are_refused_together() -> None:
    here = [steady(batch_size=batch) for batch in range(1, 200)]
    comparison = beside([*here, steady("tf32")], [elsewhere(steady("tf32"))])
    (refusal,) = comparison.incomparable
    assert len(refusal.labels) == 199
    named = "batch 1, resnet50 fp32 batch 2, resnet50 fp32 batch 3, resnet50 fp32 batch 4 and 195 more: "
    assert named in refusal_line(refusal)


@pytest.mark.parametrize(("cells", "more"), [(4, ""), (6, " and 2 more")])
def test_a_cell_that_fails_beside_several_machines_counts_once(cells: int, more: str) -> None:
    here = [steady(batch_size=batch) for batch in range(1, cells + 1)]
    failed = [trial.model_copy(update={"status": "oom", "message": "full"}) for trial in here]
    others = [[elsewhere(trial, gpu=f"GPU {name}") for trial in here] for name in "AB"]
    (line,) = reason_lines(beside(failed, *others))
    named = ", ".join(f"resnet50 fp32 batch {batch}" for batch in range(1, 5))
    assert line.startswith(f"{named}{more}: incomparable: ")
