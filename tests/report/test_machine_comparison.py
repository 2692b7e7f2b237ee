"""Compared machines: their entries, ratios, intervals, verdicts, speed-ups, and what cannot be compared."""

import math

import pytest
from fake_engine import fake_environment, fake_epoch, fake_run, fake_spec, fake_training, fake_trial
from fake_records import other_machine, steady

from castwise.analysis.statistics import independent_ratio
from castwise.records.schema import Trial
from castwise.registry.published import find_published
from castwise.report.machine_comparison import (
    ComparedMachine,
    ComparisonRow,
    MachineComparison,
    MachinePrices,
    MachineResult,
    Origin,
    compare_machines,
    measured_machines,
    published_machine,
)
from castwise.report.machine_report import (
    best_lines,
    detail_lines,
    headline,
    remark_lines,
    result_table,
    slower_lines,
    verdict_counts,
    verdict_text,
)
from castwise.spec.trial import MeasurementProtocol, TrialSpec


def elsewhere(trial: Trial, gpu: str = "Other GPU") -> Trial:
    return trial.model_copy(update={"environment": fake_environment(gpu=gpu)})


def compare(*sides: list[Trial], margin: float | None = 0.01) -> MachineComparison:
    machines = measured_machines([Origin(f"side-{number}", trials) for number, trials in enumerate(sides)])
    return compare_machines([machine for of_origin in machines for machine in of_origin], margin)


def rounds(*seconds: float) -> list[Trial]:
    return [fake_trial(fake_spec(repeat=n), step_seconds=(each,) * 5) for n, each in enumerate(seconds)]


def only_row(comparison: MachineComparison) -> ComparisonRow:
    (row,) = comparison.rows
    return row


