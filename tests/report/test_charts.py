"""Every chart of the registry, on records that have something for it and on records that have not."""

import json

import plotly.graph_objects as go
import pytest
from fake_engine import PRECISION_NAMES, fake_environment, fake_facts, fake_run, fake_spec, fake_training, fake_trial
from fake_records import HOSTILE, every_kind, many, other_machine, poisoned, steady

from castwise.records.schema import Trial
from castwise.render.table import csv_grid
from castwise.render.theme import look_of
from castwise.report.charts.chart import Chart, GroupSubject
from castwise.report.charts.plotly_parts import HALF_PAGE, MAX_BARS, MAX_LINES, PHONE, downsample, legend_rows
from castwise.report.charts.registry import GROUP_CHARTS, charts_of
from castwise.report.charts.static_images import on_white
from castwise.report.charts.throughput import overview
from castwise.report.collection import collect


def file_of(trial: Trial) -> str:
    return f"{trial.spec.key}.json"


def charts(*trials: Trial) -> list[Chart]:
    collection = collect(trials)
    of_groups = [chart for group in collection.groups for chart in charts_of(GroupSubject(group, file_of))]
    drawn = overview(collection, file_of)
    return [*of_groups, drawn] if drawn is not None else of_groups


def chart(name: str, *trials: Trial) -> Chart:
    return next(each for each in charts(*trials) if each.name == name)


def names(*trials: Trial) -> set[str]:
    return {each.name for each in charts(*trials)}


EVERY = charts(*every_kind())


def test_every_chart_of_the_registry_is_drawn() -> None:
    assert {each.name for each in EVERY} == {*GROUP_CHARTS, "overview"}


@pytest.mark.parametrize("drawn", EVERY, ids=lambda each: each.name)
def test_chart_is_valid_for_plotly_and_has_sentence_table_and_files(drawn: Chart) -> None:
    figure = go.Figure(on_white(drawn))
    assert len(figure.data) == len(drawn.traces) > 0
    assert drawn.summary.endswith(".")
    assert drawn.table.rows
    assert len(csv_grid(drawn.table.columns, drawn.table.rows).splitlines()) == len(drawn.table.rows) + 1
    json.dumps([drawn.traces, drawn.layout], allow_nan=False)
    for trace in drawn.traces:
        texts = trace.get("hovertext") or [trace.get("hovertemplate") or ""]
        if trace.get("hoverinfo") != "skip":
            assert all(".json" in text for text in texts), trace.get("name")
        name = trace.get("name", "").split(",")[0].split(" ")[0]
        if name in PRECISION_NAMES:
            colour = trace.get("line", trace["marker"])["color"]
            assert {*([colour] if isinstance(colour, str) else colour)} == {look_of(name).colour}


def test_throughput_has_the_precisions_colours_and_intervals() -> None:
    trials = [steady(precision, repeat) for repeat in range(3) for precision in ("fp32", "bf16-mixed")]
    (trace,) = chart("throughput", *trials).traces
    assert trace["x"] == ["fp32", "bf16-mixed"]
    assert trace["marker"]["color"] == [look_of("fp32").colour, look_of("bf16-mixed").colour]
    assert trace["y"][1] / trace["y"][0] == pytest.approx(2.5, rel=0.01)
    above, below = trace["error_y"]["array"][0], trace["error_y"]["arrayminus"][0]
    assert 0 < below < above < 0.02 * trace["y"][0]
    assert "95 % interval" in trace["hovertext"][0]
    (alone,) = chart("throughput", steady("fp32"), steady("bf16-mixed")).traces
    assert alone["error_y"] is None, "one process has no interval"


def test_failed_configuration_keeps_its_place_with_its_status() -> None:
    failed = fake_trial(steady("bf16-mixed").spec, status="oom", message="CUDA out of memory", step_seconds=())
    (trace,) = chart("throughput", steady("fp32"), failed).traces
    assert (trace["y"][1], trace["text"][1]) == (0, "oom")
    assert "CUDA out of memory" in trace["hovertext"][1]
    assert trace["marker"]["pattern"]["shape"] == ["", "/"]


def test_speedup_needs_float32() -> None:
    assert "speedup" not in names(steady("bf16-mixed"), steady("tf32"))
    drawn = chart("speedup", steady("fp32"), steady("bf16-mixed"))
    assert drawn.traces[0]["y"] == [1.0, pytest.approx(2.5)]
    assert "2.50×, with bf16-mixed" in drawn.summary


