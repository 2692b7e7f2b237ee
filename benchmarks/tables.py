"""Write the tables of README and docs from the records under benchmarks/records/ and from the program, and its schema.

    python benchmarks/tables.py [--check]

A table stands between `<!-- table: NAME ARGUMENT -->` and `<!-- /table -->`. With --check nothing is written, and
the exit code says whether every table is what its records give.
"""

import io
import itertools
import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import cache, partial
from pathlib import Path

import aa
import accuracy_errors
import accuracy_tables
import adam_updates
import by_hand
import causes
import coverage
import emitted
import fits_tables
import fp16_sums
import max_batch_tables
import power_limit
import predict_study
import real_packages
import reference_tables
import script_agreement
import search_tables
import seed004
import shared_table
from measure_again import FP8
from rich.console import Console
from stored import RECORDS, load, markdown, place_of, where_of

from castwise.accuracy.advice import with_accuracy
from castwise.analysis.causes import diagnose
from castwise.analysis.decide import decide
from castwise.analysis.model_flops import float8_of, fp8_share
from castwise.analysis.result_table import Row, rows_of_steps
from castwise.errors import UsageError
from castwise.records.schema import Trial
from castwise.registry.architectures import find_architecture
from castwise.registry.gpus import find_gpu_model
from castwise.registry.precisions import precision_sort_key
from castwise.registry.published import find_published
from castwise.registry.suites import find_suite, is_search, specs_of
from castwise.registry.workloads import find_workload
from castwise.show import presentation, run_report, why_report
from castwise.show.fields import ratio_text
from castwise.show.notes import headline, notes_of
from castwise.show.presentation import Grid, Lines, print_parts
from castwise.show.table import markdown_text
from castwise.show.units import format_rate
from castwise.spec.quantities import format_bytes
from castwise.spec.trial import TrialSpec
from castwise.suites import render
from castwise.suites.result import SuiteResult

HERE = Path(__file__).resolve().parent
DOCUMENTS = (HERE.parent / "README.md", *sorted((HERE.parent / "docs").rglob("*.md")))
_FEWEST_TOTALS = 30  # of a scenario, to say how many hold
MADE = {  # files that are nothing but a table
    HERE.parent / "docs" / "record.schema.json": reference_tables.schema_file,
    HERE.parent / "docs" / "images" / "fits.svg": fits_tables.plot,
    shared_table.TABLE: shared_table.text,
    **({HERE.parent / "docs" / "images" / "scaling-models.svg": seed004.plot} if seed004.measured() else {}),
}
KEPT = "kept"  # not made anew; its argument is the commit whose benchmarks/ made it
_MARKED = re.compile(r"(<!-- table: (\w+)(?: ([^\n]+?))? -->\n).*?(<!-- /table -->)", re.DOTALL)


@cache
def rows(folder: str = "trials") -> tuple[Row, ...]:
    """Return every stored trial of a folder with its baseline, in the order of measurement."""
    return tuple(rows_of_steps(load(RECORDS / folder)))


def results(workload: str, folder: str = "trials") -> str:
    """Return the table of one workload's trials in a folder."""
    found = [row for row in rows(folder) if row.trial.spec.workload == workload]
    found.sort(key=lambda row: precision_sort_key(row.trial.spec.precision))
    _, grid, place = run_report.table_parts(found, [item.key for item in decide(found)])
    assert isinstance(grid, Grid)
    head = Lines([headline(found)], is_list=False)
    columns = [each for each in grid.table.columns if each.name != "verdict"]
    columns = [replace(each, otherwise="status") if each.name == "throughput_per_second" else each for each in columns]
    notes = [note.line for note in notes_of(found) if not note.is_routine]
    return presentation.markdown([head, replace(grid, table=replace(grid.table, columns=columns)), place, Lines(notes)])


def terminal(folder: str) -> str:
    """Return what `castwise run` prints of the trials in a folder, without the notes below the table."""
    text = io.StringIO()
    found = rows(folder)
    shown = run_report.present(found, decide(found, judge=partial(with_accuracy, trials=())))
    print_parts(shown.parts, Console(file=text, width=130, emoji=False))
    lines = [line.rstrip() for line in text.getvalue().rstrip().splitlines()]
    kept = [line if not re.match(r"  \S", line) else "  …" for line in lines]
    return "\n".join(["```text", *(line for line, _ in itertools.groupby(kept)), "```"]) + "\n"


