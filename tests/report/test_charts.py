"""Every chart of the registry, on records that have something for it and on records that have not."""

import re
from xml.etree import ElementTree

import pytest
from fake_engine import (
    PRECISION_NAMES,
    fake_environment,
    fake_epoch,
    fake_run,
    fake_spec,
    fake_training,
    fake_trial,
)
from fake_records import HOSTILE, every_kind, many, other_machine, poisoned, profiled, steady

from castwise.records.schema import Trial
from castwise.registry.kernel_classes import KERNEL_CLASSES
from castwise.report.charts.card import card
from castwise.report.charts.chart import MAX_BARS, Chart, GroupSubject, downsample
from castwise.report.charts.machines import ratios
from castwise.report.charts.profile import PARTS
from castwise.report.charts.registry import GROUP_CHARTS, charts_of
from castwise.report.charts.svg import (
    NARROW,
    WIDE,
    Axis,
    Bar,
    Segment,
    bar_chart,
    log_ticks,
    nice_ticks,
)
from castwise.report.collection import collect
from castwise.report.conclusions import answers_of
from castwise.report.machine_comparison import MachinePrices, Origin, compare_machines, measured_machines
from castwise.show.fields import FlatRow
from castwise.show.table import csv_grid
from castwise.show.theme import KERNELS, look_of


def file_of(trial: Trial) -> str:
    return f"{trial.spec.key}.json"


def charts(*trials: Trial) -> list[tuple[str, Chart]]:
    """Return the charts of all groups, each with its name."""
    collection = collect(trials)
    answers = answers_of(collection)
    return [
        named
        for group in collection.groups
        for named in charts_of(GroupSubject(group, file_of), [each for each in answers if each.group is group]).items()
    ]


def chart(name: str, *trials: Trial) -> Chart:
    return next(each for own, each in charts(*trials) if own == name)


def names(*trials: Trial) -> set[str]:
    return {name for name, _ in charts(*trials)}


def drawn(made: Chart, width: int = WIDE) -> ElementTree.Element:
    """Return a chart as XML; text from records that is no text breaks it."""
    return ElementTree.fromstring(f"<svg>{made.draw(width).body}</svg>")


def texts(made: Chart, width: int = WIDE) -> list[str]:
    return [each.text or "" for each in drawn(made, width).iter("text")]


def tips(made: Chart) -> list[str]:
    return [each.text or "" for each in drawn(made).iter("title")]


def rows(made: Chart) -> list[FlatRow]:
    assert made.table is not None
    return list(made.table.rows)


def bars(made: Chart) -> list[tuple[str | None, float]]:
    """Return the colours and lengths of all bars."""
    found = [(each.get("fill"), float(each.get("width") or 0)) for each in drawn(made).iter("rect")]
    return [each for each in found if each[0] != "url(#hatch)"]


def tuned(*changes: tuple[str, float, tuple[str, ...]]) -> list[Trial]:
    return [steady(name, repeat, factor, techniques=loop) for repeat in range(3) for name, factor, loop in changes]


PROFILED = [profiled(precision) for precision in ("fp32", "bf16-mixed")]
OF_PROFILES = ("profile", "kernels", "modules")
EVERY = [*charts(*every_kind()), *(each for each in charts(*PROFILED) if each[0] in OF_PROFILES)]


def test_every_chart_of_the_registry_is_drawn() -> None:
    assert {name for name, _ in EVERY} == set(GROUP_CHARTS)


def test_the_score_of_a_users_own_model_is_drawn() -> None:
    (made,) = (made for name, made in EVERY if made.title == "Validation score over time and epochs")
    assert made.summary == "At the end: fp32 3.5, bf16-mixed 3.5."