class TestMachines:
    def test_records_of_two_machines_are_never_mixed(self) -> None:
        ((first, second),) = measured_machines([Origin("both", [steady(), other_machine(steady())])])
        assert [first.name, second.name] == ["Fake GPU", "Slow GPU"]
        assert first.results.keys() == second.results.keys()

    def test_machines_that_share_no_workload_are_one_side(self) -> None:
        twin = fake_environment(gpu_uuid="GPU-2")
        dpn92 = steady(workload="dpn92").model_copy(update={"environment": twin})
        ((one,),) = measured_machines([Origin("both", [steady(), dpn92])])
        assert {entry.spec.workload for entry in one.results.values()} == {"resnet50", "dpn92"}
        again = steady("tf32").model_copy(update={"environment": twin})
        ((_, _),) = measured_machines([Origin("both", [steady(), again])])
        ((_, _),) = measured_machines([Origin("both", [steady(), other_machine(steady(workload="dpn92"))])])

    @pytest.mark.parametrize(
        ("here", "there", "names"),
        [
            ({"gpu": "NVIDIA H200"}, {"gpu": "Tesla T4"}, ["H200", "T4"]),
            ({"host": "node1"}, {"host": "node2"}, ["Fake GPU (host node1)", "Fake GPU (host node2)"]),
            (
                {"cpu": "Intel(R) Xeon(R) Processor (16 cores)", "host": "0123456789ab"},
                {"cpu": "Intel(R) Xeon(R) Processor (64 cores)", "host": "fedcba987654"},
                ["Fake GPU (16-core host)", "Fake GPU (64-core host)"],
            ),
            ({"num_gpus": 1}, {"num_gpus": 4}, ["Fake GPU (1 GPU)", "Fake GPU (4 GPUs)"]),
            ({"torch": "2.11"}, {"torch": "2.12"}, ["Fake GPU (torch 2.11)", "Fake GPU (torch 2.12)"]),
            ({}, {"commit": "fedcba987654"}, ["Fake GPU (before)", "Fake GPU (after)"]),
        ],
    )
    def test_names_say_what_differs(self, here: dict[str, object], there: dict[str, object], names: list[str]) -> None:
        sides = [steady().model_copy(update={"environment": fake_environment(**each)}) for each in (here, there)]
        ((first,), (second,)) = measured_machines([Origin("x/before", [sides[0]]), Origin("x/after", [sides[1]])])
        assert [first.name, second.name] == names

    def test_names_of_one_folder_have_what_is_left(self) -> None:
        newer = steady().model_copy(update={"environment": fake_environment(commit="fedcba987654", driver="9")})
        ((first, second),) = measured_machines([Origin("both", [steady(), newer])])
        assert [first.name, second.name] == ["Fake GPU (driver 0.0-fake)", "Fake GPU (driver 9)"]
        same = measured_machines([Origin("a", [steady()]), Origin("a", [steady()])])
        assert [machine.name for (machine,) in same] == ["Fake GPU #1", "Fake GPU #2"]

    @pytest.mark.parametrize(
        ("one", "other", "is_same"),
        [
            (fake_spec(), fake_spec(device="cuda:1", repeat=4), True),
            (fake_spec(), fake_spec(protocol=MeasurementProtocol(num_blocks=3)), True),
            (fake_spec(), fake_spec(batch_size=8), False),
            (fake_spec(), fake_spec(seed=1), False),
            (fake_spec(), fake_spec(world_size=2, parallelism="ddp"), False),
            (fake_spec(), fake_spec(loss_scale="8.0"), False),
            (fake_training(), fake_training(recipe={"max_steps": 3, "stop_after": 1}), True),
            (fake_training(), fake_training(recipe={"validate_each_epoch": True}), False),
            (fake_training(), fake_training(seed=1), True),
            (fake_training(data_set="mnist"), fake_training(data_set="synthetic:mnist"), True),
        ],
    )
    def test_key_is_what_was_asked_and_not_where_or_how_long(
        self, one: TrialSpec, other: TrialSpec, is_same: bool
    ) -> None:
        assert (MachineResult("", one, "ok").key == MachineResult("", other, "ok").key) == is_same

    def test_no_field_of_a_spec_is_overlooked(self) -> None:
        in_key = {"workload", "precision", "loss_scale", "batch_size", "data_set", "techniques", "world_size"}
        in_key |= {"num_nodes", "parallelism", "kind", "recipe", "seed"}
        not_in_key = {"device", "weights", "protocol", "repeat", "user_model", "memory_limit_bytes"}
        assert in_key | not_in_key == set(TrialSpec.model_fields), "does the new field belong to Entry.key?"

    def test_each_process_and_each_whole_run_gives_a_value(self) -> None:
        ((machine,),) = measured_machines([Origin("here", [steady(repeat=repeat) for repeat in range(3)])])
        (entry,) = machine.results.values()
        assert (len(entry.unit_seconds), entry.run_seconds) == (3, ())
        limits = [MeasurementProtocol(timeout_seconds=seconds) for seconds in (60.0, 600.0, 600.0)]
        seeds = [fake_run(fake_training(seed=seed, protocol=limit)) for seed, limit in enumerate(limits)]
        ((machine,),) = measured_machines([Origin("here", [fake_run(fake_training(recipe={"stop_after": 1})), *seeds])])
        (whole,) = machine.results.values()
        assert (len(whole.run_seconds), whole.cut) == (3, ""), "whole runs go before short ones"
        assert any("measured in several ways" in note for note in machine.notes)

    def test_published_figures_are_whole_runs(self) -> None:
        machine = published_machine(find_published("T4"))
        assert (machine.is_published, machine.name) == (True, "T4 (published)")
        entries = {(e.spec.workload, e.spec.precision, e.spec.batch_size): e for e in machine.results.values()}
        assert entries["wrn-28-10", "fp32", 128].run_seconds == (3437.0,)
        assert entries["mnist-cnn", "fp16-mixed", 1024].baseline_batch == 512
        assert entries["wrn-28-10", "fp16-true", 128].status == "diverged"
        narrowed = published_machine(find_published("T4"), ["mlp-4096"], ["fp32"])
        assert [entry.spec.label for entry in narrowed.results.values()] == ["mlp-4096 fp32 batch 512"]