def why_terminal(names: str) -> str:
    """Return what `castwise why` prints of recorded trials on a terminal of 80 columns."""
    text = io.StringIO()
    paths = (RECORDS / "why" / f"{name}.json" for name in names.split())
    found = diagnose(rows_of_steps([Trial.model_validate_json(path.read_text()) for path in paths]))
    console = Console(file=text, width=80, force_terminal=True, color_system=None, emoji=False)
    print_parts(why_report.present(found).parts, console)
    return "\n".join(["```text", *(line.rstrip() for line in text.getvalue().rstrip().splitlines()), "```"]) + "\n"


def answer(workload: str) -> str:
    """Return what `castwise run` advises for a workload's trials, and the lines to paste."""
    (advice,) = decide([row for row in rows() if row.trial.spec.workload == workload])
    return f"{markdown_text(advice.sentence)}\n\n```python\n{advice.code}\n```\n"


def _place(row: Row) -> str:
    """Return where and when a row's first trial was measured, for the line above a table."""
    return place_of(row.trial.environment.model_dump(), row.trial.started_at[:10])


def fp8(_: str) -> str:
    """Return what each precision of FP8 brings to transformers over bf16-mixed in the same loop, by their width."""
    cells, places = [], dict[str, None]()
    found = {(row.trial.spec.workload, row.precision): row for row in rows("fp8")}
    widths = {workload: int(dict(find_workload(workload).options)["width"]) for workload, _ in found}
    for workload, width in sorted(widths.items(), key=lambda item: (item[1], item[0])):
        base = found[workload, "bf16-mixed"]
        measured = [found[workload, precision] for precision in FP8 if (workload, precision) in found]
        ratios = [ratio_text(row.bf16_estimate) for row in measured] + ["–"] * (len(FP8) - len(measured))
        sqnrs = [f"{facts.min_sqnr_db:.1f}" for row in measured[:2] if (facts := float8_of(row.trials))]
        share = fp8_share(measured[0].trials)
        assert base.throughput is not None
        assert share is not None
        speed = f"{format_rate(base.throughput)} {find_workload(workload).unit}/s"
        cells.append([workload, width, base.batch_size, speed, *ratios, f"{100 * share:.0f} %", ", ".join(sqnrs)])
        places |= dict.fromkeys([_place(base)])
    heading = " | ".join(("workload | width | batch | bf16-mixed", *FP8, "FLOPs in FP8 | SQNR, dB"))
    return "\n".join(["; ".join(places), "", *markdown(heading, "lrrrrrrrr", cells)]) + "\n"


# Those that people ask about, and the names that they use; rows of the registry of GPUs.
ASKED = {
    "Tesla T4": "T4",
    "Tesla P100-PCIE-16GB": "P100",
    "Tesla V100-SXM2-16GB": "V100",
    "NVIDIA GeForce GTX 1080 Ti": "GTX 1080 Ti",
    "NVIDIA GeForce GTX 1660 Ti": "GTX 16 (1660 Ti)",
    "NVIDIA GeForce RTX 2080 Ti": "RTX 20 (2080 Ti)",
    "NVIDIA TITAN RTX": "Titan RTX",
    "NVIDIA GeForce RTX 3060 Ti": "RTX 3060 Ti",
    "NVIDIA GeForce RTX 3090": "RTX 30 (3090)",
    "NVIDIA GeForce RTX 4070 SUPER": "RTX 4070 SUPER",
    "NVIDIA GeForce RTX 4090": "RTX 40 (4090)",
    "NVIDIA GeForce RTX 5070 Ti": "RTX 5070 Ti",
    "NVIDIA GeForce RTX 5090": "RTX 50 (5090)",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000",
    "NVIDIA GB10": "GB10",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
    "NVIDIA B300 SXM6 AC": "B300",
    "AMD Instinct MI300X": "MI300X",
    "AMD Radeon RX 7900 XTX": "RX 7900 XTX",
}


