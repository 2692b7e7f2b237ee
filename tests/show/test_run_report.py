"""The results of steady trials in every format."""

import ast
import csv
import io
import json
import math
import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_args
from xml.etree import ElementTree

import jsonschema
import pytest
from fake_engine import fake_environment, fake_facts, fake_spec, fake_trial
from fake_gpu import fake_gpu_facts, fake_reading
from rich.console import Console
from syrupy.assertion import SnapshotAssertion

from castwise.analysis.code_snippets import framework_lines
from castwise.analysis.decide import Decision, decide
from castwise.analysis.energy import Prices
from castwise.analysis.result_table import rows_of_steps
from castwise.analysis.warnings import TrialWarning
from castwise.records.schema import GpuCounters, Trial
from castwise.show import run_report
from castwise.show.fields import Field, in_files
from castwise.show.notes import MORE, cost_lines, headline, measured_on, note_lines, remarks
from castwise.show.presentation import Code, html, print_parts
from castwise.show.table import SCHEMA_VERSION

CSV_HEADER = (
    "workload,data_set,precision,batch_size,gpus,parallelism,loss_scale,techniques,throughput_per_second,"
    "written_speedup,default_speedup,speedup,bf16_speedup,verdict,loop_speedup,scaling_efficiency,data_share,"
    "step_seconds,spread,model_flops_per_second,model_flops_utilization,fp8_share,min_sqnr_db,"
    "max_underflow_share,peak_allocated_bytes,peak_reserved_bytes,"
    "joules_per_unit,power_watts,tensor_share,dram_share,final_loss,skipped_steps,status,unit,processes,throughput_low,throughput_high,"
    "default_speedup_low,default_speedup_high,written_speedup_low,written_speedup_high,speedup_low,speedup_high,"
    "bf16_speedup_low,bf16_speedup_high,memory_low,memory_high,scaling_efficiency_low,scaling_efficiency_high,"
    "verdict_reason,memory_ratio,final_step,joules_per_unit_low,"
    "joules_per_unit_high,energy_source,cold_start_seconds,ready_seconds,set_up_seconds,first_step_seconds,"
    "warm_up_seconds,warnings,telemetry_note,message,device,torch,key"
)
PRICES = Prices(per_kwh=0.25, per_gpu_hour=3.0)
TWO_GPUS: dict[str, object] = {"world_size": 2, "parallelism": "ddp"}


def trial(precision: str, seconds: float, **changes: object) -> Trial:
    return fake_trial(fake_spec(precision, **changes), step_seconds=(seconds,) * 6)


def twice(precision: str, seconds: float, **changes: object) -> list[Trial]:
    """Return two processes of a configuration: advice rests on intervals."""
    return [trial(precision, seconds, repeat=repeat, **changes) for repeat in (0, 1)]


def failed(precision: str, status: str, message: str = "it went wrong") -> Trial:
    return fake_trial(fake_spec(precision), step_seconds=()).model_copy(update={"status": status, "message": message})


def metered(precision: str, joules: float, **changes: object) -> Trial:
    """Return a trial of 256 samples and 0.1 s a block, with readings."""
    readings = (fake_reading(energy_joules=joules, sm_clock_hertz=1e9, seconds=0.1),) * 6
    update = {"readings": readings, "gpu_facts": fake_gpu_facts()}
    return trial(precision, 0.1, **changes).model_copy(update=update)


def rounds(*gains: float, drift: float = 1.0, interleaved: bool = True) -> list[Trial]:
    """Return fp32 and bf16-mixed over rounds, with more blocks of fp32, so that drift affects it alone."""
    trials = []
    for repeat, gain in enumerate(gains):
        before = [0.3 * drift**block for block in range(8)]
        for precision, seconds in (("fp32", before), ("bf16-mixed", [each / gain for each in before[:4]])):
            one = fake_trial(fake_spec(precision, repeat=repeat), step_seconds=seconds)
            trials.append(one.model_copy(update={"session_id": f"s{repeat}" if interleaved else None}))
    return trials


DIVERGED = fake_trial(
    fake_spec("fp16-true"), status="diverged", message="the loss was nan", step_seconds=(0.02,), losses=(math.nan,)
)
DEFAULT, FP32, BF16 = (
    twice(name, seconds) for name, seconds in (("default", 0.25), ("fp32", 0.3), ("bf16-mixed", 0.1))
)
JOB = [*DEFAULT, *FP32, *BF16, failed("fp16-mixed", "oom", "no | memory"), DIVERGED]
NUM_ROWS = 5
ON_GPUS = [trial("fp32", 0.3), trial("fp32", 0.3, **TWO_GPUS), trial("fp32", 0.4, world_size=2, parallelism="dp")]


