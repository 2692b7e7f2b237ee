"""Every chart of the registry, on records that have something for it; and what it does where they have not."""

import json
import math
from typing import Any

import plotly.graph_objects as go
import pytest
from fake_engine import fake_environment, fake_facts, fake_run, fake_spec, fake_training, fake_trial
from fake_records import HOSTILE, every_kind, many, other_machine, poisoned, steady

from castwise.records.schema import Trial
from castwise.render.table import DataTable, csv_grid
from castwise.render.theme import LOOKS, THEMES
from castwise.report.charts.chart import Chart, CollectionSubject, GroupSubject
from castwise.report.charts.layout_fit import fitted, fitted_to_phone
from castwise.report.charts.plotly_parts import MOST_BARS, MOST_LINES, downsample, escape
from castwise.report.charts.registry import OVERVIEW_CHARTS, TOPIC_CHARTS, charts_of, overview_charts
from castwise.report.charts.waterfall import Link
from castwise.report.charts.waterfall import drawn as drawn_links
from castwise.report.collection import collect


def file_of(trial: Trial) -> str:
    return f"{trial.spec.key}.json"


def charts(*trials: Trial) -> list[Chart]:
    collection = collect(trials)
    of_topics = [chart for topic in collection.groups for chart in charts_of(GroupSubject(topic, file_of))]
    return overview_charts(CollectionSubject(collection, file_of)) + of_topics


def chart(name: str, *trials: Trial) -> Chart:
    return next(each for each in charts(*trials) if each.name == name)


def names(*trials: Trial) -> set[str]:
    return {each.name for each in charts(*trials)}


EVERY = charts(*every_kind())


def test_every_row_of_the_registry_draws_something() -> None:
    assert {each.name for each in EVERY} == {kind.name for kind in (*OVERVIEW_CHARTS, *TOPIC_CHARTS)}


@pytest.mark.parametrize("drawn", EVERY, ids=lambda each: each.name)
def test_a_chart_is_valid_for_plotly_and_has_a_table_with_its_figures(drawn: Chart) -> None:
    figure = go.Figure({"data": themed(drawn.traces), "layout": themed(drawn.layout)})
    assert len(figure.data) == len(drawn.traces) > 0
    assert drawn.title
    assert drawn.says.endswith(".")
    assert drawn.table.rows
    assert len(csv_grid(drawn.table.columns, drawn.table.rows).splitlines()) == len(drawn.table.rows) + 1
    json.dumps([drawn.traces, drawn.layout], allow_nan=False)


