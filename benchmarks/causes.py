"""The test set of `castwise why`: does it find the one reason for which a step is slow, and none in tuned loops?

    python benchmarks/causes.py --out benchmarks/records/causes/DATE-NAME [CASE ...]    # measure, on a GPU
    python benchmarks/causes.py --table    # print the tables of docs/evidence/causes.md

Cases are those of public threads (`source`), rebuilt as small models, with near misses that have not the cause. The
scripts of benchmarks/cause_scripts/ are other people's: their first lines say what is expected, and after which thread.
Those in its folder several/ are planted, for as many GPUs as their second line says; with fewer, all are used.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from stored import RECORDS, load, markdown

from castwise.analysis.causes import Diagnosis, diagnose
from castwise.analysis.result_table import rows_of_steps
from castwise.analysis.step_evidence import MEMORY, UPDATE
from castwise.orchestrator.job import prepare_profiles
from castwise.registry.gpus import peak
from castwise.registry.kernel_classes import PRODUCTS
from castwise.show.notes import measured_on
from castwise.show.table import markdown_text
from castwise.show.units import format_ratio, format_seconds
from castwise.spec.options import WhyOptions
from castwise.spec.quantities import format_share
from castwise.spec.types import CauseName

MODELS = Path(__file__).with_name("cause_models.py")
GPT2 = str(Path(__file__).with_name("gpt2.py"))
SCRIPTS = sorted(Path(__file__).with_name("cause_scripts").rglob("*.py"))
# The first cause that was named before any rule was mended.
FIRST_TRY = Path(__file__).with_name("cause_scripts") / "first_try.json"
NONE = "none"
_HARMLESS = {"memory", "power-limit"}  # what a well-made loop may have


@dataclass(frozen=True)
class Case:
    """A configuration, and the cause that is expected at first place; a near miss must not have it at all."""

    name: str
    workload: str  # a function of cause_models.py, or a workload
    precision: str
    expected: CauseName | tuple[CauseName, ...]
    source: str = ""  # the public thread that it is built after
    techniques: str = NONE
    others: tuple[str, ...] = ()  # precisions to compare with
    is_near_miss: bool = False

    @property
    def reference(self) -> str:
        """Return the workload as castwise names it."""
        return self.workload if self.workload[0] == "@" else f"{MODELS}:{self.workload}"


_RESIDENT = "resident-data+compiled-update+matmul-stem+compile+cuda-graph"
CASES = (
    Case("tiny network", "tiny", "bf16-mixed", "launches", "NVIDIA/apex#297"),
    Case("tiny network, as a graph", "tiny", "bf16-mixed", "launches", "", "cuda-graph", is_near_miss=True),
    Case("float32 products", "dense", "fp32", "float32-units", "nanodet#506", "channels-last"),
    Case("TF32 by default", "dense", "tf32", "baseline-tf32", "pytorch#57806", "channels-last", ("default", "fp32")),
    Case("NCHW", "@resnet50", "bf16-mixed", "layout", "mxnet#17665"),
    Case("NHWC", "@resnet50", "bf16-mixed", "layout", "", "channels-last", is_near_miss=True),
    Case("first layer of 3 channels", "stem", "bf16-mixed", "alignment", "pytorch#54404", "channels-last"),
    Case("first layer of 8 channels", "wide_stem", "bf16-mixed", "alignment", "", "channels-last", is_near_miss=True),
    Case(
        "depthwise convolutions", "depthwise", "bf16-mixed", "grouped-convolutions", "tensorflow#41715", "channels-last"
    ),
    Case("grouped convolutions", "grouped", "bf16-mixed", "grouped-convolutions", "tensorflow#48176", "channels-last"),
    Case("dense convolutions", "dense", "bf16-mixed", "grouped-convolutions", "", "channels-last", is_near_miss=True),
    Case("LSTM of 200", "@lstm-lm", "fp16-mixed", "launches", "pytorch#1539"),
    Case("vocabulary of 30,522", "vocabulary", "bf16-mixed", "alignment", "BERT-base"),
    Case("vocabulary of 30,528", "padded_vocabulary", "bf16-mixed", "alignment", "", is_near_miss=True),
    Case("wide MLP with Adam", "update", "bf16-mixed", "optimizer", "transformers#15026"),
    Case("large products with SGD", "arithmetic", "bf16-mixed", ("optimizer", "casts"), "", is_near_miss=True),
    Case("small batch", "small_batch", "bf16-mixed", "casts", "transformers#15026", "cuda-graph"),
    Case("loss scaling", "scaled", "fp16-mixed", "synchronisation", "apex#172"),
    Case(
        "loss scaling on the device", "scaled", "fp16-mixed", "synchronisation", "", "no-step-sync", is_near_miss=True
    ),
    Case("power limit", "arithmetic", "bf16-true", "power-limit", "", "cuda-graph"),
    Case("element-wise work", "moving", "bf16-mixed", "memory", "transformers#15026"),
    # Runs of suites on record, whose images a loader transforms, and the same with resident data.
    Case("images through a loader", "@mnist-cnn", "fp16-mixed", "input", "nerfstudio#172"),
    Case("images on the GPU", "@mnist-cnn", "fp16-mixed", "input", "", _RESIDENT, is_near_miss=True),
    Case("convolutions in 3 dimensions", "volume", "bf16-mixed", ("missing-kernel", "layout"), "pytorch#166122"),
)
# The fastest loops of searches on record: no technique that was tried and refused may be offered.
TUNED = ("mnist-cnn", "mlp-4096", "lstm-lm", "gpt2", "resnet50", "wrn-28-10")
_TUNED_LOOPS = {
    "mnist-cnn": ("mnist-cnn", "bf16-master", "channels-last+cudnn-search+matmul-stem+compile+cuda-graph-8"),
    "mlp-4096": ("mlp-4096", "bf16-master", "compiled-update+compile+cuda-graph-8"),
    "lstm-lm": ("lstm-lm", "bf16-mixed", "compiled-update+compile+cuda-graph"),
    "gpt2": (GPT2, "bf16-master", "fused-optimizer+compile"),
    "resnet50": (
        "resnet50",
        "fp16-mixed",
        "channels-last+fused-optimizer+no-step-sync+max-pool-kernel+batch-norm-kernel+compile+cuda-graph",
    ),
    "wrn-28-10": ("wrn-28-10", "bf16-mixed", "channels-last+fused-optimizer+batch-norm-kernel+compile+cuda-graph"),
}


def measure(workload: str, precisions: Sequence[str], techniques: str, results: Path) -> None:
    """Profile a configuration and those that it is compared with."""
    options = WhyOptions(
        workloads=(workload,), precisions=tuple(precisions), techniques=(techniques,), results=results, retry=True
    )
    for trial in prepare_profiles(options).run():
        print(f"{trial.spec.label}: {trial.status} {trial.message}", flush=True)


def found_in(folder: Path) -> dict[tuple[str, str, str], Diagnosis]:
    """Return the diagnoses of all records in a folder by workload, precision and techniques."""
    trials = [*load(RECORDS / "suites"), *load(folder)]
    return {
        (
            re.sub("^torchrun .* ", "python ", each.row.trial.spec.workload.rpartition("/")[2]),
            each.row.precision,
            "+".join(each.row.techniques) or NONE,
        ): each
        for each in diagnose(rows_of_steps(trials))
    }


def said_in(script: Path) -> dict[str, str]:
    """Return what the first lines of a script say: its source, the expected causes, the precision, FLOPs by hand."""
    return dict(re.findall(r"^# (after|expected|precision|flops): (.*)$", script.read_text(), re.MULTILINE))


def command_of(script: Path) -> str:
    """Return how a script is started: on several ranks if its first lines say so, on all GPUs if these are fewer."""
    ranks = re.search(r"^# ranks: (\d+)", script.read_text(), re.MULTILINE)
    if ranks is None:
        return f"python {script}"
    wanted = int(ranks[1])
    return f"torchrun --nproc-per-node {min(wanted, torch.cuda.device_count() or wanted)} {script}"


def scripts_table(known: dict[tuple[str, str, str], Diagnosis]) -> list[str]:
    """Return what was named of scripts that the authors of the rules had not seen, at the first try and now."""
    first_try, rows = json.loads(FIRST_TRY.read_text()), list[list[Any]]()
    for script in SCRIPTS:
        said = said_in(script)
        found = known.get((f"python {script.name}", said["precision"], NONE))
        if found is None and script.stem not in first_try:
            continue
        causes = [] if found is None else found.causes
        first = causes[0] if causes else None
        wanted, names = said["expected"].split(" or "), [cause.name for cause in causes]

        def is_right(name: str, wanted: list[str] = wanted) -> bool:
            return name in wanted or (wanted == [NONE] and name in _HARMLESS)

        rows.append(
            [
                f"`{script.stem}`",
                said["precision"],
                said["expected"],
                *(
                    name + " (**wrong**)" * (name != "–" and not is_right(name))
                    for name in (
                        first_try.get(script.stem, "–"),
                        "no answer" if found is None else (names or [NONE])[0],
                    )
                ),
                "–" if first is None or first.share is None else format_share(first.share),
                said["after"],
            ]
        )
    tried = [[row[column] for row in rows if row[column] != "–"] for column in (3, 4)]
    right = [f"{sum('wrong' not in each for each in column)} of {len(column)}" for column in tried]
    heading = "script | precision | expected | first try | now | saves at most | after"
    told = f"Right: {right[0]} at the first try, {right[1]} now."
    return [*markdown(heading, "lllllrl", rows), "", told]


def flops_table(known: dict[tuple[str, str, str], Diagnosis]) -> list[str]:
    """Return the FLOPs of the scripts' products that castwise counted beside those by hand, and the MFU."""
    rows = []
    for script in SCRIPTS:
        said = said_in(script)
        found = known.get((f"python {script.name}", said["precision"], NONE))
        if found is None or found.flops is None or "flops" not in said:
            continue
        by_hand, counted = eval(said["flops"]), found.flops.total
        limit = peak(found.gpu, next(iter(found.flops.by_format)))
        mfu = "–" if limit is None else format_share(counted / found.seconds / limit)
        apart = round(100 * (counted / by_hand - 1), 1)
        rows.append(
            [f"`{script.stem}`", f"{by_hand:.4g}", f"{counted:.4g}", f"{apart:+.1f} %" if apart else "equal", mfu]
        )
    return markdown("script | FLOPs by hand | counted | difference | MFU", "lrrrr", rows)