def test_ratio_is_that_of_independent_means_with_welchs_interval() -> None:
    here, there = (0.30, 0.303, 0.297), (0.1, 0.101, 0.0995)
    result = only_row(compare(rounds(*here), [elsewhere(trial) for trial in rounds(*there)])).results[1]
    expected = independent_ratio(here, there)
    found = (result.ratio.value, result.ratio.low, result.ratio.high)
    assert found == pytest.approx((expected.value, expected.low, expected.high))
    assert result.verdict.kind == "faster"


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
    others = [elsewhere(trial) for trial in rounds(*there)]
    comparison = compare(rounds(0.1, 0.1001, 0.0999), others, margin=margin)
    ((_, result),) = (row.results for row in comparison.rows)
    assert result.verdict is not None
    assert result.verdict.kind == kind
    assert bool(slower_lines(comparison)) == (kind == "slower")


@pytest.mark.parametrize(
    ("seconds", "same_card", "other_card"),
    [
        ((0.102, 0.1021, 0.1019), "▼ slower", "= same"),
        ((0.103, 0.1035, 0.1025), "▼ slower", "? inconclusive"),
        ((0.105, 0.1051, 0.1049), "▼ slower", "▼ slower, this card"),
        ((0.095, 0.0951, 0.0949), "▲ faster", "▲ faster, this card"),
    ],
)
def test_verdict_between_cards_needs_more_than_cards_of_one_model_differ_by(
    seconds: tuple[float, ...], same_card: str, other_card: str
) -> None:
    """A card is the same with other software; of another one the verdict speaks of itself."""

    def beside(**there: object) -> MachineComparison:
        sides = rounds(0.1, 0.1001, 0.0999), rounds(*seconds)
        return compare(
            *(
                [each.model_copy(update={"environment": fake_environment(**where)}) for each in side]
                for side, where in zip(sides, ({"gpu_uuid": "GPU-1"}, there), strict=True)
            ),
            margin=None,
        )

    same, other = beside(gpu_uuid="GPU-1", torch="9.9", host="other"), beside(gpu_uuid="GPU-2")
    assert [each.margin for each in (same, other)] == [0.01, 0.03]
    assert [verdict_text(only_row(each).results[1]) for each in (same, other)] == [same_card, other_card]


def test_one_process_gives_a_ratio_without_a_verdict() -> None:
    comparison = compare([steady()], [other_machine(steady())])
    result = only_row(comparison).results[1]
    assert result.ratio.value == pytest.approx(0.5)
    assert math.isnan(result.ratio.low)
    assert result.verdict.reason == "one process on Fake GPU and on Slow GPU: no interval"
    assert comparison.is_without_intervals
    assert verdict_text(result) == "one run each"
    assert verdict_counts(comparison).startswith("Verdicts: 1 one run each; ")
    several = only_row(compare(rounds(0.1, 0.11), [other_machine(steady())])).results[1]
    assert verdict_text(several) == "one run on a side"


def test_speedups_of_precisions_and_the_headline() -> None:
    trials = [steady("fp32"), steady("bf16-mixed")]
    comparison = compare(trials, [other_machine(trials[0]), elsewhere(trials[1], "Slow GPU")])
    fp32, mixed = comparison.rows
    assert [result.speedup for result in fp32.results] == [None, None]
    speedups = [result.speedup.value for result in mixed.results if result.speedup is not None]
    assert speedups == pytest.approx([2.5, 5.0], rel=0.01)
    assert detail_lines(comparison)[0] == (
        "Speed, Slow GPU over Fake GPU: 0.50× to 1.000×, geometric mean 0.71× over 2 configurations, one run each."
    )


def test_the_answer_is_what_to_take_on_each_machine_and_the_best_of_both() -> None:
    unsafe = [steady("bf16-true", factor=0.1), elsewhere(steady("bf16-true", factor=0.1))]
    here = [steady("fp32"), steady("bf16-mixed"), unsafe[0]]
    there = [elsewhere(steady("fp32", factor=0.2)), elsewhere(steady("bf16-mixed", factor=4.0)), unsafe[1]]
    comparison = compare(here, there)
    said = "resnet50: take bf16-mixed on Fake GPU, fp32 on Other GPU, which is 2.00× as fast"
    assert headline(comparison) == said
    assert comparison.means_of(comparison.machines[1]).best == pytest.approx(2.0, rel=0.01)
    several = compare([*here, steady(workload="dpn92")], [*there, elsewhere(steady(workload="dpn92"))])
    assert headline(several) == "Other GPU is 1.000× to 2.00× as fast as Fake GPU, best against best"
    assert best_lines(several) == [said, "dpn92: take fp32 on both, Other GPU is 1.000× as fast"]


