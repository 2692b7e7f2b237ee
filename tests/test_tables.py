import ast
import csv
import io
import json
import math
import re
from collections.abc import Sequence

import pytest
from fake_engine import fake_environment, fake_facts, fake_spec, fake_trial
from fake_gpu import fake_gpu_facts, fake_reading
from rich.console import Console

from castwise.analysis.advice import recommend
from castwise.analysis.energy import Prices
from castwise.analysis.result_table import Row, compare
from castwise.records.schema import Trial
from castwise.render import run_report
from castwise.render.costs import cost_lines
from castwise.render.snippets import snippet_lines
from castwise.render.steady_columns import COLUMNS, EXTRA_COLUMNS, headline, remarks, shown_columns
from castwise.spec.trial import TrialSpec

CSV_HEADER = (
    "workload,data_set,precision,batch_size,gpus,parallelism,loss_scale,techniques,throughput_per_second,speedup,"
    "verdict,loop_speedup,"
    "scaling_efficiency,step_seconds,spread,peak_allocated_bytes,peak_reserved_bytes,joules_per_unit,power_watts,"
    "final_loss,status,unit,processes,"
    "throughput_low,throughput_high,speedup_low,speedup_high,memory_low,memory_high,verdict_reason,"
    "memory_ratio,final_step,skipped_steps,joules_per_unit_low,joules_per_unit_high,energy_source,cold_start_seconds,ready_seconds,set_up_seconds,first_step_seconds,warm_up_seconds,warnings,telemetry_note,"
    "message,device,torch,key"
)


def trial(precision: str, seconds: float, **changes: object) -> Trial:
    return fake_trial(fake_spec(precision, **changes), step_seconds=(seconds,) * 6)


def failed(precision: str, status: str, message: str = "it went wrong") -> Trial:
    return fake_trial(fake_spec(precision), step_seconds=()).model_copy(update={"status": status, "message": message})


DIVERGED = fake_trial(
    fake_spec("fp16-true"), status="diverged", message="the loss was nan", step_seconds=(0.02,), losses=(math.nan,)
)
JOB = [trial("fp32", 0.3), trial("bf16-mixed", 0.1), failed("fp16-mixed", "oom", "no | memory"), DIVERGED]


def printed(trials: Sequence[Trial], width: int = 200) -> str:
    rows, stream = compare(trials), io.StringIO()
    run_report.print_table(rows, recommend(rows), Console(file=stream, width=width, highlight=False))
    return stream.getvalue()


def as_json(trials: Sequence[Trial]) -> dict[str, list[dict[str, object]]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    rows = compare(trials)
    document = json.loads(run_report.to_json(rows, recommend(rows)), parse_constant=refuse)
    assert isinstance(document, dict)
    return document


def as_csv(trials: Sequence[Trial]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(run_report.to_csv(compare(trials)))))


def as_markdown(trials: Sequence[Trial]) -> str:
    rows = compare(trials)
    return run_report.to_markdown(rows, recommend(rows))