def verdict(case: Case, found: Diagnosis) -> bool:
    """Return whether the diagnosis of a case is right."""
    wanted = case.expected if isinstance(case.expected, tuple) else (case.expected,)
    names = [cause.name for cause in found.causes]
    return not set(wanted) & set(names) if case.is_near_miss else bool(names) and names[0] in wanted


def tables(folder: Path) -> str:
    """Return the confusion table of the cases, and what was found in tuned loops."""
    known = found_in(folder)
    rows: list[list[Any]] = []
    for case in CASES:
        workload = case.workload[1:] if case.workload[0] == "@" else f"{MODELS.name}:{case.workload}"
        found = known.get((workload, case.precision, case.techniques))
        if found is None:
            continue
        wanted = case.expected if isinstance(case.expected, tuple) else (case.expected,)
        first = found.causes[0] if found.causes else None
        rows.append(
            [
                case.name,
                markdown_text(f"{case.precision}, {case.techniques}"),
                ("not " if case.is_near_miss else "") + " or ".join(wanted),
                "–" if first is None else first.name,
                "–" if first is None or first.share is None else format_share(first.share),
                case.source or "–",
                "yes" if verdict(case, found) else "**no**",
            ]
        )
    heading = "case | loop | expected | first cause | saves at most | after | right"
    lines = markdown(heading, "lllllll", rows)
    tuned = []
    for name in TUNED:
        workload, precision, techniques = _TUNED_LOOPS[name]
        stem = "gpt2.py:build" if workload == GPT2 else workload
        found = known.get((stem, precision, techniques))
        if found is not None:
            causes = ", ".join(cause.name for cause in found.causes) or "none"
            step = format_seconds(found.row.step_seconds or 0.0)
            tuned.append([name, markdown_text(f"{precision}, {techniques}"), step, found.bound, causes])
    lower = markdown("tuned loop | loop | step | bound | causes", "lllll", tuned)
    return (
        "\n".join(
            [measured_on(load(folder)), "", *lines, "", *lower, "", *scripts_table(known), "", *flops_table(known)]
        )
        + "\n"
    )