def test_ratios_near_one_have_three_decimals() -> None:
    comparison = compare(rounds(0.1, 0.1001, 0.0999), [elsewhere(each) for each in rounds(0.105, 0.1051, 0.1049)])
    assert headline(comparison) == "resnet50: take fp32 on both, Other GPU is 0.952× as fast"
    table = result_table(comparison)
    (ratio,) = (column for column in table.columns if column.name == "ratio")
    assert ratio.text(table.rows[0]) == "0.952× [0.950, 0.955]"


def test_geometric_means_of_speed_energy_and_work_per_money() -> None:
    trials = [steady("fp32"), steady("bf16-mixed")]
    # With the same readings, steps that are twice as long are the same number of joules a unit.
    machines = [each for side in (trials, [other_machine(each) for each in trials]) for each in sides_of(side)]
    comparison = compare_machines(machines, prices=MachinePrices({"Fake GPU": 4.0, "Slow GPU": 1.0}, 0.5))
    means = comparison.means_of(machines[1])
    assert (means.speed, means.num_speeds) == (pytest.approx(0.5), 2)
    here, there = comparison.rows[0].results
    assert means.energy == pytest.approx(there.joules.value / here.joules.value)
    assert there.energy_ratio.value == pytest.approx(there.joules.value / here.joules.value)
    assert here.units_per_price == pytest.approx(here.throughput.value * 3600 / 4)
    assert here.units_per_energy_price == pytest.approx(3.6e6 / here.joules.value / 0.5)
    assert means.work_per_price == pytest.approx(0.5 * 4)
    assert detail_lines(comparison)[2] == "Work for the same money, Slow GPU over Fake GPU, at 1 and 4 an hour: 2.00×."
    without = compare_machines(machines)
    assert without.means_of(machines[1]).work_per_price is None
    assert without.rows[0].results[0].units_per_price is None


def sides_of(trials: list[Trial]) -> list[ComparedMachine]:
    ((machine,),) = measured_machines([Origin("side", trials)])
    return [machine]


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        ("ok", "diverged", "▼ diverged"),
        ("diverged", "diverged", "– both diverged"),
        ("diverged", "ok", "– diverged on the first"),
        ("oom", "diverged", "– diverged"),
    ],
)
def test_run_that_diverged_has_no_ratio_and_is_never_the_same(here: str, there: str, words: str) -> None:
    sides = [[each.model_copy(update={"status": status}) for each in rounds(0.1, 0.1)] for status in (here, there)]
    result = only_row(compare(sides[0], [elsewhere(each) for each in sides[1]])).results[1]
    assert result.verdict.kind == "incomparable"
    assert (result.ratio, verdict_text(result)) == (None, words)
    assert result.broke == (here == "ok")
    assert result.joules is None or there == "ok"


def test_incomparable_configurations_have_a_reason() -> None:
    comparison = compare([steady(), steady("tf32")], [elsewhere(steady(batch_size=8)), elsewhere(steady("tf32"))])
    assert [row.spec.precision for row in comparison.rows] == ["tf32"]
    first = comparison.incomparable[0]
    assert (first.machine.name, first.labels) == ("Fake GPU", ("resnet50 fp32 batch 256",))
    assert first.reason.endswith("of Other GPU differs in batch size")
    other = compare([steady(), steady("tf32")], [elsewhere(steady("tf32")), elsewhere(steady(workload="dpn92"))])
    assert [each.reason for each in other.incomparable][1] == "no other machine has this workload"
    kinds = compare([steady()], [elsewhere(fake_run(fake_training()))])
    assert kinds.rows == []
    assert "steady-state steps here, a training run on Other GPU" in kinds.incomparable[0].reason