def my_gpu(_: str) -> str:
    """Return what to try first on a GPU by its hardware, how much its peaks allow, and what was measured there."""
    cells = []
    for name, words in ASKED.items():
        gpu = find_gpu_model(name)
        assert gpu is not None
        peaks, generation = gpu.peaks, find_architecture(gpu.capability, gpu.architecture)
        assert generation is not None
        formats = generation.native.split()
        # Of Turing the GTX 16 has no Tensor Cores, and no peak in float16.
        fp16 = "fp16-mixed" if "fp16" in formats and (peaks["fp16"] or not peaks["fp32"]) else "fp32"
        first = "bf16-mixed" if "bf16" in formats else fp16
        fastest = peaks["bf16"] or peaks["fp16"]
        most = [f"{fastest / rate:.2g}×" if fastest and (rate := peaks[of]) else "–" for of in ("fp32", "tf32")]
        narrow = ", ".join(each for each in formats if each not in ("tf32", "fp16", "bf16")) or "–"
        memory = f"{gpu.memory_gigabytes} GB"
        cells.append((words, memory, f"`{first}`", *most, narrow, generation.build, _measured_on(name, words)))
    heading = "GPU | memory | try first | at most × fp32 | at most × TF32 | also | PyTorch | measured"
    return "\n".join(markdown(heading, "lrlrrlll", cells)) + "\n"


def _measured_on(gpu: str, words: str) -> str:
    """Return the gains of what castwise advises on a GPU, or those of 16 bits in published training runs."""
    own = [row for folder in ("trials", "transformers") for row in rows(folder) if row.trial.environment.gpu == gpu]
    gains = [each.over_default.value if each.over_default else 1.0 for each in decide(own)]
    what = f"the default, {len(gains)} models"
    if not gains:
        with suppress(UsageError):  # nothing is published of most
            what = "fp32, published"
            gains = [
                each.baseline.seconds / each.published.seconds
                for each in find_published(words.rpartition("(")[2].rstrip(")")).figures
                if each.baseline and each.baseline.seconds and each.published.seconds
            ]
    ends = dict.fromkeys(f"{end:.1f}" for end in (min(gains, default=0.0), max(gains, default=0.0)))
    return f"{' to '.join(ends)}× {what}" if gains else "–"


def compile_times(_: str) -> str:
    """Return how long the first step of a deep model takes, all layers compiled or one for all alike."""
    cells = []
    for row in sorted(rows("compile"), key=lambda row: row.step_seconds or 0.0, reverse=True):
        facts = row.trial.facts
        assert facts is not None
        assert row.throughput is not None
        name = "+".join(row.trial.spec.techniques) or "plain loop"
        speed = f"{format_rate(row.throughput)} tokens/s"
        cells.append([row.trial.spec.workload, name, f"{facts.first_step_seconds:.1f} s", speed])
    return "\n".join([_place(row), "", *markdown("workload | loop | first step | throughput", "llrr", cells)]) + "\n"


def script_masters(_: str) -> str:
    """Return a step's time of scripts whose weights have 16 bits and float32 masters, beside mixed precision."""
    steps: dict[str, dict[str, str]] = {}
    for row in rows("script_masters"):
        name, seconds = row.trial.spec.workload.partition(".py")[0].removeprefix("python "), row.step_seconds
        steps.setdefault(f"`{name}`", {})[row.precision] = f"{1000 * seconds:.2f} ms" if seconds else "–"
    precisions = ("as-written", "bf16-mixed", "bf16-master", "fp16-master")
    cells = [[name, *(found[precision] for precision in precisions)] for name, found in sorted(steps.items())]
    where = _place(rows("script_masters")[0])
    return "\n".join([where, "", *markdown(" | ".join(("script", *precisions)), "lrrrr", cells)]) + "\n"


def adapters(_: str) -> str:
    """Return speed and memory of scripts with frozen or quantised weights, or an optimizer of 8 bits, by precision."""
    found = sorted(rows("adapters"), key=lambda row: (row.trial.spec.workload, precision_sort_key(row.precision)))
    cells = [
        [
            f"`{row.trial.spec.workload.removeprefix('python ')}`",
            row.precision,
            f"{row.throughput or 0:,.0f}",
            f"{row.written_estimate.value if row.written_estimate else 1:.2f}×",
            format_bytes(row.peak_allocated_bytes or 0),
            len(row.trials),
        ]
        for row in found
    ]
    heading = "script | precision | samples/s | × as written | peak allocated | processes"
    return "\n".join([_place(found[0]), "", *markdown(heading, "llrrrr", cells)]) + "\n"