@pytest.mark.parametrize(("name", "made"), EVERY)
def test_chart_is_valid_and_has_sentence_table_and_files(name: str, made: Chart) -> None:
    for width in (WIDE, NARROW):
        drawing = made.draw(width)
        places = [float(each.get("x") or 0) for each in drawn(made, width).iter("text")]
        assert (drawing.width, min(places) >= 0, max(places) <= width) == (width, True, True)
    assert made.summary.endswith(".")
    is_of_lines = name in ("loss", "score")
    assert is_of_lines == (made.table is None), "`castwise export` has those values"
    if made.table is not None:
        assert len(csv_grid(made.table.columns, made.table.rows).splitlines()) == len(made.table.rows) + 1 > 1
    if name not in OF_PROFILES:
        assert any(".json" in tip for tip in tips(made))
    file = made.as_file("resnet50, Fake GPU, 2000-01-01")
    assert "var(" not in file
    assert ElementTree.fromstring(file).tag.endswith("svg")


def test_throughput_has_the_precisions_colours_speedups_and_intervals() -> None:
    trials = [steady(precision, repeat) for repeat in range(3) for precision in ("fp32", "bf16-mixed")]
    made = chart("throughput", *trials)
    (first, short), (second, long) = bars(made)
    assert (first, second) == (look_of("fp32").colour, look_of("bf16-mixed").colour)
    assert long / short == pytest.approx(2.5, rel=0.01)
    assert any(text.endswith(" · 2.50× · take") for text in texts(made))
    assert "images per second; × is over fp32" in texts(made)
    assert sum("95 % interval" in tip for tip in tips(made)) == 2
    assert 'stroke-width="1.5"' in made.draw(WIDE).body, "a whisker"
    alone = chart("throughput", steady("fp32"), steady("bf16-mixed"))
    assert 'stroke-width="1.5"' not in alone.draw(WIDE).body, "one process has no interval"


@pytest.mark.parametrize("name", ["throughput", "memory"])
def test_no_caption_praises_a_run_that_did_not_end_well(name: str) -> None:
    diverged = fake_trial(fake_spec("fp16-true"), status="diverged", step_seconds=(0.01,) * 6, peak_bytes=2**20)
    made = chart(name, fake_trial(fake_spec("fp32")), diverged)
    assert "fp32" in made.summary
    assert "fp16-true" not in made.summary


def test_without_the_plain_loop_a_speedup_is_over_the_same_loop() -> None:
    loop = {"techniques": ("compile",)}
    made = chart("throughput", steady("fp32", **loop), steady("bf16-mixed", **loop), steady("fp16-mixed"))
    assert [row["times_reference"] for row in rows(made)] == [None, 1.0, pytest.approx(2.5, rel=0.01)]


def test_no_whisker_is_longer_than_twice_the_longest_bar() -> None:
    def axis_end(high: float) -> float:
        body = bar_chart([Bar("", [Segment(100, "red")], "", (50, high))], WIDE, "images/s").body
        return max(float(figure) for figure in re.findall(r">(\d+)<", body))

    assert axis_end(120) < axis_end(200) == axis_end(400_000)


def test_on_a_phone_numbers_do_not_touch_and_names_break_between_their_parts() -> None:
    name = "torchvision:mobilenet_v3_large, batch 256"
    body = bar_chart([Bar(name, [Segment(11_044, "red")], "11,044 · 3.10×")], NARROW, "").body
    assert {"5,000", "torchvision:", "mobilenet_v3_large,", "batch 256"} < set(re.findall(r">([^<]+)<", body))
    assert ">10,000<" not in body


def test_speedup_is_over_the_plain_loop_and_needs_one() -> None:
    made = chart("throughput", steady("fp32"), steady("tf32", techniques=("a",), factor=0.5), steady("tf32"))
    assert [row["times_reference"] for row in rows(made)] == pytest.approx([1.0, 1 / 0.6, 2 / 0.6])
    assert not any("×" in text for text in texts(chart("throughput", steady("bf16-mixed"), steady("tf32"))))


@pytest.mark.parametrize("name", ["throughput", "memory"])
def test_what_did_not_end_well_is_hatched_everywhere(name: str) -> None:
    diverged = steady("fp16-true").model_copy(update={"status": "diverged", "message": "the loss was nan"})
    body = chart(name, steady("fp32"), diverged).draw(WIDE).body
    assert "did not end well" in body
    assert "url(#hatch)" in body
    assert "url(#hatch)" not in chart(name, steady("fp32"), steady("fp16-true")).draw(WIDE).body