def test_overview_needs_two_groups() -> None:
    assert "overview" not in names(steady("fp32"), steady("tf32"))
    both = [steady(precision, workload=name) for name in ("resnet50", "dpn92") for precision in ("fp32", "tf32")]
    (trace,) = chart("overview", *both).traces
    assert trace["y"] == ["resnet50", "dpn92"]
    assert len(chart("overview", *both, *map(other_machine, both)).table.rows) == 4


def test_memory_adds_up_to_the_drivers_figure() -> None:
    parts = {trace["name"]: trace["y"][0] * 2**30 for trace in chart("memory", steady("fp32")).traces}
    assert parts["weights"] == 4 * 25_000_000
    assert parts["batches that lie on the device"] == 2**27
    assert sum(parts.values()) == pytest.approx(2**31 + 2**29)


def test_memory_of_unknown_dtypes_has_no_weights_and_of_a_cpu_is_a_bound() -> None:
    strange = steady("fp32").model_copy(update={"facts": fake_facts(param_dtypes={"int4": 100})})
    assert "weights" not in [trace["name"] for trace in chart("memory", strange).traces]
    on_cpu = fake_trial(fake_spec(device="cpu"), environment=fake_environment(None))
    assert "upper bound" in chart("memory", on_cpu).note


def test_batch_curve_needs_two_batches_has_intervals_and_marks_what_did_not_fit() -> None:
    assert "batch" not in names(steady("fp32"), steady("bf16-mixed"))
    above = chart("batch", *(steady("fp32", n, batch_size=batch) for n in range(3) for batch in (32, 64))).traces[0]
    assert 0 < above["error_y"]["array"][1] < 0.02 * above["y"][1]
    too_large = fake_trial(steady("fp32", batch_size=4096).spec, status="oom", step_seconds=())
    drawn = chart("batch", steady("fp32"), steady("fp32", batch_size=32), too_large)
    assert drawn.traces[0]["x"] == [32, 256]
    assert (drawn.traces[-1]["x"], drawn.traces[-1]["y"]) == ([4096], [16.0])
    assert drawn.layout["xaxis"]["type"] == "log"


def test_scaling_starts_at_the_single_gpu_and_shows_the_ideal() -> None:
    ways = ((1, "none", 1.0), (2, "ddp", 1.25))
    drawn = chart("scaling", *(steady("fp32", factor=f, world_size=n, parallelism=way) for n, way, f in ways))
    above, below, ideal = drawn.traces
    assert above["x"] == [1, 2]
    assert below["y"] == [100.0, pytest.approx(80.0)]
    assert ideal["y"][1] == pytest.approx(2 * above["y"][0])
    assert "80.0 % of the ideal with fp32, 2 GPUs, ddp" in drawn.summary


@pytest.mark.parametrize(
    ("loops", "changes"),
    [
        # The longest chain, in any order of techniques.
        ("fp32 1.0, fp32 0.5 a, fp32 0.4 a b, fp32 0.9 z y", ["fp32, plain loop", "+ a", "+ b"]),
        ("fp32 1.0, fp32 0.6 b, fp32 0.5 c, fp32 0.3 a b d, fp32 0.9 a c", ["fp32, plain loop", "+ b", "+ a + d"]),
        # The precision changes once, alone or with techniques.
        ("fp32 1.0, bf16-mixed 1.0, tf32 1.0, bf16-mixed 0.5 a", ["fp32, plain loop", "bf16-mixed", "+ a"]),
        ("fp32 1.0, bf16-mixed 0.5 a b", ["fp32, plain loop", "bf16-mixed + a + b"]),
        ("fp32 1.0, default 1.1, bf16-mixed 0.5 a", ["default, plain loop", "bf16-mixed + a"]),
        # Without a plain loop or a technique there is no chart.
        ("fp32 0.5 a, fp32 0.9 z y", None),
        ("fp32 1.0, bf16-mixed 1.0, tf32 1.0", None),
    ],
)
def test_waterfall_is_the_longest_chain_of_changes(loops: str, changes: list[str] | None) -> None:
    trials = []
    for loop in loops.split(", "):
        precision, factor, *techniques = loop.split()
        trials.append(steady(precision, factor=float(factor), techniques=tuple(techniques)))
    if changes is None:
        assert "waterfall" not in names(*trials)
        return
    drawn = chart("waterfall", *trials)
    assert steps(drawn) == [*changes, "all together"]
    (trace,) = drawn.traces
    assert sum(trace["y"][:-1]) == pytest.approx(trace["y"][-1])
    assert len(set(trace["x"])) == len(trace["y"]), "two changes may have one name"