def printed(trials: Sequence[Trial], width: int = 80, prices: Prices | None = None, **how: bool) -> str:
    rows, stream = rows_of_steps(trials), io.StringIO()
    console = Console(file=stream, width=width, highlight=False)
    print_parts(run_report.present(rows, decide(rows), prices, **how).parts, console)
    return stream.getvalue()


def as_json(trials: Sequence[Trial]) -> dict[str, list[dict[str, Any]]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    rows = rows_of_steps(trials)
    document = json.loads(run_report.present(rows, decide(rows)).text("json"), parse_constant=refuse)
    assert isinstance(document, dict)
    return document


def as_csv(trials: Sequence[Trial]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(run_report.present(rows_of_steps(trials), []).text("csv"))))


def as_markdown(trials: Sequence[Trial], *, wide: bool = False) -> str:
    rows = rows_of_steps(trials)
    return run_report.present(rows, decide(rows), wide=wide).text("markdown")


def markdown_rows(trials: Sequence[Trial], *, wide: bool = False) -> list[dict[str, str]]:
    """Return the cells of the Markdown table by heading; an escaped bar separates no cells."""
    lines = [line for line in as_markdown(trials, wide=wide).splitlines() if line.startswith("|")]
    head, _, *body = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [dict(zip(head, row, strict=True)) for row in body]


def shown(trials: Sequence[Trial]) -> list[str]:
    return [column.name for column in run_report.data_table(rows_of_steps(trials)).columns]


def test_a_terminal_shows_table_advice_and_notes(snapshot: SnapshotAssertion) -> None:
    assert printed(JOB) == snapshot
    assert printed([]).strip() == "no trials"


def test_all_columns_and_all_notes_on_demand(snapshot: SnapshotAssertion) -> None:
    assert printed(JOB, 160, wide=True, verbose=True) == snapshot


SETTINGS = [
    *JOB,
    *twice("fp16-mixed", 0.08, techniques=("channels-last", "fused-optimizer")),
    *twice(
        "bf16-mixed", 0.08, techniques=("channels-last", "fused-optimizer", "no-step-sync", "compile", "cuda-graph")
    ),
    trial("fp16-mixed", 0.1, loss_scale="1024"),
    trial("fp32", 0.3, batch_size=8),
]


@pytest.mark.parametrize("trials", [JOB, ON_GPUS, SETTINGS, rounds(1.05, 1.06, 1.04)], ids=range(4))
def test_80_columns_are_enough(trials: list[Trial]) -> None:
    rows = rows_of_steps(trials)
    table = run_report.short_table(rows)
    lines = printed(trials).splitlines()
    header = next(line for line in lines if line.startswith("precision"))
    assert header.split() == " ".join(column.title for column in table.columns).split()
    assert all(len(line) <= 80 for line in lines[: lines.index("Fake GPU, torch 0.0-fake, 2000-01-01")])
    for row in table.rows:
        cells = {column.text(row).split()[0] for column in table.columns}
        assert any(cells <= set(line.split()) for line in lines), row


def test_rows_come_under_what_they_do_not_share() -> None:
    lines = printed(SETTINGS).splitlines()
    loop = lines.index("batch 256, channels-last + fused-optimizer")
    assert lines[loop + 1].split() == ["fp16-mixed", "3,200", "3.13", "3.75", "1.00", "GiB", "faster"]
    assert lines[lines.index("batch 8, plain loop") + 1].startswith("  fp32")


def test_ratios_are_those_of_the_advice() -> None:
    (first, _) = decide(rows_of_steps(SETTINGS))
    (row,) = (row for row in run_report.short_table(rows_of_steps(SETTINGS)).rows if row["key"] == first.key)
    assert first.over_default is not None
    assert first.over_fp32 is not None
    assert (row["default_speedup"], row["speedup"]) == (first.over_default.value, first.over_fp32.value)