def test_failed_configuration_keeps_its_place_with_its_status() -> None:
    failed = fake_trial(steady("bf16-mixed").spec, status="oom", message="CUDA out of memory", step_seconds=())
    made = chart("throughput", steady("fp32"), failed)
    assert bars(made)[1][1] == 0
    assert "oom" in texts(made)
    assert any("CUDA out of memory" in tip for tip in tips(made))


def test_memory_of_a_cpu_is_a_bound() -> None:
    on_cpu = fake_trial(fake_spec(device="cpu"), environment=fake_environment(None))
    assert "upper bound" in chart("memory", on_cpu).note


def test_batch_curve_needs_two_batches_and_marks_what_did_not_fit() -> None:
    assert "batch" not in names(steady("fp32"), steady("bf16-mixed"))
    too_large = fake_trial(steady("fp32", batch_size=4096).spec, status="oom", step_seconds=())
    made = chart("batch", steady("fp32"), steady("fp32", batch_size=32), too_large)
    assert {"32", "256", "4,096", "batch size", "out of memory"} <= set(texts(made))
    assert any("ran out of memory" in tip for tip in tips(made))


def test_scaling_starts_at_the_single_gpu_and_shows_the_ideal() -> None:
    ways = ((1, "none", 1.0), (2, "ddp", 1.25))
    made = chart("scaling", *(steady("fp32", factor=f, world_size=n, parallelism=way) for n, way, f in ways))
    assert "ideal, of the fastest" in texts(made)
    assert "80.0 % of the ideal with fp32, 2 GPUs, ddp" in made.summary


def test_ladder_ends_at_what_advice_takes_and_each_step_is_proven() -> None:
    loop = ("channels-last", "fused-optimizer", "compile")
    made = chart(
        "ladder",
        *tuned(("fp32", 1.0, ()), ("bf16-mixed", 1.0, ()), ("bf16-mixed", 0.7, loop[:1])),
        *tuned(("bf16-mixed", 0.7, loop[:2]), ("bf16-mixed", 0.5, loop), ("tf32", 1.0, ())),
        steady("bf16-mixed", 9, 0.2, techniques=("channels-last", "cuda-graph")),  # fast by luck, and in one process
    )
    changes = [row["change"] for row in rows(made)]
    assert changes == ["fp32, plain loop", "+ bf16-mixed", "+ channels-last", "+ fused-optimizer + compile"]
    assert made.title == "What each change adds: 5.00× fp32"
    assert [row["factor"] for row in rows(made)][1:] == pytest.approx([2.5, 1 / 0.7, 0.7 / 0.5], rel=0.01)
    assert any(text.endswith(" · ×2.50") for text in texts(made))


def test_ladder_needs_a_loop_to_take() -> None:
    assert "ladder" not in names(*tuned(("fp32", 1.0, ()), ("bf16-mixed", 1.0, ())))
    assert "ladder" not in names(steady("fp32"), steady("tf32", techniques=("compile",)))


def test_long_names_are_told_by_what_differs() -> None:
    loop = ("channels-last", "fused-optimizer", "no-step-sync", "compile")
    made = chart("throughput", *tuned(("fp32", 1.0, ()), ("tf32", 1.0, loop), ("tf32", 0.9, (*loop, "cuda-graph"))))
    assert {"fp32", "tf32, base", "tf32, base + cuda-graph"} <= set(texts(made))
    assert made.note == "Base: channels-last, fused-optimizer, no-step-sync, compile."


def test_curves_of_one_precision_differ_in_dash_and_marker() -> None:
    recipe = {"epochs": 3, "validate_each_epoch": True}
    loops = ((), ("channels-last",))
    made = chart("loss", *(fake_run(fake_training("fp32", recipe, techniques=loop)) for loop in loops))
    lines = [each for each in drawn(made).iter("path") if each.get("stroke") == look_of("fp32").colour]
    assert len({each.get("stroke-dasharray") for each in lines}) == 2
    assert {"seconds", "epochs", "fp32", "fp32, channels-last"} <= set(texts(made))


