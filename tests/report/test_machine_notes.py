"""One configuration on several machines with the same GPU model: what is said of it, and what is never formed."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import CommandLine
from fake_engine import fake_environment, fake_facts, fake_run, fake_spec, fake_training, fake_trial

from castwise.analysis.result_table import rows_of_runs, rows_of_steps
from castwise.records.schema import Environment, GpuFacts, Trial
from castwise.records.store import Store
from castwise.report.collection import collect
from castwise.suites.tuned_vs_published import tuned_pairs

# As two hosts of benchmarks/records are: named alike, with GPUs of one model.
SMALL = fake_environment(host="vm", cpu="Fake CPU (16 cores)", gpu_uuid="GPU-2f0122bd-39ab")
LARGE = fake_environment(host="vm", cpu="Fake CPU (64 cores)", gpu_uuid="GPU-8bc3c3e6-4a13")
SENTENCE = (
    "lstm-lm tf32 batch 20 was measured on 2 machines with the same GPU model, and they differ by 51 %: "
    "206,689 tokens/s on Fake GPU, 16-core host; 136,536 on Fake GPU, 64-core host."
)


def measured(
    environment: Environment, *rates: float, precision: str = "tf32", started: str = "2000-01-01"
) -> list[Trial]:
    """Return a process for each rate in tokens per second."""
    trials = [
        fake_trial(
            fake_spec(precision, workload="lstm-lm", batch_size=20, repeat=repeat),
            step_seconds=(700 / rate,) * 5,
            facts=fake_facts(units_per_sample=35),
            environment=environment,
        )
        for repeat, rate in enumerate(rates)
    ]
    return [trial.model_copy(update={"started_at": f"{started}T00:00:00.000+00:00"}) for trial in trials]


def notes(*trials: Sequence[Trial]) -> list[tuple[str, bool]]:
    collection = collect([trial for each in trials for trial in each])
    found = collection.machine_notes_of(collection.configurations)
    return [(note.text, note.is_warning) for note in found]


def test_a_figure_that_another_machine_does_not_have_is_a_warning() -> None:
    assert notes(measured(SMALL, 206_689), measured(LARGE, 136_536)) == [(SENTENCE, True)]


def test_one_machine_is_no_note() -> None:
    assert notes(measured(SMALL, 206_689, 200_000)) == []
    newer = SMALL.model_copy(update={"torch": "9.9"})
    assert notes(measured(SMALL, 206_689), measured(newer, 100_000)) == []
    assert notes(measured(SMALL, 206_689), measured(fake_environment(gpu="Slow GPU"), 100_000)) == []


@pytest.mark.parametrize(("rate", "is_warning"), [(102_900, False), (103_200, True)])
def test_figures_without_intervals_may_differ_by_3_percent(rate: float, is_warning: bool) -> None:
    ((text, found),) = notes(measured(SMALL, rate), measured(LARGE, 100_000))
    assert found == is_warning
    assert is_warning or text == (
        "lstm-lm tf32 batch 20 was measured on 2 machines with the same GPU model, "
        "which agree within their intervals, or without intervals within 3 %."
    )


@pytest.mark.parametrize(
    ("rates", "is_warning"), [((100_900, 101_000, 101_100), True), ((95_000, 110_000, 125_000), False)]
)
def test_figures_with_intervals_differ_if_these_are_apart(rates: tuple[float, ...], is_warning: bool) -> None:
    ((_, found),) = notes(measured(SMALL, *rates), measured(LARGE, 99_900, 100_000, 100_100))
    assert found == is_warning


def test_other_software_is_named_and_the_newest_of_a_machine_counts() -> None:
    newer = LARGE.model_copy(update={"torch": "9.9"})
    old = measured(LARGE, 50_000)
    ((text, _),) = notes(measured(SMALL, 206_689), old, measured(newer, 136_536, started="2001-01-01"))
    assert "206,689 tokens/s on Fake GPU, 16-core host (torch 0.0-fake)" in text
    assert "136,536 on Fake GPU, 64-core host (torch 9.9)" in text


def test_many_configurations_are_a_few_lines() -> None:
    precisions = ("fp32", "tf32", "fp16-mixed", "bf16-mixed", "fp16-master", "bf16-master", "fp16-true", "bf16-true")
    factors = dict(zip(precisions, (1.0, 1.01, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6), strict=True))
    here = [trial for name in precisions for trial in measured(SMALL, 100_000, precision=name)]
    there = [trial for name in precisions for trial in measured(LARGE, 100_000 / factors[name], precision=name)]
    found = notes(here, there)
    assert [is_warning for _, is_warning in found] == [True] * 6 + [False]
    assert (
        "bf16-true batch 20 was measured on 2 machines with the same GPU model, and they differ by 60 %" in found[0][0]
    )
    assert found[5][0] == "1 more configuration differs between machines, too."
    assert found[6][0].startswith("2 configurations were measured on 2 machines with the same GPU model, which agree")


PRECISIONS = ("fp32", "tf32", "bf16-mixed")
PEERS = [fake_environment(host=f"node{n}", gpu_uuid=f"GPU-{n}{n}{n}{n}") for n in range(4)]


def on_peers(*factors: float, noise: float = 0.001, peers: Sequence[Environment] = PEERS) -> list[Trial]:
    """Return three precisions of three processes on each of several nodes, which are so many times as fast."""
    return [
        trial
        for environment, factor in zip(peers, factors, strict=False)
        for precision in PRECISIONS
        for trial in measured(
            environment, *(100_000 * factor * (1 + noise * n) for n in (-1, 0, 1)), precision=precision
        )
    ]


def outliers(trials: list[Trial]) -> list[str]:
    return [text for text, is_warning in notes(trials) if "slower than its peers" in text and is_warning]


def test_a_node_slower_than_its_peers_is_named() -> None:
    (line,) = outliers(on_peers(1.0, 1.001, 0.96, 0.999))
    assert line == (
        "Fake GPU, host node2 (GPU-2222) is slower than its peers: by 4 % of the median of 3 machines "
        "with the same model, beyond its interval in 3 of 3 configurations."
    )
    pairs = [fake_environment(host="node0", other_hosts=(f"node{n}",)) for n in range(1, 5)]
    (line,) = outliers(on_peers(1.0, 1.001, 0.96, 0.999, peers=pairs))
    assert line.startswith("Fake GPU, host node0+node3 is slower than its peers: by 4 %")


@pytest.mark.parametrize(
    ("factors", "noise"),
    [
        ((1.0, 1.001, 0.995, 0.999), 0.0005),  # beyond its interval, but by half a per cent
        ((1.0, 1.0, 0.96, 1.0), 0.05),  # within its interval
        ((1.0, 0.96), 0.001),  # with one peer nobody knows which of the two is wrong
        ((1.0, 1.04, 1.0, 1.0), 0.001),  # faster
    ],
)
def test_a_node_like_its_peers_is_not(factors: tuple[float, ...], noise: float) -> None:
    assert outliers(on_peers(*factors, noise=noise)) == []


def test_a_node_slow_in_one_configuration_of_three_is_not() -> None:
    trials = [
        trial
        for trial in on_peers(1.0, 1.0, 0.9, 1.0)
        if trial.environment.host != "node2" or trial.spec.precision == "fp32"
    ]
    trials += [t for t in on_peers(1.0, 1.0, 1.0, 1.0) if t.environment.host == "node2" and t.spec.precision != "fp32"]
    assert outliers(trials) == []


def test_a_lower_power_limit_is_said() -> None:
    trials = [
        trial.model_copy(
            update={"gpu_facts": GpuFacts(power_limit_watts=500 if trial.environment.host == "node2" else 700)}
        )
        for trial in on_peers(1.0, 1.0, 0.8, 1.0)
    ]
    (line,) = outliers(trials)
    assert line.endswith("Its power limit is 500 W; theirs is 700 W or more.")


class TestNoRatioAcrossMachines:
    def test_processes_of_one_configuration(self) -> None:
        rows = rows_of_steps([*measured(SMALL, 100_000), *measured(LARGE, 200_000)])
        assert [len(row.trials) for row in rows] == [1, 1]

    def test_a_later_record_of_another_machine_replaces_none(self) -> None:
        collection = collect([*measured(SMALL, 100_000), *measured(LARGE, 200_000, started="2001-01-01")])
        assert len(collection.trials) == 2
        assert collection.notes == ()

    def test_loops_of_training_runs(self) -> None:
        plain = fake_run(fake_training(), environment=SMALL)
        tuned = fake_run(fake_training(techniques=("fused-optimizer",)), environment=LARGE)
        assert tuned_pairs(rows_of_runs([plain, tuned])) == []
        assert tuned_pairs(rows_of_runs([plain, tuned.model_copy(update={"environment": SMALL})])) != []


def test_every_command_that_reads_records_says_it(command: CommandLine, tmp_path: Path) -> None:
    folder, page = tmp_path / "both", tmp_path / "page.html"
    for trial in (*measured(SMALL, 206_689), *measured(LARGE, 136_536)):
        Store(folder).save(trial)
    for output in ("table", "markdown"):
        reported = command("report", folder, "--format", output).out
        assert reported.count(SENTENCE) == 3, "once at the top, and once in each group"
        assert SENTENCE in command("compare", folder, "--format", output).out
    for name, times in (("report", 3), ("compare", 1)):
        assert command(name, folder, "-o", page).code == 0
        assert page.read_text().replace("\u00a0", " ").count(SENTENCE) == times
    document = json.loads(command("compare", folder, "--format", "json").out)
    assert document["machine_notes"] == [{"text": SENTENCE, "is_warning": True}]
    rows = json.loads(command("export", folder, "--level", "cells", "--format", "json").out)
    assert [(row["machine_note"], row["gpu_uuid"]) for row in rows] == [
        (SENTENCE, SMALL.gpu_uuid),
        (SENTENCE, LARGE.gpu_uuid),
    ]