def test_colours_are_for_what_is_taken_slower_or_failed() -> None:
    rows, stream = rows_of_steps(JOB), io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="standard", width=80)
    print_parts(run_report.present(rows, decide(rows)).parts, console)
    lines = stream.getvalue().splitlines()
    fp32, taken, diverged = (
        next(line for line in lines[2:] if name in line) for name in ("fp32", "bf16-mixed", "fp16-true")
    )
    assert "\x1b[31mslower" in fp32
    assert taken.startswith("\x1b[1;32m")
    assert "\x1b[31mdiverged" in diverged
    assert "\x1b[" not in printed(JOB)


def test_three_notes_of_a_line_each_and_where_the_others_are() -> None:
    disturbed = trial("fp32", 0.3).model_copy(update={"readings": (fake_reading(cpu_pressure=0.5),) * 6})
    slow_start = fake_trial(fake_spec("tf32"), step_seconds=(0.5, *(0.1,) * 4))
    noisy = [
        fake_trial(fake_spec(name), step_seconds=(0.1, 0.2) * 3) for name in ("bf16-mixed", "fp16-mixed", "bf16-true")
    ]
    lines = printed([disturbed, slow_start, *noisy]).splitlines()
    assert lines[-4:] == [
        "noisy: 3 of 5 configurations (blocks spread by 67 %)",
        "cpu-starved: fp32 (tasks waited for a CPU 50 % of the time)",
        "first-block-slow: tf32 (the first block took 400 % longer)",
        "1 more with --verbose",
    ]


def test_a_process_in_another_mode_is_a_note_and_how_likely_none_is_seen_is_a_detail() -> None:
    def noted(*seconds: float) -> tuple[str, str]:
        trials = [fake_trial(fake_spec(repeat=n), step_seconds=(each,) * 4) for n, each in enumerate(seconds)]
        return "\n".join(note_lines(rows_of_steps(trials), MORE)), "\n".join(remarks(rows_of_steps(trials)))

    line, _ = noted(0.1, 0.1, 0.125, 0.101)
    assert "modes: fp32: 1 of 4 processes took 1.25× as long as the others" in line
    line, details = noted(0.1, 0.102, 0.101)
    assert "modes" not in line
    assert "modes: 3 of 3 processes agree; 51 % of runs do not see a slow mode of one process in five" in details
    assert "modes" not in noted(0.1, 0.15)[1], "of two, none stands out"


def test_the_answer_says_why_and_how_sure() -> None:
    text = printed([*JOB, *twice("fp16-master", 0.0995)], 160)
    assert "\n  Why: fp16-master +0.5 %: within 3 %, so the simpler one.\n  How sure: 2 runs each.\n    import " in text
    undecided = printed([FP32[0], trial("bf16-mixed", 0.19)]).splitlines()
    command = next(line for line in undecided if line.startswith("    castwise run resnet50 "))
    assert undecided[undecided.index(command) + 1] == "  How sure: one run."
    assert sum("castwise run" in line for line in undecided) == 1


@pytest.mark.parametrize(
    ("workload", "command"), [("resnet50", "castwise why resnet50"), ("own:Net", "castwise.why(...)")]
)
def test_the_answer_says_why_it_is_no_faster_if_counters_show_it(workload: str, command: str) -> None:
    counters = GpuCounters(num_blocks=1, sm_share=0.3)
    trials = [fake_trial(fake_spec(precision, workload=workload)) for precision in ("fp32", "bf16-mixed")]
    seen = [trial.model_copy(update={"counters": counters}) for trial in trials]
    evidence = "bf16-mixed: the GPU's multiprocessors are busy 30 % of the time"
    assert f"\n  Limited by: {evidence}. `{command}` says more.\n" in printed(seen, 160)
    assert "Limited by" not in printed(trials)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, set()),
        ({"batch_size": 8}, {"batch_size"}),
        ({"loss_scale": "128"}, {"loss_scale"}),
        ({"data_set": "mnist"}, {"data_set"}),
        (TWO_GPUS, {"gpus", "parallelism"}),
    ],
    ids=lambda value: "-".join(sorted(value)) or "none",
)
def test_columns_with_one_usual_value_are_left_out(changes: dict[str, object], names: set[str]) -> None:
    found = set(shown([trial("fp32", 0.3), trial("fp16-mixed", 0.1, **changes)]))
    assert found & {"workload", "batch_size", "loss_scale", "data_set", "gpus", "parallelism"} == names
    assert {"peak_reserved_bytes", "joules_per_unit", "verdict", "skipped_steps"} & found == set()
    assert {"precision", "throughput_per_second", "status"} <= found
    assert "speedup" not in shown([trial("tf32", 0.3)]), "there is no baseline"