def test_waterfall_is_on_one_batch_and_has_intervals() -> None:
    chain = [steady("fp32", r, f, techniques=t) for r in range(3) for f, t in ((1.0, ()), (0.5, ("a",)))]
    smaller = steady("fp32", factor=0.2, techniques=("a",), batch_size=chain[0].spec.batch_size // 2)
    drawn = chart("waterfall", *chain, smaller)
    assert steps(drawn) == ["fp32, plain loop", "+ a", "all together"]
    assert drawn.traces[0]["text"][1] == "2.00×"
    assert all("95 % interval" in text for text in drawn.traces[0]["hovertext"])


def steps(drawn: Chart) -> list[str]:
    return [str(name).replace("<br>", " ") for name in drawn.layout["xaxis"]["ticktext"]]


def test_curves_of_one_precision_differ_in_dash_and_marker() -> None:
    runs = [fake_run(fake_training("fp32", {"epochs": 3, "validate_each_epoch": True}, seed=seed)) for seed in (0, 1)]
    first, over_epochs, second, _ = chart("loss", *runs).traces
    assert first["line"]["color"] == second["line"]["color"]
    assert first["line"]["dash"] != second["line"]["dash"]
    assert first["marker"]["symbol"] != second["marker"]["symbol"]
    assert first["line"] == over_epochs["line"]


def test_curves_are_over_time_and_over_epochs() -> None:
    over_time, over_epochs = next(each for each in EVERY if each.name == "accuracy").traces[:2]
    assert over_epochs["x"] == [1, 2, 3, 4]
    assert over_time["x"] == sorted(over_time["x"])
    assert over_time["y"] == over_epochs["y"]
    assert over_epochs["y"][0] == pytest.approx(50.0)


def test_telemetry_has_a_panel_for_clock_power_and_temperature() -> None:
    drawn = chart("telemetry", steady("fp32"))
    panels = [(trace["yaxis"], trace["y"][-1]) for trace in drawn.traces]
    assert panels == [("y", 1980.0), ("y2", 500.0), ("y3", 57.0)]
    assert drawn.layout["yaxis"]["range"] == pytest.approx([1980 - 49.5, 1980 + 49.5]), "a constant is not magnified"
    assert "range" not in drawn.layout["yaxis3"], "the temperature rises"
    assert "telemetry" not in names(fake_trial(step_seconds=(0.1,) * 6))


def test_legend_takes_rows() -> None:
    few = chart("blocks", steady("fp32"), steady("bf16-mixed")).traces
    trials = [steady(precision, batch_size=b) for precision in ("fp32", "tf32") for b in range(8, 64, 8)]
    many = chart("blocks", *trials).traces
    assert legend_rows(few, HALF_PAGE) == 1
    assert 1 < legend_rows(many, HALF_PAGE) < legend_rows(many, PHONE) <= len(many)
    assert legend_rows(chart("throughput", steady("fp32"), steady("tf32")).traces, PHONE) == 0, "there is no legend"


def test_large_groups_are_drawn_in_part_and_the_table_has_all() -> None:
    trials = list(many(700))
    drawn = chart("throughput", *trials)
    assert sum(len(trace["x"]) for trace in drawn.traces) == MAX_BARS
    assert len(drawn.table.rows) == 700
    assert f"{MAX_BARS} highest of 700" in drawn.note
    blocks = chart("blocks", *trials)
    assert len(blocks.traces) == MAX_LINES
    assert f"{MAX_LINES} of 700" in blocks.note


def test_no_text_reaches_plotly_as_markup_or_placeholder() -> None:
    for drawn in charts(*(poisoned(trial, "precision", "loss_scale") for trial in every_kind())):
        text = json.dumps([drawn.traces, drawn.layout], ensure_ascii=False)
        assert not [markup for markup in ("<script", "<a href", "<img", HOSTILE[:9]) if markup in text]
        if drawn.name == "blocks":
            placeholders = {trace["hovertemplate"].count("%{") for trace in drawn.traces}
            assert placeholders == {2}, "the block and its value, and none from a record"


@pytest.mark.parametrize("count", [0, 1, 200, 201, 5000])
def test_downsampling_keeps_first_and_last(count: int) -> None:
    kept = downsample(count)
    assert len(kept) == len(set(kept)) == min(count, 200)
    assert kept == sorted(kept)
    assert set(kept) >= {0, count - 1} or not count