def test_runs_that_differ_in_their_seeds_are_one_curve_with_its_range() -> None:
    recipe = {"epochs": 3, "validate_each_epoch": True}
    every = [fake_run(fake_training(name, recipe, seed=seed)) for name in ("fp32", "bf16-mixed") for seed in range(3)]
    for name in ("loss", "score"):
        made = chart(name, *every)
        assert len(list(drawn(made).iter("polygon"))) == 4, "an area for each precision, over time and over epochs"
        assert {"fp32", "bf16-mixed"} <= set(texts(made))
        assert "means over up to 3 seeds" in made.summary
    (alone,) = {len(list(drawn(chart("loss", *every[:1])).iter("polygon")))}
    assert alone == 0
    assert len(rows(chart("throughput", *every))) == 2, "a row for each precision, with the mean of its seeds"
    (answer,) = answers_of(collect(every))
    assert answer.advice.how_sure == "3 runs each"
    assert answer.advice.row is not None
    assert len(answer.advice.row.trials) == 3


def test_the_equivalence_plot_has_a_dot_for_each_precision_compared_with_the_margin() -> None:
    recipe = {"epochs": 3, "validate_each_epoch": True}
    shifts = {"fp32": 0.0, "tf32": -0.02, "bf16-mixed": 0.0001}
    runs = []
    for name, shift in shifts.items():
        for seed in range(5):
            spec = fake_training(name, recipe, seed=seed)
            learns = [0.01 * seed + shift + 0.0001 * (seed % 2)] * 3
            runs.append(fake_run(spec, *(fake_epoch(spec, number, learns=own) for number, own in enumerate(learns))))
    made = chart("equivalence", *runs)
    assert made.title == "Is the accuracy as good as in fp32?"
    assert {"worse", "as good", "tf32", "bf16-mixed"} <= set(texts(made))
    assert "margin of 0.3 points" in made.summary
    (shade,) = [each for each in drawn(made).iter("rect") if not each.get("rx")]
    assert float(shade.get("width", 0)) > 0
    assert "equivalence" not in names(*runs[:1], *runs[5:6]), "one pair has no interval"


def test_large_groups_are_drawn_in_part_and_the_table_has_all() -> None:
    trials = list(many(700))
    made = chart("throughput", *trials)
    assert len(bars(made)) == MAX_BARS
    assert len(rows(made)) == 700
    assert f"{MAX_BARS} fastest of 700" in made.note


def test_machines_are_dots_with_intervals_around_one() -> None:
    here = [steady(precision, repeat) for repeat in range(3) for precision in PRECISION_NAMES]
    (machines,) = measured_machines([Origin("records", [*here, *map(other_machine, here)])])
    prices = MachinePrices({machines[0].name: 4.0, machines[1].name: 1.0})
    made = ratios(compare_machines(machines, prices=prices), file_of)
    assert made is not None
    assert {"2.00×", "best against best", "work for the same money"} <= set(texts(made))
    assert {"0.50×", "geometric mean"} <= {text.split(" [")[0] for text in texts(made)}
    assert sum("95 % interval" in tip for tip in tips(made)) == len(PRECISION_NAMES)


def card_of(*trials: Trial) -> str:
    return card(answers_of(collect(trials))[0])


def test_the_card_has_model_gpu_answer_date_and_command() -> None:
    made = card_of(*(steady(name, repeat) for repeat in range(3) for name in PRECISION_NAMES))
    words = [each.text or "" for each in ElementTree.fromstring(made).iter() if each.tag.endswith("text")]
    assert words[:3] == ["resnet50, batch 256, Fake GPU", "1.75×", "as fast as PyTorch's default"]
    assert words[3].endswith("] 3 runs each")
    assert words[4].startswith("take bf16-mixed, in 0.82× the memory")
    assert (words[5], words[6]) == ("default", "1.00×")
    assert words[-4:-2] == ["bf16-mixed", "1.75×"]
    assert words[-2].endswith("· 2000-01-01")
    assert words[-1] == "castwise run resnet50 --batch-size 256"
    assert "var(" not in made