def test_rows_that_differ_in_loss_scale_alone_show_it() -> None:
    scales = [trial("fp16-mixed", 0.1, loss_scale=scale) for scale in ("dynamic", "none")]
    assert "loss_scale" in shown([trial("fp32", 0.3), *scales])


def test_rows_differ_in_gpus_and_parallelism() -> None:
    rows = markdown_rows(ON_GPUS)
    assert [row["GPUs"] for row in rows] == ["1", "2", "2"]
    assert [row["parallelism"] for row in rows] == ["–", "ddp", "dp"]
    assert [row["scaling"] for row in rows] == ["–", "100.0 %", "75.0 %"]
    assert headline(rows_of_steps(ON_GPUS[1:2])).endswith("2 GPUs (ddp)")
    assert any("all GPUs together" in line for line in remarks(rows_of_steps(ON_GPUS)))
    assert any(
        "all CPU processes" in line for line in remarks(rows_of_steps([trial("fp32", 0.3, device="cpu", **TWO_GPUS)]))
    )
    assert not any("together" in line for line in remarks(rows_of_steps(JOB)))


@pytest.mark.parametrize(
    ("num_read", "num_gpus", "changes", "words"),
    [
        (3, 4, {}, "of 3 of 4 GPUs"),
        (2, 2, {}, None),
        (1, 2, {"energy_joules": None, "power_watts": None}, None),
    ],
)
def test_energy_of_some_of_the_gpus_is_a_remark(
    num_read: int, num_gpus: int, changes: dict[str, object], words: str | None
) -> None:
    spec: dict[str, object] = {"world_size": num_gpus, "parallelism": "ddp" if num_gpus > 1 else "none"}
    readings = (fake_reading(num_gpus=num_read, **changes),) * 6
    lines = remarks(rows_of_steps([trial("fp32", 0.3, **spec).model_copy(update={"readings": readings})]))
    found = [line for line in lines if line.startswith("energy")]
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_code_and_messages_are_printed_unchanged() -> None:
    (advice,) = decide(rows_of_steps(JOB))
    code = [*advice.code.splitlines(), *framework_lines(advice.snippets)]
    assert "\n".join(f"    {line}" for line in code) in printed(JOB, 40)
    message = "RuntimeError: [bold]sizes[/bold] [3, 4] :smile:"
    assert f"crashed: tf32 ({message})" in printed([trial("fp32", 0.3), failed("tf32", "crashed", message)])


def test_remarks() -> None:
    assert remarks(rows_of_steps([trial("fp32", 0.3)])) == []
    both = [failed("fp32", "crashed"), failed("tf32", "crashed")]
    assert remarks(rows_of_steps(both))[0] == "all 2 trials: crashed: it went wrong"
    assert remarks(rows_of_steps([both[0], failed("tf32", "oom")]))[0].startswith(both[0].spec.label)
    cpu = fake_trial(fake_spec("bf16-mixed", device="cpu"), step_seconds=(0.1,) * 6, environment=fake_environment(None))
    emulated, memory = remarks(rows_of_steps([cpu]))
    assert emulated.startswith("bf16-mixed is emulated here: Fake CPU")
    assert memory.startswith("peak allocated on a CPU")
    (noise,) = remarks(rows_of_steps([fake_trial(step_seconds=(0.1, 0.2) * 3, facts=fake_facts(settled=False))]))
    assert "blocks spread by 67 %, and the step time never settled" in noise
    facts = fake_facts(ready_seconds=0.5, set_up_seconds=0.25, first_step_seconds=1.0, warm_up_seconds=0.75)
    cold = fake_trial(facts=facts)
    assert any("first timed step: 2.50 s" in line for line in remarks(rows_of_steps([cold])))
    assert as_csv([cold])[0]["cold_start_seconds"] == "2.5"
    facts = facts.model_copy(update={"join_seconds": 0.5, "compile_seconds": 0.8, "loaded_graphs": 2})
    staged = fake_trial(facts=facts).model_copy(update={"stage_seconds": {"setting up": 2.3, "timing": 0.01}})
    seconds = "setting up 2.3 (of these ready 0.5, join 0.5, set up 0.2, first step 1.0, compile 0.8, warm up"
    assert any(f"{seconds} 0.8; 0 graphs compiled, 2 loaded)" in line for line in remarks(rows_of_steps([staged])))