def cells(line: str) -> list[str]:
    """Return a Markdown row's cells; an escaped bar separates none."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


SOFTWARE = "castwise 0.0 at 0123456789ab, torch 0.0-fake"


def test_a_headline_of_cells_that_share_nothing_begins_with_the_device() -> None:
    trials = [trial("fp32", 1.0), trial("fp32", 1.0, workload="wrn-28-10", batch_size=8, data_set="cifar10")]
    assert headline(compare(trials)).startswith("On Fake GPU (")


def test_a_table_in_full() -> None:
    assert [line.rstrip() for line in printed([trial("fp32", 0.3), trial("bf16-mixed", 0.1)]).splitlines()] == [
        f"resnet50, batch 256, synthetic data on Fake GPU ({SOFTWARE}, driver 0.0-fake, 2000-01-01)",
        "                                                                            final loss",
        "precision        throughput  speed-up  step time  spread    peak allocated      @ step  status",
        "fp32         853.3 images/s     1.00×   300.0 ms     0 %  1.00 GiB (1.00×)      1 @ 11  ok",
        "bf16-mixed  2,560 images/s*    3.00×*  100.0 ms*     0 %  1.00 GiB (1.00×)      1 @ 11  ok",
        "  * the best at its batch size",
        "",
        "resnet50, batch 256: take bf16-mixed. It trains 3.00 times as fast as fp32 in the same memory.",
        '    with torch.autocast(device_type="cuda", dtype=torch.bfloat16):',
        "        loss = loss_fn(model(x), y)",
        "    loss.backward()",
        "    optimizer.step()",
        '    # Lightning: Trainer(precision="bf16-mixed")',
        '    # Accelerate: accelerator = Accelerator(mixed_precision="bf16")',
        "    # transformers: TrainingArguments(bf16=True, max_grad_norm=0)",
    ]


SIX = (0.1,) * 6
TWO = {"world_size": 2, "parallelism": "ddp"}
SCALING = [trial("fp32", 0.3), trial("fp32", 0.3, **TWO), trial("fp32", 0.4, world_size=2, parallelism="dp")]


def test_gpus_are_columns_where_they_differ() -> None:
    head, _, *body = [cells(line) for line in as_markdown(SCALING).splitlines() if line.startswith("|")]
    shown = [dict(zip(head, row, strict=True)) for row in body]
    assert [row["GPUs"] for row in shown] == ["1", "2", "2"]
    assert [row["parallelism"] for row in shown] == ["–", "ddp", "dp"]
    assert [row["scaling efficiency"] for row in shown] == ["–", "100 %", "75 %"]
    assert "GPUs" not in as_markdown(JOB)
    assert "efficiency" not in as_markdown(SCALING[1:])


def test_gpus_that_are_the_same_for_all_stand_above_the_table() -> None:
    assert "synthetic data, 2 GPUs (ddp) on Fake GPU" in headline(compare([trial("fp32", 0.3, **TWO)]))
    assert "GPUs" not in headline(compare(JOB))


def test_what_is_all_gpus_and_what_is_one_s_is_said() -> None:
    line = "throughput is that of all GPUs together; batch and peak memory are those of one GPU"
    assert line in remarks(compare(SCALING))
    assert line not in remarks(compare(JOB))
    processes = "throughput is that of all CPU processes together; batch and peak memory are those of one process"
    assert processes in remarks(compare([trial("fp32", 0.3, device="cpu", **TWO)]))


def test_energy_that_was_read_of_some_of_several_gpus_is_said_to_be() -> None:
    def spread(num_gpus: int, among: int = 2, **changes: object) -> Trial:
        readings = (fake_reading(num_gpus=num_gpus, **changes),) * 6
        spec: dict[str, object] = {"world_size": among, "parallelism": "ddp"} if among > 1 else {}
        return trial("fp32", 0.3, **spec).model_copy(update={"readings": readings})

    def said(*trials: Trial) -> list[str]:
        return [line for line in remarks(compare(trials)) if line.startswith("energy")]

    words = "energy and power were read of {} GPUs here; the others are taken to be alike"
    assert said(spread(1)) == [words.format("1 of 2")], "as in records of before all were read"
    assert said(spread(3, among=4)) == [words.format("3 of 4")]
    assert said(spread(1), spread(2, among=4), spread(1, among=1)) == [words.format("1 of 2 and 2 of 4")]
    assert said(spread(2)) == []
    assert said(spread(1, energy_joules=None, power_watts=None)) == [], "there is no figure"
    assert said(spread(1, among=1)) == []


@pytest.mark.parametrize("width", [10, 20, 40, 60, 80, 160])
def test_a_table_fits_any_terminal(width: int) -> None:
    lines = printed(JOB, width).splitlines()
    table = lines[1 : next(index for index, line in enumerate(lines) if line.startswith("  resnet50"))]
    assert len(table) > len(JOB)
    assert all(len(line) <= width for line in table)


@pytest.mark.parametrize("width", [60, 70, 80])
def test_a_narrow_terminal_breaks_no_word_and_says_what_is_left_out(width: int) -> None:
    text = printed(JOB, width)
    words = text.split()
    for row in JOB:
        assert row.spec.precision in words
    for word in ("853.3", "images/s", "3.00×*", "diverged", "throughput", "speed-up"):
        assert word in words
    assert "left out, the terminal is too narrow: spread" in text
    assert "left out" not in printed(JOB, 160)


@pytest.mark.parametrize("width", [30, 40, 50])
def test_where_not_even_words_fit_beside_each_other_rows_become_lists(width: int) -> None:
    lines = [line.strip() for line in printed(JOB, width).splitlines()]
    words = " ".join(lines).split()
    assert "left out, the terminal is too narrow" in " ".join(words)
    for row in JOB:
        assert any(line.split() == ["precision", row.spec.precision] for line in lines)
    for word in ("853.3", "2,560", "images/s*", "3.00×*", "diverged", "(1.00×)"):
        assert word in words


def test_the_code_is_never_wrapped_so_that_it_can_be_copied() -> None:
    (advice,) = recommend(compare(JOB))
    code = [*advice.code.splitlines(), *snippet_lines(advice)]
    printed_code = [line.strip() for line in printed(JOB, 40).splitlines()[-len(code) :]]
    assert printed_code == [line.strip() for line in code]


def test_what_looks_like_markup_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    message = "RuntimeError: [bold]sizes[/bold] [3, 4] :smile:"
    rows = compare([trial("fp32", 0.3), failed("tf32", "crashed", message)])
    run_report.print_table(rows, recommend(rows), run_report.result_console())
    assert message in capsys.readouterr().out


def test_an_unhappy_trial_has_dashes_and_a_line_on_why() -> None:
    text = printed(JOB)
    (line,) = [line for line in text.splitlines() if line.startswith("fp16-mixed")]
    assert line.split() == ["fp16-mixed", *"––––––", "oom"]
    assert "resnet50 fp16-mixed batch 256: oom: no | memory" in text
    assert "nan @ 6" in text


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, set()),
        ({"workload": "resnet18"}, {"workload"}),
        ({"batch_size": 8}, {"batch_size"}),
        ({"loss_scale": "128"}, {"loss_scale"}),
        ({"data_set": "mnist"}, {"data_set"}),
    ],
    ids=str,
)
def test_a_column_that_says_nothing_is_left_out(changes: dict[str, object], shown: set[str]) -> None:
    rows = compare([trial("fp32", 0.3), trial("fp16-mixed", 0.1, **changes)])
    names = {column.name for column in shown_columns(rows)}
    assert names & {"workload", "batch_size", "loss_scale", "data_set"} == shown
    assert "peak_reserved_bytes" not in names


def test_without_a_baseline_there_is_no_speedup_column() -> None:
    names = [column.name for column in shown_columns(compare([trial("tf32", 0.3)]))]
    assert "speedup" not in names
    assert "throughput_per_second" in names


def test_no_two_columns_share_a_name() -> None:
    names = [column.name for column in (*COLUMNS, *EXTRA_COLUMNS)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("column", [*COLUMNS, *EXTRA_COLUMNS], ids=lambda column: column.name)
@pytest.mark.parametrize("row", compare(JOB), ids=lambda row: row.trial.status)
def test_every_column_has_a_text_for_every_end_of_a_trial(column: object, row: Row) -> None:
    text = column.text(row)  # type: ignore[attr-defined]
    assert isinstance(text, str)
    assert "None" not in text


def test_the_headline_says_what_all_trials_share() -> None:
    one = headline(compare([trial("fp32", 0.3)]))
    assert one.startswith(f"resnet50, batch 256, synthetic data on Fake GPU ({SOFTWARE}, driver 0.0-fake,")
    several = headline(compare([trial("fp32", 0.3), trial("fp32", 0.3, workload="dpn92", batch_size=8)]))
    assert several.startswith("synthetic data on Fake GPU")
    on_cpu = fake_trial(fake_spec(device="cpu"), environment=fake_environment(None))
    assert "on Fake CPU (2 cores) (castwise 0.0 at 0123456789ab, torch 0.0-fake, 2000-01-01)" in headline(
        compare([on_cpu])
    )
    assert headline([]) == "no trials"


def test_remarks_say_what_figures_do_not() -> None:
    assert remarks(compare([trial("fp32", 0.3)])) == []
    on_cpu = fake_trial(fake_spec("bf16-mixed", device="cpu"), step_seconds=SIX, environment=fake_environment(None))
    assert remarks(compare([on_cpu])) == [
        "bf16-mixed is emulated here: Fake CPU (2 cores) has no bfloat16 instructions",
        "peak allocated on a CPU is the growth of the process's resident set: an upper bound",
    ]
    on_old_gpu = fake_trial(fake_spec("bf16-true"), step_seconds=SIX, environment=fake_environment((7, 5)))
    assert remarks(compare([on_old_gpu])) == [
        "bf16-true is emulated here: Fake GPU has compute capability 7.5, before 8.0"
    ]


@pytest.mark.parametrize(
    ("settled", "seconds", "told"),
    [(False, (0.1, 0.2) * 3, True), (True, (0.1, 0.2) * 3, True), (False, (0.1,) * 6, False)],
)
def test_noisy_blocks_are_told_and_whether_warm_up_had_settled(
    settled: bool, seconds: tuple[float, ...], told: bool
) -> None:
    noisy = fake_trial(step_seconds=seconds, facts=fake_facts(settled=settled))
    lines = remarks(compare([noisy]))
    assert bool(lines) == told
    assert all("blocks spread by 67 %" in line for line in lines)
    assert all(("never settled" in line) != settled for line in lines)


def test_csv_has_a_line_a_trial_with_plain_values() -> None:
    text = run_report.to_csv(compare(JOB))
    assert text.splitlines()[0] == CSV_HEADER
    rows = as_csv(JOB)
    assert [row["precision"] for row in rows] == ["fp32", "bf16-mixed", "fp16-mixed", "fp16-true"]
    assert float(rows[1]["speedup"]) == pytest.approx(3)
    assert float(rows[1]["throughput_per_second"]) == pytest.approx(2560)
    assert (rows[2]["status"], rows[2]["throughput_per_second"], rows[2]["final_loss"]) == ("oom", "", "")
    assert math.isnan(float(rows[3]["final_loss"]))
    assert {row["key"] for row in rows} == {trial.spec.key for trial in JOB}
    assert {row["unit"] for row in rows} == {"images"}


def test_csv_quotes_what_needs_it() -> None:
    message = 'says "no", twice,\nand | once more'
    (row,) = as_csv([failed("fp32", "crashed", message)])
    assert row["message"] == message


def test_json_holds_rows_advice_and_whole_trials() -> None:
    document = as_json(JOB)
    assert set(document) == {"rows", "advice", "trials"}
    assert [set(row) for row in document["rows"]] == [{*CSV_HEADER.split(","), "estimates"}] * 4
    assert [row["speedup"] for row in document["rows"][:2]] == [pytest.approx(1), pytest.approx(3)]
    assert document["rows"][2]["final_loss"] is None
    assert document["rows"][3]["final_loss"] == "nan"
    (advice,) = document["advice"]
    assert set(advice) == {"workload", "precision", "sentence", "code", "frameworks"}
    assert advice["frameworks"]["Lightning"] == 'Trainer(precision="bf16-mixed")'
    assert advice["precision"] == "bf16-mixed"
    ast.parse(str(advice["code"]))
    trials = [Trial.model_validate_json(json.dumps(item)) for item in document["trials"]]
    assert repr(trials) == repr(JOB)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_json_is_strict_whatever_the_loss(loss: float) -> None:
    (row,) = as_json([fake_trial(losses=(loss,))])["rows"]
    assert row["final_loss"] == str(loss)


def test_a_markdown_table_has_as_many_cells_in_every_line() -> None:
    lines = [line for line in as_markdown(JOB).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(JOB)
    assert {len(cells(line)) for line in lines} == {len(shown_columns(compare(JOB)))}
    assert all(re.fullmatch(r"-{3,}:?", cell) for cell in cells(lines[1]))
    assert cells(lines[0])[0] == "precision"


def test_markdown_escapes_what_would_end_a_cell() -> None:
    odd = "torchvision:a|b"
    lines = as_markdown([trial("fp32", 0.3), trial("fp32", 0.3, workload=odd)]).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({len(cells(line)) for line in table}) == 1
    assert cells(table[-1])[0] == r"torchvision:a\|b"


def test_markdown_has_headline_remarks_advice_and_code_as_blocks() -> None:
    text = as_markdown(JOB)
    assert text.startswith("resnet50, batch 256, synthetic data on Fake GPU")
    assert "\n- resnet50 fp16-mixed batch 256: oom: no | memory\n" in text
    assert "\n\nresnet50, batch 256: take bf16-mixed." in text
    assert text.count("```") == 2
    assert text.endswith("```\n")
    code = text.partition("```python\n")[2].partition("```")[0]
    ast.parse(code)
    assert "\n\n\n" not in text


def test_markdown_without_remarks_or_code_has_no_empty_parts() -> None:
    text = as_markdown([trial("fp32", 0.3)])
    assert "\n\n\n" not in text
    assert "```" not in text
    assert not text.endswith("\n\n")


def test_no_trials_is_no_crash() -> None:
    assert printed([]).strip().startswith("no trials")
    assert as_markdown([]).startswith("no trials")
    assert as_csv([]) == []
    assert as_json([]) == {"rows": [], "advice": [], "trials": []}


def test_several_workloads_are_told_apart_and_advised_each() -> None:
    specs: list[TrialSpec] = [fake_spec(p, workload=w) for w in ("resnet18", "lstm-lm") for p in ("fp32", "tf32")]
    text = printed([fake_trial(spec) for spec in specs])
    assert "resnet18, batch 256: stay with fp32" in text
    assert "lstm-lm, batch 256: stay with fp32" in text
    assert "tokens/s" in text
    assert "images/s" in text


def test_a_piped_table_is_as_wide_as_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert run_report.result_console().width >= 160
    assert run_report.result_console(60).width == 60


def watched(precision: str, joules: float, **changes: object) -> Trial:
    """Return a trial of 256 samples and 0.1 s a block, with readings."""
    readings = (fake_reading(energy_joules=joules, sm_clock_hertz=1e9, seconds=0.1),) * 6
    update = {"readings": readings, "gpu_facts": fake_gpu_facts()}
    return trial(precision, 0.1, **changes).model_copy(update=update)


def test_energy_and_power_are_columns_where_they_were_measured() -> None:
    text = as_markdown([watched("fp32", 256.0), trial("bf16-mixed", 0.1)])
    head, _, *body = [cells(line) for line in text.splitlines() if line.startswith("|")]
    shown = [dict(zip(head, row, strict=True)) for row in body]
    assert [row["energy"] for row in shown] == ["1 J/image", "–"]
    assert [row["power"] for row in shown] == ["500 W", "–"]
    assert "energy" not in as_markdown(JOB)


def test_a_narrow_terminal_does_without_power() -> None:
    assert "left out, the terminal is too narrow: power" in printed([watched("fp32", 256.0)], 80)


def test_energy_and_warnings_in_csv_and_json() -> None:
    (row,) = as_csv([watched("fp32", 256.0)])
    assert (row["joules_per_unit"], row["joules_per_unit_low"], row["joules_per_unit_high"]) == ("1.0", "1.0", "1.0")
    assert (row["energy_source"], row["power_watts"], row["warnings"]) == ("counter", "500.0", "clock-below-boost")
    (object_,) = as_json([watched("fp32", 256.0)])["rows"]
    (warning,) = object_["warnings"]  # type: ignore[misc]
    assert set(warning) == {"name", "seen", "cause", "advice"}  # type: ignore[has-type]
    assert as_json(JOB)["rows"][0]["warnings"] == []


PRICES = Prices(per_kwh=0.25, per_gpu_hour=3.0)


def test_an_epoch_s_cost_is_a_line_where_its_size_is_known() -> None:
    # 2560 samples a second, 1 J each: 60,000 take 23.4 s and 0.0167 kWh.
    rows = compare([watched("fp32", 256.0, data_set="mnist")])
    assert cost_lines(rows, PRICES) == [
        "resnet50 fp32 batch 256: an epoch of 60,000 samples costs 0.00417 in electricity (0.0167 kWh, GPU alone) or "
        "0.0195 in GPU hours (0.00651 h)"
    ]
    assert cost_lines(rows, None) == cost_lines(rows, Prices()) == []


def test_else_a_million_samples_are_reckoned() -> None:
    (line,) = cost_lines(compare([watched("fp32", 256.0)]), Prices(per_kwh=0.25))
    assert line.endswith("a million samples cost 0.0694 in electricity (0.278 kWh, GPU alone)")
    (line,) = cost_lines(compare([trial("fp32", 0.1)]), Prices(per_kwh=0.25))
    assert line.endswith("a million samples cost what is not known: no energy was measured")
    assert cost_lines(compare([failed("fp32", "oom")]), PRICES) == []


def test_a_stand_in_s_epoch_is_as_long_as_the_real_one() -> None:
    (line,) = cost_lines(compare([watched("fp32", 256.0, data_set="synthetic:cifar100")]), PRICES)
    assert "an epoch of 50,000 samples" in line


def test_costs_stand_in_every_format_where_prices_are_given() -> None:
    rows = compare([watched("fp32", 256.0)])
    assert "a million samples cost" in run_report.to_markdown(rows, [], PRICES)
    (cost,) = json.loads(run_report.to_json(rows, [], PRICES))["costs"]
    assert set(cost) == {"key", "samples", "seconds", "joules", "energy_cost", "gpu_hour_cost"}
    stream = io.StringIO()
    run_report.print_table(rows, [], Console(file=stream, width=300, highlight=False), PRICES)
    assert "a million samples cost" in stream.getvalue()


def test_what_a_cell_takes_before_its_first_timed_step_is_said() -> None:
    """Users pay for processes, libraries, searches and compilation too."""
    facts = fake_facts(ready_seconds=0.5, set_up_seconds=0.25, first_step_seconds=1.0, warm_up_seconds=0.75)
    quick, slow = fake_trial(), fake_trial(fake_spec("bf16-mixed"), facts=facts)
    lines = remarks(compare([quick.model_copy(update={"facts": facts}), slow]))
    assert "cold start, from the request for a process to the first timed step: 2.50 s" in "\n".join(lines)
    (row, _) = as_csv([slow, quick])
    assert (row["cold_start_seconds"], row["first_step_seconds"]) == ("2.5", "1.0")


def test_what_befell_all_trials_alike_is_said_once() -> None:
    message = "ValueError: wrong (train_me.py:3, in forward)"
    both = [failed("fp32", "crashed", message), failed("tf32", "crashed", message)]
    assert remarks(compare(both))[0] == f"all 2 trials: crashed: {message}"
    other = remarks(compare([both[0], failed("tf32", "crashed", "ValueError: other")]))
    assert other[0] == f"{both[0].spec.label}: crashed: {message}"
    assert remarks(compare(both[:1]))[0] == f"{both[0].spec.label}: crashed: {message}"


def test_each_batch_has_a_best_of_its_own_and_a_failed_cell_is_none() -> None:
    rows = compare([*JOB, trial("fp32", 0.2, batch_size=8), trial("tf32", 0.1, batch_size=8)])
    text = [line for line in printed([row.trial for row in rows]).splitlines() if "images/s*" in line]
    assert [line.split()[:2] for line in text] == [["bf16-mixed", "256"], ["tf32", "8"]], "fp16-true diverged"


def test_equal_figures_have_no_best() -> None:
    assert "*" not in printed([trial("fp32", 0.3), trial("tf32", 0.3)])


def test_blocks_that_differ_are_drawn_on_one_scale_and_quiet_ones_left_out() -> None:
    noisy = fake_trial(fake_spec("tf32"), step_seconds=(0.1, 0.12, 0.1, 0.08, 0.1))
    quiet = fake_trial(fake_spec("fp32"), step_seconds=(0.3,) * 5)
    text = printed([quiet, noisy])
    assert "blocks," in text
    assert "±20 %" in text
    assert "▅█▅▁▅" in text
    assert "blocks, ±" not in " ".join(printed([quiet]).split())