def test_the_card_of_hostile_records_is_valid_and_undecided_ones_say_so() -> None:
    ElementTree.fromstring(
        card_of(
            *(poisoned(steady(name, n), "precision", "loss_scale") for n in range(2) for name in ("fp32", "bf16-mixed"))
        )
    )
    assert "undecided" in card_of(steady("fp32"), steady("bf16-mixed", factor=2.0))


def test_every_class_of_kernels_is_in_one_part_of_a_step() -> None:
    classes = [name for part in PARTS.values() for name in part]
    assert sorted(classes) == sorted(KERNEL_CLASSES)
    assert len(PARTS) == len(KERNELS) + 1, "communication is grey"


def test_a_profile_is_told_as_before_and_after() -> None:
    assert (
        "From fp32: other products 30.0 ms → 0, normalisation 40.0 ms → 16.0 ms" in chart("profile", *PROFILED).summary
    )
    kernels, modules = chart("kernels", *PROFILED), chart("modules", *PROFILED)
    assert kernels.title == "The kernels that take longest: bf16-mixed"
    assert "normalisation: kernel" in texts(kernels)
    assert {"layer1", "20.0 ms · was 50.0 ms", "forward", "backward"} <= set(texts(modules))
    assert len(bars(modules)) == 2, "forward and backward"


def test_parts_of_a_step_are_its_time() -> None:
    made = chart("profile", *PROFILED)
    fp32, mixed = rows(made)
    for row in (fp32, mixed):
        assert sum(value for name, value in row.items() if name.startswith("part_")) == pytest.approx(
            row["step_seconds"]
        )
    assert fp32["part_1"] == pytest.approx(0.3 * fp32["step_seconds"], rel=0.01)
    assert fp32["part_0"] == mixed["part_1"] == 0
    assert mixed["part_10"] == pytest.approx(0.1 * mixed["step_seconds"], rel=0.02), "idle"
    assert {"100.1 ms", "idle", "products on Tensor Cores", "normalisation", "milliseconds a step"} <= set(texts(made))
    assert not {"casts", "attention", "communication"} & set(texts(made)), "no key of what takes no time"
    assert any(tip.startswith("bf16-mixed\nnormalisation: 16.0 ms, 40") for tip in tips(made))
    assert "profile" not in names(steady("fp32"), steady("bf16-mixed"))


def test_no_text_reaches_a_drawing_as_markup() -> None:
    for _, made in charts(*(poisoned(trial, "precision", "loss_scale") for trial in [*every_kind(), *PROFILED])):
        words = made.draw(WIDE).body + made.as_file(HOSTILE)
        assert not [markup for markup in ("<script", "<a href", "<img", HOSTILE[:9]) if markup in words]
        assert drawn(made).tag == "svg"


@pytest.mark.parametrize("count", [0, 1, 48, 49, 5000])
def test_downsampling_keeps_first_and_last(count: int) -> None:
    kept = downsample(count)
    assert len(kept) == len(set(kept)) == min(count, 48)
    assert kept == sorted(kept)
    assert set(kept) >= {0, count - 1} or not count


@pytest.mark.parametrize("high", [1e-9, 0.3, 1.0, 7.2, 99.0, 12345.0, 3e12])
def test_ticks_are_few_round_and_inside(high: float) -> None:
    ticks = nice_ticks(0.0, high, 5)
    assert 2 <= len(ticks) <= 5
    assert ticks[0] == 0.0
    assert ticks[-1] <= high * (1 + 1e-9)


@pytest.mark.parametrize(("low", "high"), [(1, 9), (0.3, 1500), (1e-9, 1e12)])
def test_ticks_of_a_logarithmic_axis_are_few_and_inside(low: float, high: float) -> None:
    ticks = log_ticks(low, high, 5)
    assert 2 <= len(ticks) <= 5
    assert low <= ticks[0] < ticks[-1] <= high


def test_an_axis_has_its_ends_at_the_edges_and_keeps_values_inside() -> None:
    axis = Axis(1.0, 100.0, [], str, is_log=True)
    assert [axis.at(value, 10, 200) for value in (1.0, 10.0, 100.0, 1000.0)] == [10, 110, 210, 210]