def test_the_headline_names_what_all_trials_share() -> None:
    assert headline(rows_of_steps(JOB)) == "resnet50, batch 256, synthetic data"
    other = trial("fp32", 0.3, workload="dpn92", batch_size=8)
    assert headline(rows_of_steps([trial("fp32", 0.3), other])) == "synthetic data"
    other = trial("fp32", 1.0, workload="wrn-28-10", batch_size=8, data_set="cifar10")
    assert headline(rows_of_steps([trial("fp32", 1.0), other])) == ""


def measured(commit: str | None, date: str, **environment: object) -> Trial:
    update = {"commit": commit, "gpu": "NVIDIA X", "castwise": "0.1.0", "torch": "2.11.0", "driver": "580"}
    found = fake_trial().environment.model_copy(update=update | environment)
    return fake_trial().model_copy(update={"environment": found, "started_at": f"{date}T10:00:00+00:00"})


def test_all_devices_versions_commits_and_dates_are_named() -> None:
    one, other = measured("80a6", "2026-11-21"), measured("e7fc", "2026-11-22")
    assert measured_on([one, one]) == "NVIDIA X (castwise 0.1.0 at 80a6, torch 2.11.0, driver 580, 2026-11-21)"
    assert "at e7fc and 80a6" in measured_on([other, one])
    assert "2026-11-21 to 2026-11-22" in measured_on([other, one])
    plain = measured(None, "2026-11-21", gpu="NVIDIA Y", torch="2.12.0", driver=None)
    assert measured_on([one, plain]).startswith("NVIDIA X and NVIDIA Y (castwise 0.1.0 at 80a6, torch 2.11.0 and")
    assert measured_on([one, plain], is_brief=True) == "NVIDIA X and NVIDIA Y, torch 2.11.0 and 2.12.0, 2026-11-21"
    assert measured_on([plain]) == "NVIDIA Y (castwise 0.1.0, torch 2.12.0, 2026-11-21)"


def test_csv_has_plain_values() -> None:
    assert run_report.present(rows_of_steps(JOB), []).text("csv").splitlines()[0] == CSV_HEADER
    message = 'says "no", twice,\nand | once more'
    rows = as_csv([*JOB, failed("fp32", "crashed", message)])
    assert message in {row["message"] for row in rows}
    default, fp32, mixed, oom, diverged = rows[:NUM_ROWS]
    assert [row["precision"] for row in (default, fp32, mixed)] == ["default", "fp32", "bf16-mixed"]
    assert float(mixed["speedup"]) == pytest.approx(3)
    assert float(mixed["default_speedup"]) == float(mixed["default_speedup_low"]) == pytest.approx(2.5)
    assert float(mixed["throughput_per_second"]) == pytest.approx(2560)
    assert (oom["status"], oom["throughput_per_second"], oom["final_loss"]) == ("oom", "", "")
    assert math.isnan(float(diverged["final_loss"]))
    assert {row["unit"] for row in rows} == {"images"}
    assert as_csv([]) == []


PASTED = [
    'applied = castwise.apply(model, optimizer, precision="bf16-mixed")  # once, before the loop, and never again',
    'applied = castwise.apply(model, optimizer, precision="fp8-tensorwise", techniques="fused-optimizer+compile")',
    '# Accelerate: accelerator = Accelerator(mixed_precision="bf16")  # after backward: accelerator.clip(model, 1)',
    "step()  # each step",
]
COMMAND = (
    "castwise run --precision fp32,bf16-mixed --batch-size 32 --within 1% -- python 'my folder/train me.py' --lr 1e-3"
)


def test_a_terminal_breaks_what_is_to_copy_only_where_it_stays_the_same() -> None:
    def lines(code: Code, width: int, *, is_terminal: bool = True) -> list[str]:
        stream = io.StringIO()
        code.print(Console(file=stream, width=width, force_terminal=is_terminal, color_system=None))
        return stream.getvalue().splitlines()

    python = lines(Code(PASTED), 80)
    assert max(map(len, python)) <= 80
    assert ast.dump(ast.parse(textwrap.dedent("\n".join(python)))) == ast.dump(ast.parse("\n".join(PASTED)))
    assert all(
        comment in "".join(python) for comment in ("# once, before", "# each step", "accelerator.clip(model, 1)")
    )
    for width in (40, 60, 80):
        assert shlex.split("\n".join(lines(Code([COMMAND], "sh"), width)).replace("\\\n", "")) == shlex.split(COMMAND)
    assert lines(Code([COMMAND], "sh"), 80, is_terminal=False) == [f"    {COMMAND}"], "for grep"