def workloads(folder: str) -> str:
    """Return what the steps of a folder's trials spend their time on, and the first cause of each."""
    trials = load(RECORDS / (folder or "why"))
    lines = [measured_on(trials), ""]
    cells = []
    for found in diagnose(rows_of_steps(trials)):
        row, counters = found.row, found.counters
        first = found.causes[0] if found.causes else None
        shares = (found.share_of(*PRODUCTS), found.share_of(*MEMORY), found.share_of(*UPDATE), found.idle_share)
        cells.append(
            [
                row.trial.spec.workload,
                markdown_text(row.precision + "".join(f", {name}" for name in row.techniques)),
                format_seconds(row.step_seconds or 0.0),
                "–" if row.default_speedup is None else format_ratio(row.default_speedup),
                *(f"{100 * (share or 0.0):.0f} %" for share in shares),
                "–" if counters is None or counters.tensor_share is None else f"{100 * counters.tensor_share:.0f} %",
                "–" if first is None else first.name,
                "–" if first is None or first.share is None else format_share(first.share),
            ]
        )
    heading = "workload | precision | step | × default | products | moving data | update | idle | tensor cores busy"
    heading += " | first cause | saves at most"
    return "\n".join([*lines, *markdown(heading, "llrrrrrrrlr", cells)]) + "\n"


def main() -> int:
    """Measure the named cases, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table or arguments.out is None:
        print(tables(arguments.out or RECORDS / "causes"), end="")
        return 0
    for case in CASES:
        if not arguments.cases or case.name in arguments.cases:
            measure(case.reference.lstrip("@"), (case.precision, *case.others), case.techniques, arguments.out)
    for name in TUNED:
        if not arguments.cases or name in arguments.cases:
            workload, precision, techniques = _TUNED_LOOPS[name]
            measure(workload, (precision,), techniques, arguments.out)
    for script in SCRIPTS:
        if not arguments.cases or script.stem in arguments.cases:
            measure(command_of(script), (said_in(script)["precision"],), NONE, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