def test_whole_runs_are_compared_by_wall_time_and_cut_ones_by_throughput() -> None:
    whole, cut = fake_training(), fake_training(recipe={"stop_after": 1})
    assert only_row(compare([fake_run(whole)], [elsewhere(fake_run(whole))])).is_whole
    by_rate = only_row(compare([fake_run(cut)], [elsewhere(fake_run(cut))]))
    assert not by_rate.is_whole
    assert by_rate.results[1].ratio is not None
    mixed = only_row(compare([fake_run(whole)], [elsewhere(fake_run(cut))])).results[1]
    assert mixed.ratio is None
    assert mixed.verdict.kind == "incomparable"
    assert "cut short (1 of 2 epochs) on Other GPU" in mixed.verdict.reason
    epochs = (fake_epoch(whole, n).model_copy(update={"validation_seconds": 1e4}) for n in (0, 1))
    slow = only_row(compare([fake_run(whole)], [elsewhere(fake_run(whole, *epochs))])).results[1]
    assert slow.ratio.value < 0.1, "validation is in the wall time"


def test_configuration_that_no_longer_ends_well_is_a_regression() -> None:
    failed = fake_trial(steady().spec, status="oom", message="no memory", step_seconds=())
    comparison = compare([steady(), steady("tf32")], [elsewhere(failed), elsewhere(steady("tf32"))])
    assert slower_lines(comparison) == ["resnet50 fp32 batch 256: oom, and ended well before"]
    (result,) = (result for _, result in comparison.results if result.broke)
    assert result.verdict.reason == "oom on Other GPU: no memory"
    assert slower_lines(compare([failed, steady("tf32")], [elsewhere(failed), elsewhere(steady("tf32"))])) == []


def test_three_machines_are_each_compared_with_the_first() -> None:
    row = only_row(compare([steady()], [other_machine(steady())], [elsewhere(steady(factor=0.5))]))
    assert row.results[0].ratio is None
    assert [result.ratio.value for result in row.results[1:]] == pytest.approx([0.5, 2.0])


def with_runs_of(gpu: str, workload: str = "") -> list[ComparedMachine]:
    """Return a source's machine, and one that ran what it published."""
    published = find_published(gpu)
    specs = [f.spec for f in published.figures if f.spec is not None and f.published.workload.startswith(workload)]
    ((mine,),) = measured_machines([Origin("mine", [fake_run(spec) for spec in specs])])
    return [published_machine(published), mine]


def test_published_figures_are_compared_with_suite_runs() -> None:
    machines = with_runs_of("P100")
    figures = {figure.published.precision: figure.published for figure in find_published("P100").figures}
    row = next(row for row in compare_machines(machines).rows if row.spec.precision == "fp16-mixed")
    first, mine = row.results
    assert mine.ratio.value == pytest.approx(figures["fp16-mixed"].seconds / mine.run_seconds[0])
    assert mine.throughput.value / first.throughput.value == pytest.approx(mine.ratio.value)
    assert first.speedup.value == pytest.approx(figures["fp32"].seconds / figures["fp16-mixed"].seconds)


def test_speedups_are_over_the_batch_that_the_source_paired() -> None:
    comparison = compare_machines(with_runs_of("2080Ti", "fastai-resnet18"))
    row = next(row for row in comparison.rows if row.spec.precision == "fp16-master")
    assert row.baseline_batch == 408
    assert all(result.speedup is not None for result in row.results)


def test_configuration_that_fails_on_several_machines_is_named_once() -> None:
    here = [steady(batch_size=batch) for batch in range(1, 7)]
    failed = [trial.model_copy(update={"status": "oom", "message": "full"}) for trial in here]
    (line,) = remark_lines(compare(failed, *([elsewhere(trial, f"GPU {name}") for trial in here] for name in "AB")))
    named = ", ".join(f"resnet50 fp32 batch {batch}" for batch in range(1, 5))
    assert line.startswith(f"{named} and 2 more: not comparable: ")