def test_a_warning_stands_at_its_row_unless_all_have_it() -> None:
    starved = {"readings": (fake_reading(cpu_pressure=0.9),) * 6}
    warned = [each.model_copy(update=starved) for each in BF16]
    text = printed([*FP32, *warned])
    assert re.search(r"^bf16-mixed .* faster, busy CPU *$", text, re.MULTILINE)
    assert re.search(r"^fp32 .* – *$", text, re.MULTILINE)
    both = printed([*(each.model_copy(update=starved) for each in FP32), *warned])
    assert "faster, busy CPU" not in both
    assert "cpu-starved: " in both
    cpu = fake_environment(None, cpu_features=())
    emulated = [fake_trial(fake_spec(name, device="cpu"), environment=cpu) for name in ("fp32", "bf16-mixed")]
    assert re.search(r"^bf16-mixed .*, emulated *$", printed(emulated), re.MULTILINE)


def test_json_has_rows_advice_and_whole_trials() -> None:
    document = as_json(JOB)
    assert list(document) == ["schema_version", "rows", "warnings", "advice", "trials"]
    assert [list(row) for row in document["rows"]] == [CSV_HEADER.split(",")] * NUM_ROWS
    rows = document["rows"]
    assert (rows[0]["verdict"], rows[2]["verdict"]) == (None, "faster")
    assert [row["final_loss"] for row in rows[3:]] == [None, "nan"]
    (advice,) = document["advice"]
    assert (advice["decision"], advice["precision"], advice["command"]) == ("take", "bf16-mixed", None)
    assert advice["frameworks"]["Lightning"] == 'Trainer(precision="bf16-mixed")'
    ast.parse(advice["code"])
    trials = [Trial.model_validate_json(json.dumps(item)) for item in document["trials"]]
    assert [each.model_dump_json() for each in trials] == [each.model_dump_json() for each in JOB]
    for loss in (math.inf, -math.inf):
        assert as_json([fake_trial(losses=(loss,))])["rows"][0]["final_loss"] == str(loss)
    (undecided,) = as_json([FP32[0], trial("bf16-mixed", 0.19)])["advice"]
    assert (undecided["decision"], undecided["precision"], undecided["code"]) == ("undecided", None, None)
    assert undecided["command"].startswith("castwise run resnet50 ")
    assert as_json([]) == {"schema_version": SCHEMA_VERSION, "rows": [], "warnings": [], "advice": [], "trials": []}


def schema() -> dict[str, Any]:
    """Return the JSON Schema of what `castwise run --format json` prints."""
    types = {"text": ["string"], "integer": ["integer"], "number": ["number", "string"], "truth": ["boolean"]}
    text, some_text, some_object = {"type": "string"}, {"type": ["string", "null"]}, {"type": "object"}

    def array(properties: dict[str, Any]) -> dict[str, Any]:
        row = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        return {"type": "array", "items": row}

    advice = dict.fromkeys(("precision", "written", "accuracy", "limit", "command", "code"), some_text)
    advice |= {"workload": text, "sentence": text, "decision": {"enum": list(get_args(Decision))}}
    properties = {
        "schema_version": {"const": SCHEMA_VERSION},
        "rows": array({f.name: {"type": [*types[f.kind], "null"]} for f in in_files(run_report.COLUMNS)}),
        "warnings": array(dict.fromkeys(("key", *(each.name for each in fields(TrialWarning))), text)),
        "advice": array(advice | {"frameworks": {"type": "object", "additionalProperties": some_text}}),
        "trials": {"type": "array", "items": some_object},
        "costs": {"type": "array", "items": some_object},
    }
    required = [name for name in properties if name != "costs"]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@pytest.mark.parametrize("prices", [None, Prices(per_kwh=0.3, per_gpu_hour=2.0)])
def test_json_is_what_its_schema_says(prices: Prices | None) -> None:
    validator = jsonschema.Draft202012Validator(schema())
    trials = [*JOB, failed("fp32", "crashed"), fake_trial(losses=(math.inf,))]
    rows = rows_of_steps(trials)
    document = json.loads(run_report.present(rows, decide(rows), prices).text("json"))
    assert document["warnings"]
    assert list(validator.iter_errors(document)) == []
    for name, value in (("schema_version", 2), ("rows", [{}]), ("more", 1)):
        assert list(validator.iter_errors(document | {name: value})), name