def runs(_: str) -> str:
    """Return how long `castwise run` took for each workload on record, from its first process to its last."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in load(RECORDS / "trials"):
        groups.setdefault((trial.spec.workload, trial.environment.fingerprint), []).append(trial)
    cells, places = [], dict[str, None]()
    for (workload, _), trials in sorted(groups.items()):
        starts = [datetime.fromisoformat(trial.started_at).timestamp() for trial in trials]
        ends = [start + trial.duration_seconds for start, trial in zip(starts, trials, strict=True)]
        num_precisions = len({trial.spec.precision for trial in trials})
        gpu = trials[0].environment.gpu or "CPU"
        cells.append((workload, gpu, num_precisions, len(trials), f"{max(ends) - min(starts):.0f} s"))
        places |= dict.fromkeys([where_of(trials[0])])
    heading = "workload | GPU | precisions | processes | time"
    return "\n".join(["; ".join(places), "", *markdown(heading, "llrrr", cells)]) + "\n"


@cache
def suite_trials() -> tuple[Trial, ...]:
    """Return the stored trials of the suites as they are published."""
    return tuple(load(RECORDS / "suites" / "full"))


def suite(name: str) -> str:
    """Return what `castwise suite NAME` prints of the stored trials."""
    found = find_suite(name)
    workloads = {workload for cells in found.cells for workload in cells.workloads}
    trials = [trial for trial in suite_trials() if trial.spec.workload in workloads]
    runs: list[Trial] = []
    searches: dict[str, list[Trial]] = {}
    for trial in trials:
        if found.limits and is_search(trial.spec):
            searches.setdefault(trial.spec.precision, []).append(trial)
        else:
            runs.append(trial)
    order = {_cell(spec): index for index, spec in enumerate(specs_of(found, device="cuda:0"))}
    runs.sort(key=lambda trial: order[_cell(trial.spec)])
    result = SuiteResult(found, tuple(runs), tuple(tuple(search) for search in searches.values()))
    return render.present([result], wide=True, verbose=True).text("markdown")


def _cell(spec: TrialSpec) -> tuple[object, ...]:
    return (spec.workload, spec.precision, spec.loss_scale, spec.batch_size, spec.world_size, spec.parallelism)


def answers(name: str) -> str:
    """Return how often whole searches and comparisons of cards are right in simulations, by one run of answers.py."""
    found = json.loads((RECORDS / "answers" / f"{name}.json").read_text())
    heading = "search | processes differ by | searches | change handed over | totals that hold | mean error"
    cells = [
        (
            row["name"],
            f"{row['process_std']:.1%}",
            row["draws"],
            f"{row['handed_over']:.1%}",
            "–" if row["totals"] < _FEWEST_TOTALS else f"{row['totals_hold']:.1%}",
            "–" if row["totals"] < _FEWEST_TOTALS else f"{round(row['mean_error'], 3) + 0.0:+.1%}",
        )
        for row in found["searches"]
    ]
    rates = {(row["card_std"], row["ratio"]): row for row in found["cards"]}
    of_cards = [
        (
            f"{std:.1%}",
            f"{rates[std, 1.0]['faster'] + rates[std, 1.0]['slower']:.1%}",
            *(f"{row['faster']:.1%}" for (each, ratio), row in rates.items() if each == std and ratio > 1),
        )
        for std in dict.fromkeys(std for std, _ in rates)
    ]
    of_cards_heading = "cards differ by | equal models called different | 5 % faster found | 10 % faster found"
    return "\n".join([*markdown(heading, "lrrrrr", cells), "", *markdown(of_cards_heading, "rrrr", of_cards)]) + "\n"


def cluster_faults(name: str) -> str:
    """Return what was tried of faults of clusters, and what held, by `tests/faults/run_faults.py --clusters`."""
    found = json.loads((RECORDS / "cluster_faults" / f"{name}.json").read_text())
    cells = [(kind, row["tried"], row["tried"] - len(row["failed"])) for kind, row in found.items()]
    return "\n".join(markdown("at random times | tried | held", "lrr", cells)) + "\n"


@cache
def max_batches() -> max_batch_tables.Measured:
    """Return every search for a largest batch on record."""
    return max_batch_tables.measured_fits(RECORDS / "fit")


TABLES: dict[str, Callable[[str], str]] = {
    "results": results,
    "terminal": terminal,
    "why_terminal": why_terminal,
    "answer": answer,
    "scaling": lambda workload: results(workload, "scaling"),
    "scaling_compiled": lambda workload: results(workload, "scaling_compiled"),
    "seed004": seed004.table,
    "loops": lambda workload: results(workload, "techniques"),
    "transformers": lambda workload: results(workload, "transformers"),
    "fp8": fp8,
    "my_gpu": my_gpu,
    "compile_times": compile_times,
    "answers": answers,
    "coverage": lambda name: coverage.table(RECORDS / "coverage" / f"{name}.json"),
    "promises": lambda name: coverage.promises(RECORDS / "coverage" / f"{name}.json"),
    "modes": lambda name: coverage.modes(RECORDS / "coverage" / f"{name}.json"),
    "cluster_faults": cluster_faults,
    "runs": runs,
    "script_lines": emitted.lines_table,
    "emitted": lambda names: emitted.table([RECORDS / "emitted" / f"{name}.json" for name in names.split()]),
    "accuracy": accuracy_tables.real,
    "accuracy_states": accuracy_tables.of_states,
    "accuracy_errors": accuracy_errors.table,
    "adam_updates": adam_updates.table,
    "accuracy_sources": accuracy_tables.sources,
    "aa": lambda _: aa.table(sorted((RECORDS / "aa").glob("*.json"))),
    "suite": suite,
    "commands": reference_tables.commands,
    "listing": reference_tables.listing,
    "sizes": reference_tables.sizes,
    "keywords": reference_tables.keywords,
    "frameworks": reference_tables.frameworks,
    "precision_code": reference_tables.code,
    "record_schema": reference_tables.schema_tables,
    "power_limit": power_limit.table,
    "fp16_sums": fp16_sums.table,
    "by_hand": lambda _: by_hand.table(sorted((RECORDS / "by_hand").glob("*.json"))),
    "max_batch": lambda name: max_batch_tables.in_a_sentence(name, max_batches()),
    "max_batch_account": lambda name: max_batch_tables.account(max_batches()[name][0]),
    "max_batch_said": lambda name: max_batch_tables.sentences(max_batches()[name][0]),
    "max_batch_sources": lambda _: max_batch_tables.beside_sources(max_batches()),
    "max_batch_loops": lambda _: max_batch_tables.loops_table(max_batches()),
    "max_batch_predictions": lambda _: max_batch_tables.predictions(max_batches()),
    "parameter_bytes": max_batch_tables.parameter_bytes,
    "predicted_memory": lambda _: max_batch_tables.predicted_memory(RECORDS / "predicted_memory"),
    "little_memory": lambda _: max_batch_tables.little_memory(RECORDS / "little_memory", fits_tables.predicted_batch),
    "fits_errors": lambda _: "\n".join(fits_tables.summary()) + f"\n- {fits_tables.largest()}\n",
    "fits_scripts": lambda _: "\n".join([*fits_tables.summary_of_scripts(), ""]),
    "fits_workloads": lambda _: "\n".join([*fits_tables.errors_by_workload(), ""]),
    "scripts": script_agreement.table,
    "real_packages": real_packages.table,
    "script_contract": script_agreement.contract_table,
    "script_masters": script_masters,
    "adapters": adapters,
    "shared": lambda _: shared_table.table(),
    "searches": lambda _: search_tables.summary(),
    "search": search_tables.accepted,
    "search_sentence": search_tables.sentence,
    "predict": predict_study.table,
    "why": causes.workloads,
    "causes": lambda _: causes.tables(RECORDS / "causes"),
}


def fill(text: str) -> str:
    """Return a document with every marked table made anew, but those that are kept as a commit's scripts made them."""

    def made_anew(match: re.Match[str]) -> str:
        return match[0] if match[2] == KEPT else match[1] + TABLES[match[2]](match[3] or "") + match[4]

    return _MARKED.sub(made_anew, text)


def main() -> int:
    """Write the documents, or check them."""
    stale = []
    for path in (*DOCUMENTS, *MADE):
        before = path.read_text() if path.exists() else ""
        after = MADE[path]() if path in MADE else fill(before)
        if before != after:
            stale.append(path)
            if "--check" not in sys.argv:
                path.write_text(after)
                print(f"{path.relative_to(HERE.parent)}: written")
    if stale and "--check" in sys.argv:
        print("Out of date, run `make tables`: " + ", ".join(path.name for path in stale), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