def themed(value: Any) -> Any:
    if isinstance(value, str):
        return THEMES["light"].get(value, value)
    if isinstance(value, dict):
        return {key: themed(each) for key, each in value.items()}
    return [themed(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("drawn", EVERY, ids=lambda each: each.name)
def test_whatever_can_be_pointed_at_names_its_file(drawn: Chart) -> None:
    for trace in drawn.traces:
        said = trace.get("hovertext") or [trace.get("hovertemplate") or ""]
        if trace.get("hoverinfo") != "skip":
            assert all(".json" in text for text in said), trace.get("name")


def test_bars_are_throughputs_in_their_precision_s_colour_with_intervals() -> None:
    trials = [steady(precision, repeat) for repeat in range(3) for precision in ("fp32", "bf16-mixed")]
    (trace,) = chart("throughput", *trials).traces
    assert trace["x"] == ["fp32", "bf16-mixed"]
    assert trace["marker"]["color"] == [LOOKS["fp32"].colour, LOOKS["bf16-mixed"].colour]
    assert trace["y"][1] / trace["y"][0] == pytest.approx(2.5, rel=0.01)
    above, below = trace["error_y"]["array"][0], trace["error_y"]["arrayminus"][0]
    assert 0 < below < above < 0.02 * trace["y"][0]
    assert "95 % interval" in trace["hovertext"][0]


def test_without_rounds_there_are_no_intervals() -> None:
    (trace,) = chart("throughput", steady("fp32"), steady("bf16-mixed")).traces
    assert trace["error_y"] is None
    assert "no interval: one process" in trace["hovertext"][0]


def test_a_cell_that_failed_keeps_its_place_with_its_status() -> None:
    failed = fake_trial(steady("bf16-mixed").spec, status="oom", message="CUDA out of memory", step_seconds=())
    (trace,) = chart("throughput", steady("fp32"), failed).traces
    assert (trace["y"][1], trace["text"][1]) == (0, "oom")
    assert "CUDA out of memory" in trace["hovertext"][1]
    assert trace["marker"]["pattern"]["shape"] == ["", "/"]


def test_a_figure_stands_in_its_bar_or_over_one_that_is_short_or_hatched() -> None:
    diverged = steady("fp16-true", factor=0.5).model_copy(update={"status": "diverged"})
    trials = [steady("fp32"), steady("bf16-mixed"), diverged]
    (trace,) = chart("throughput", *trials).traces
    assert trace["textposition"] == ["outside", "inside", "outside"], "short, tall, hatched"
    assert trace["textangle"] == 0
    many = [steady(precision, batch_size=batch) for precision in ("fp32", "bf16-mixed") for batch in range(8, 72, 8)]
    assert {trace["textangle"] for trace in chart("throughput", *many).traces} == {-90}


def test_speed_ups_need_float32() -> None:
    assert "speedup" not in names(steady("bf16-mixed"), steady("tf32"))
    drawn = chart("speedup", steady("fp32"), steady("bf16-mixed"))
    assert drawn.traces[0]["y"] == [1.0, pytest.approx(2.5)]
    assert drawn.says == "The largest is 2.50×, with bf16-mixed."


def test_memory_adds_up_to_the_driver_s_figure() -> None:
    drawn = chart("memory", steady("fp32"))
    kinds = {trace["name"]: trace["y"][0] * 2**30 for trace in drawn.traces}
    assert kinds["weights"] == 4 * 25_000_000
    assert kinds["batches that lie on the device"] == 2**27
    assert sum(kinds.values()) == pytest.approx(2**31 + 2**29)


def test_memory_of_many_cells_lies_so_that_their_names_can_be_read() -> None:
    few, many = ([steady("fp32", batch_size=8 * n) for n in range(1, count)] for count in (8, 9))
    assert {trace["orientation"] for trace in chart("memory", *few).traces} == {"v"}
    drawn = chart("memory", *many)
    assert {trace["orientation"] for trace in drawn.traces} == {"h"}
    assert drawn.traces[0]["y"][0] == "fp32, batch 8"
    assert drawn.layout["height"] > chart("memory", *few).layout["height"] - 50


def test_memory_of_unknown_dtypes_is_not_split() -> None:
    strange = steady("fp32").model_copy(update={"facts": fake_facts(param_dtypes={"int4": 100})})
    drawn = chart("memory", strange)
    assert "weights" not in [trace["name"] for trace in drawn.traces]


def test_a_batch_curve_needs_two_batches_and_marks_what_did_not_fit() -> None:
    assert "batch" not in names(steady("fp32"), steady("bf16-mixed"))
    too_large = fake_trial(steady("fp32", batch_size=4096).spec, status="oom", step_seconds=())
    drawn = chart("batch", steady("fp32"), steady("fp32", batch_size=32), too_large)
    assert drawn.traces[0]["x"] == [32, 256]
    assert drawn.traces[-1]["x"] == [4096]
    assert drawn.traces[-1]["y"] == [16.0]
    assert drawn.layout["xaxis"]["type"] == "log"


def test_lines_over_batches_and_gpus_have_their_intervals() -> None:
    rounds = [steady("fp32", repeat, batch_size=batch) for repeat in range(3) for batch in (32, 64)]
    above = chart("batch", *rounds).traces[0]
    assert 0 < above["error_y"]["array"][1] < 0.02 * above["y"][1]
    spread = [
        steady("fp32", repeat, world_size=n, parallelism=p) for repeat in range(3) for n, p in ((1, "none"), (2, "ddp"))
    ]
    assert len(chart("scaling", *spread).traces[0]["error_y"]["array"]) == 2


def test_scaling_starts_at_the_single_gpu_and_knows_the_ideal() -> None:
    spread = [steady("fp32", factor=f, world_size=n, parallelism=p) for n, p, f in ((1, "none", 1.0), (2, "ddp", 1.25))]
    drawn = chart("scaling", *spread)
    above, below, ideal = drawn.traces
    assert above["x"] == [1, 2]
    assert below["y"] == [100.0, pytest.approx(80.0)]
    assert ideal["y"][1] == pytest.approx(2 * above["y"][0])
    assert "80.0 % of the ideal with fp32, 2 GPUs, ddp" in drawn.says


def test_a_waterfall_is_the_longest_chain_of_techniques() -> None:
    chain = [steady("fp32", factor=f, techniques=t) for f, t in ((1.0, ()), (0.5, ("a",)), (0.4, ("a", "b")))]
    astray = steady("fp32", factor=0.9, techniques=("z", "y"))
    drawn = chart("waterfall", *chain, astray)
    (trace,) = drawn.traces
    assert steps(drawn) == ["plain loop", "+ a", "+ b", "all together"]
    assert trace["text"][1:3] == ["2.00×", "1.25×"]
    assert sum(trace["y"][:3]) == pytest.approx(trace["y"][3])
    assert "waterfall" not in names(chain[1], astray), "there is no plain loop to begin with"


def test_a_waterfall_is_on_one_batch() -> None:
    """A climb within a memory limit ends with its winner on a smaller batch, whose plain loop nobody measured."""
    chain = [steady("fp32", factor=f, techniques=t) for f, t in ((1.0, ()), (0.5, ("a",)))]
    smaller = steady("fp32", factor=0.2, techniques=("a",), batch_size=chain[0].spec.batch_size // 2)
    drawn = chart("waterfall", *chain, smaller)
    assert steps(drawn) == ["plain loop", "+ a", "all together"]
    assert drawn.traces[0]["text"][1] == "2.00×"


def test_a_waterfall_links_sets_in_whatever_order_they_are_written_and_joined() -> None:
    sets = ((1.0, ()), (0.6, ("b",)), (0.5, ("c",)), (0.3, ("a", "b", "d")), (0.9, ("a", "c")))
    drawn = chart("waterfall", *(steady("fp32", factor=factor, techniques=names) for factor, names in sets))
    assert steps(drawn) == ["plain loop", "+ b", "+ a + d", "all together"]


def test_a_waterfall_begins_with_float32_s_plain_loop_and_changes_the_precision_once() -> None:
    cells = (("fp32", 1.0, ()), ("bf16-mixed", 1.0, ()), ("tf32", 1.0, ()), ("bf16-mixed", 0.5, ("a",)))
    drawn = chart("waterfall", *(steady(name, factor=factor, techniques=t) for name, factor, t in cells))
    assert steps(drawn) == ["fp32, plain loop", "bf16-mixed", "+ a", "all together"]
    assert drawn.title == "What each change to fp32 bought"
    assert "waterfall" not in names(*(steady(name) for name, _, t in cells if not t)), "speed-ups are another chart's"


def test_a_waterfall_takes_the_precision_and_a_technique_in_one_step_where_neither_was_measured_alone() -> None:
    drawn = chart("waterfall", steady("fp32"), steady("bf16-mixed", factor=0.5, techniques=("a", "b")))
    assert steps(drawn) == ["fp32, plain loop", "bf16-mixed + a + b", "all together"]


def test_steps_of_a_waterfall_may_have_one_name() -> None:
    links = [Link("plain", 1.0, None), Link("+ a", 2.0, 2.0), Link("+ a", 3.0, 1.5)]
    trace = drawn_links(links, "images", "fp32", "title", DataTable((), ())).traces[0]
    assert len(set(trace["x"])) == len(trace["y"]) == 4


def steps(drawn: Chart) -> list[str]:
    return [str(name).replace("<br>", " ") for name in drawn.layout["xaxis"]["ticktext"]]


def test_a_waterfall_tells_intervals() -> None:
    rounds = [steady("fp32", r, f, techniques=t) for r in range(3) for f, t in ((1.0, ()), (0.5, ("a",)))]
    assert all("95 % interval" in text for text in chart("waterfall", *rounds).traces[0]["hovertext"])


def test_curves_of_one_precision_differ_in_dash_and_marker() -> None:
    runs = [fake_run(fake_training("fp32", {"epochs": 3, "validate_each_epoch": True}, seed=seed)) for seed in (0, 1)]
    first, _, second, _ = chart("loss", *runs).traces
    assert first["line"]["color"] == second["line"]["color"]
    assert first["line"]["dash"] != second["line"]["dash"]
    assert first["marker"]["symbol"] != second["marker"]["symbol"]


def test_curves_are_over_time_and_over_epochs() -> None:
    accuracy = chart("accuracy", *every_kind())
    over_time, over_epochs = accuracy.traces[:2]
    assert over_epochs["x"] == [1, 2, 3, 4]
    assert over_time["x"] == sorted(over_time["x"])
    assert over_time["y"] == over_epochs["y"]
    assert over_epochs["y"][0] == pytest.approx(50.0)
    assert over_time["line"]["color"] == LOOKS["fp32"].colour


def test_telemetry_has_a_panel_each_for_clock_power_and_temperature() -> None:
    traces = chart("telemetry", steady("fp32")).traces
    assert [(trace["yaxis"], trace["y"][-1]) for trace in traces] == [("y", 1980.0), ("y2", 500.0), ("y3", 57.0)]
    assert "telemetry" not in names(fake_trial(step_seconds=(0.1,) * 6))


def test_a_clock_that_stands_is_not_magnified() -> None:
    low, high = chart("telemetry", steady("fp32")).layout["yaxis"]["range"]
    assert (low, high) == (pytest.approx(1980 - 49.5), pytest.approx(1980 + 49.5))
    assert "range" not in chart("telemetry", steady("fp32")).layout["yaxis3"], "the temperature rises"


def test_a_layout_has_room_for_its_legend() -> None:
    few = chart("blocks", steady("fp32"), steady("bf16-mixed"))
    many = chart(
        "blocks", *(steady(precision, batch_size=b) for precision in ("fp32", "tf32") for b in range(8, 64, 8))
    )
    assert fitted(few)["height"] == few.layout["height"]
    assert fitted(many)["height"] > many.layout["height"] + 60
    assert fitted_to_phone(many)["height"] > fitted(many)["height"] + 80
    assert few.layout.keys() >= fitted_to_phone(few).keys()
    alone = chart("throughput", steady("fp32"), steady("bf16-mixed"))
    assert fitted(alone) == alone.layout, "it has no legend"


def test_the_overview_needs_two_topics() -> None:
    assert "overview" not in names(steady("fp32"), steady("tf32"))
    both = [
        steady(precision, workload=workload) for workload in ("resnet50", "dpn92") for precision in ("fp32", "tf32")
    ]
    (trace,) = chart("overview", *both).traces
    assert trace["y"] == ["resnet50", "dpn92"]
    assert [chart("overview", *both, *map(other_machine, both)).table.columns[0].name] == ["topic"]


def test_thousands_of_cells_are_drawn_in_part_and_the_table_has_all() -> None:
    trials = list(many(700))
    drawn = chart("throughput", *trials)
    assert sum(len(trace["x"]) for trace in drawn.traces) == MOST_BARS
    assert len(drawn.table.rows) == 700
    assert drawn.note == f"The {MOST_BARS} highest of 700 cells are drawn; the table has all."
    blocks = chart("blocks", *trials)
    assert len(blocks.traces) == MOST_LINES
    assert blocks.note == f"{MOST_LINES} of 700 cells; `castwise export` has all."


def test_figures_that_are_no_numbers_leave_gaps() -> None:
    lost = fake_trial(step_seconds=(0.1,) * 6, losses=(1.0, math.nan, math.inf, 1.0, 1.0, math.nan), status="diverged")
    for drawn in charts(lost):
        json.dumps([drawn.traces, drawn.layout], allow_nan=False)


def test_a_cpu_s_memory_says_what_it_is() -> None:
    on_cpu = fake_trial(fake_spec(device="cpu"), environment=fake_environment(None))
    assert "upper bound" in chart("memory", on_cpu).note


def test_no_text_reaches_plotly_as_markup() -> None:
    for drawn in charts(*(poisoned(trial, "precision", "loss_scale") for trial in every_kind())):
        words = json.dumps([drawn.traces, drawn.layout], ensure_ascii=False)
        assert "<script" not in words
        assert "<a href" not in words
        assert "<img" not in words
        assert HOSTILE[:9] not in words


def test_a_name_is_no_placeholder_of_a_template() -> None:
    drawn = chart("blocks", *(poisoned(trial, "precision", "loss_scale") for trial in every_kind()))
    placeholders = [trace["hovertemplate"].count("%{") for trace in drawn.traces]
    assert set(placeholders) == {2}, "the block and its value, and none from a record"


def test_inert_text_is_short() -> None:
    assert escape("<b>" * 100).count("&lt;b&gt;") <= 40
    assert escape(7) == "7"


@pytest.mark.parametrize("count", [0, 1, 2, 199, 200, 201, 5000])
def test_thinning_keeps_first_and_last(count: int) -> None:
    kept = downsample(count)
    assert len(kept) == min(count, 200)
    assert kept == sorted(set(kept))
    assert kept[:1] == ([0] if count else [])
    assert kept[-1:] == ([count - 1] if count else [])