def test_a_value_is_one_thing_in_csv_and_json() -> None:
    for text, value in zip(as_csv(JOB), as_json(JOB)["rows"], strict=True):
        assert {name: "" if each is None else str(each) for name, each in value.items()} == text


def test_markdown_has_headline_table_advice_code_and_notes() -> None:
    text = as_markdown(JOB)
    assert text.startswith("**resnet50, batch 256, synthetic data**\n")
    assert "\nFake GPU (castwise 0.0 at " in text
    assert len(markdown_rows(JOB)) == NUM_ROWS
    assert [row["precision"] for row in markdown_rows(JOB) if row["precision"].startswith("**")] == ["**bf16-mixed**"]
    assert "\n- oom: fp16-mixed\n- diverged: fp16-true (the loss was nan)\n" in text
    ast.parse(text.partition("```python\n")[2].partition("```")[0])
    assert "\n\n\n" not in text
    assert as_markdown([]).startswith("**no trials**")
    without_code = as_markdown([trial("fp32", 0.3)])
    assert "```" not in without_code
    assert "\n\n\n" not in without_code


def test_notebook_html_has_the_terminals_table_and_escapes_text() -> None:
    nasty = "<script>alert(1)</script>"
    rows = rows_of_steps([*FP32, *BF16, failed("tf32", "crashed", nasty)])
    page = ElementTree.fromstring(
        f"<body>{html(run_report.present(rows, decide(rows)).parts)}</body>"
    )  # every tag is closed
    table = run_report.short_table(rows)
    texts = [[column.text(row) for column in table.columns] for row in table.rows]
    found = [["".join(cell.itertext()) for cell in row] for row in page.iter("tr")]
    assert found == [[column.title for column in table.columns], *texts]
    words = "".join(page.itertext())
    assert nasty in words
    assert 'Trainer(precision="bf16-mixed")' in words


def test_hardware_counters_and_why_there_are_none() -> None:
    busy = GpuCounters(num_blocks=4, tensor_share=0.079, dram_share=0.33)
    counted = BF16[0].model_copy(update={"counters": busy})
    found = [(row["tensor cores busy"], row["memory busy"]) for row in markdown_rows([FP32[0], counted], wide=True)]
    assert found == [("–", "–"), ("7.9 %", "33.0 %")]
    assert [(row["tensor_share"], row["dram_share"]) for row in as_csv([counted])] == [("0.079", "0.33")]
    assert "busy" not in as_markdown([FP32[0]], wide=True)
    note = "not available: hardware counters (too old)"
    without = [each.model_copy(update={"telemetry_note": note}) for each in (FP32[0], BF16[0])]
    assert printed(without, verbose=True).replace("\n", " ").count(note) == 1


def test_what_fp8_does_to_products() -> None:
    float8 = {"recipe": "rowwise", "num_converted": 8, "left": {}, "min_sqnr_db": 28.2, "max_underflow_share": 0.37}
    found = [trial("fp8-rowwise", 0.1).model_copy(update={"facts": fake_facts(float8=float8)})]
    (row,) = markdown_rows(found, wide=True)
    assert (row["lowest SQNR"], row["cast to 0"]) == ("28.2 dB", "37 %")
    assert [(row["min_sqnr_db"], row["max_underflow_share"]) for row in as_csv(found)] == [("28.2", "0.37")]


def test_energy_and_warnings_in_every_format() -> None:
    assert [(row["energy"], row["power"]) for row in markdown_rows([metered("fp32", 256.0), BF16[0]], wide=True)] == [
        ("1 J/image", "500 W"),
        ("–", "–"),
    ]
    (row,) = as_csv([metered("fp32", 256.0)])
    assert (row["joules_per_unit"], row["joules_per_unit_low"], row["joules_per_unit_high"]) == ("1.0", "", "")
    assert (row["energy_source"], row["power_watts"], row["warnings"]) == ("counter", "500.0", "clock-below-boost")
    found = as_json([metered("fp32", 256.0)])
    (warning,) = found["warnings"]
    assert (warning["key"], found["rows"][0]["warnings"]) == (found["rows"][0]["key"], warning["name"])
    assert set(warning) == {"key", "name", "seen", "cause", "advice"}
    assert as_json(JOB)["rows"][0]["warnings"] == ""


def test_energy_is_that_of_all_processes_with_their_spread() -> None:
    processes = [metered("fp32", 256.0 * joules, repeat=number) for number, joules in enumerate((0.99, 1.0, 1.01))]
    (row,) = markdown_rows(processes, wide=True)
    assert row["energy"].startswith("1 J/image [0.9")
    (line,) = cost_lines(rows_of_steps([metered("fp32", 128.0), metered("fp32", 512.0, repeat=1)]), PRICES)
    assert "a million samples cost 0.0694 in electricity" in line, "256 J a block"


def test_costs_of_an_epoch_or_of_a_million_samples() -> None:
    # 2560 samples a second, 1 J each: 60,000 take 23.4 s and 0.0167 kWh.
    (line,) = cost_lines(rows_of_steps([metered("fp32", 256.0, data_set="mnist")]), PRICES)
    assert "60,000 samples costs 0.00417 in electricity (0.0167 kWh, GPU alone) or 0.0195 in GPU hours" in line
    (line,) = cost_lines(rows_of_steps([metered("fp32", 256.0, data_set="synthetic:cifar100")]), PRICES)
    assert "an epoch of 50,000 samples" in line
    (line,) = cost_lines(rows_of_steps([trial("fp32", 0.1)]), Prices(per_kwh=0.25))
    assert "a million samples" in line
    assert "no energy was measured" in line
    assert cost_lines(rows_of_steps([failed("fp32", "oom")]), PRICES) == []
    assert cost_lines(rows_of_steps([metered("fp32", 256.0)]), None) == []
    rows = rows_of_steps([metered("fp32", 256.0)])
    assert "a million samples cost" in run_report.present(rows, [], PRICES).text("markdown")
    assert "a million samples cost" in printed([metered("fp32", 256.0)], 300, PRICES)
    (cost,) = json.loads(run_report.present(rows, [], PRICES).text("json"))["costs"]
    assert set(cost) == {"key", "samples", "seconds", "joules", "energy_cost", "gpu_hour_cost"}


def test_each_batch_size_has_its_own_best_and_failures_have_none() -> None:
    table = run_report.data_table(
        rows_of_steps([*JOB, trial("fp32", 0.2, batch_size=8), trial("tf32", 0.1, batch_size=8)])
    )
    (throughput,) = (column for column in table.columns if column.name == "throughput_per_second")
    best = [table.rows[number] for number in sorted(table.best(throughput))]
    assert [(row["precision"], row["batch_size"]) for row in best] == [("bf16-mixed", 256), ("tf32", 8)]


def disagreements(trials: Sequence[Trial]) -> list[str]:
    return [line for line in remarks(rows_of_steps(trials)) if line.startswith("speed-up compares")]


def test_a_speedup_that_differs_from_the_ratio_of_throughputs_is_explained() -> None:
    (line,) = disagreements(rounds(1.05, 1.06, 1.04, drift=1.02))
    assert "1.09× for resnet50 bf16-mixed batch 256 (speed-up 1.05×)" in line
    assert disagreements(rounds(1.05, drift=1.02)) == [], "one process has one ratio"
    assert disagreements(rounds(1.05, 1.06, 1.04, drift=1.02, interleaved=False)) == []
    assert disagreements(rounds(1.05, 1.06, 1.04)) == []
    assert disagreements(rounds(1.0, 1.3, 1.1, drift=1.02)) == [], "the interval contains both"


def test_a_noise_warning_of_one_process_differs_from_the_median_spread() -> None:
    quiet, loud, louder = (0.1,) * 8, (0.1, 0.12) * 4, (0.1, 0.15) * 4

    def explained(*processes: tuple[float, ...]) -> bool:
        trials = [fake_trial(fake_spec(repeat=n), step_seconds=seconds) for n, seconds in enumerate(processes)]
        return any("the warning is of the noisiest" in line for line in remarks(rows_of_steps(trials)))

    assert explained(quiet, loud, louder)
    assert not explained(loud, loud)
    assert not explained(quiet, quiet)
    assert not explained(louder)


def test_a_column_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = Field("num_blocks", "blocks", "count", get=lambda row: len(row.trial.ranks[0].blocks), short="blocks")
    monkeypatch.setattr(run_report, "COLUMNS", (*run_report.COLUMNS, blocks))
    assert [row["num_blocks"] for row in as_csv(FP32)] == ["6"]
    assert [row["num_blocks"] for row in as_json(FP32)["rows"]] == [6]
    for wide in (False, True):
        assert [row["blocks"] for row in markdown_rows(FP32, wide=wide)] == ["6"]
