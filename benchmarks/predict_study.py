"""How well can the gain of a precision be predicted for a GPU that one does not have? It needs no GPU.

    python benchmarks/predict_study.py TABLES [OUTPUT]     public tables and records/ → OUTPUT
    python benchmarks/predict_study.py --draw              OUTPUT → docs/images/predict.svg

A cell is one workload on one GPU: seconds in float32 (TF32 from Ampere on) and in 16 bits. What is predicted is their
ratio. A pair is a cell and the same workload on another GPU, from which it is predicted. The exponent of throughputs
was chosen on `lambda-2023`; nothing else was fitted, but all tables were seen while methods were tried.

TABLES holds what these commands write, in clones of github.com/lambdal/deeplearning-benchmark and of
github.com/ryujaehun/pytorch-gpu-benchmark (its results/*/*.csv, as FOLDER-FILE.csv, in TABLES/ryujaehun):

    for kind in throughput bs; do for bits in fp16 fp32; do
      name=pytorch-train-$kind-$bits.csv
      git show 67a9bb51:pytorch/$name > TABLES/lambda/2022_$name
      git show HEAD:pytorch/csv_v1_v2/$name > TABLES/lambda/csv_v1_v2_$name
      git show HEAD:pytorch/$name > TABLES/lambda/$name
      git show HEAD:pytorch/pytorch-train-throughput-v2-$bits.csv > TABLES/lambda/pytorch-train-throughput-v2-$bits.csv
    done; done
"""

import csv
import functools
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hero import IMAGES, for_dark_pages
from stored import RECORDS, load, markdown

from castwise.analysis.steady_metrics import step_seconds
from castwise.records.schema import StepProfile, Trial
from castwise.registry.gpus import GpuModel, find_gpu_model
from castwise.registry.kernel_classes import KERNEL_CLASSES, PRODUCTS
from castwise.registry.published import baseline_of
from castwise.registry.suites import SUITE_NAMES, find_suite
from castwise.report.charts.chart import Chart
from castwise.report.charts.svg import Line, Panel, Point, line_chart
from castwise.show.theme import SOFT

OUTPUT = RECORDS / "predict" / "2026-11-30.json"
CHOSEN_ON = "lambda-2023"
# Of the loops that castwise has measured on both GPUs.
_OWN = {"H100": "NVIDIA H100 80GB HBM3", "H200": "NVIDIA H200"}
GAIN = 1.1  # that is worth another precision
SOURCE_GAIN = 1.3  # from which on a gain is asked whether there is one on the other GPU, too
# Of a throughput, the exponent of the ratio of the peaks; that of the bandwidths has the rest.
PEAK_EXPONENT = 0.25
_FEWEST_SAMPLES = 8  # in a batch of float32; below, it is the larger batch in 16 bits that gains
_MOST_IDLE = 0.3
_SHARE = 0.8
# Of lambda-2022: a GPU that one has, and those that one could rent.
_SESSION = "RTX 2080Ti", ("Quadro RTX 6000", "V100 32GB", "RTX 3090", "RTX A6000", "A100 80GB PCIe")
_EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
_SOURCES = (
    "github.com/lambdal/deeplearning-benchmark, commit 67a9bb51 (2022-07): lambda-2022; aa5addb6: lambda-2023",
    "github.com/ryujaehun/pytorch-gpu-benchmark, results/: ryujaehun, 32 CNNs at batch 12, `half` is 16-bit weights",
    "castwise: benchmarks/records/trials and why (H100, H200; torch 2.11), src/castwise/suites/*.toml (published)",
)


class Cell(NamedTuple):
    seconds: float  # a unit, in float32
    seconds_16: float

    @property
    def gain(self) -> float:
        return self.seconds / self.seconds_16


Table = Mapping[str, Mapping[str, Cell]]  # by GPU and workload
Pair = tuple[str, str, str]  # source, target, workload


def _chip(capability: tuple[int, int], fp32: float, tf32: float | None, fp16: float, bandwidth: float) -> GpuModel:
    peaks = {"fp32": fp32 * 1e12, "tf32": tf32 and tf32 * 1e12, "fp16": fp16 * 1e12}
    return GpuModel((), capability, 0, bandwidth * 1e9, peaks, "")


# By their names in the tables: a name of castwise's registry, or what the datasheet prints of those that it lacks.
_GPUS: dict[str, str | GpuModel] = {
    "Quadro RTX 8000": _chip((7, 5), 16.3, None, 130.5, 672),
    "Quadro RTX 6000": _chip((7, 5), 16.3, None, 130.5, 672),
    "Quadro RTX 5000": _chip((7, 5), 11.2, None, 89.2, 448),
    "Titan RTX": "TITAN RTX",
    "Titan V": _chip((7, 0), 14.9, None, 119, 653),
    "Titan Xp": _chip((6, 1), 12.1, None, 12.1, 548),
    "RTX 2080Ti": "GeForce RTX 2080 Ti",
    "GTX 1080Ti": "GeForce GTX 1080 Ti",
    "P100": "Tesla P100-PCIE-16GB",
    "T4": "Tesla T4",
    "V100 16GB": "Tesla V100-SXM2-16GB",
    "V100 32GB": "Tesla V100-SXM2-32GB",
    "RTX 3070": _chip((8, 6), 20.3, 20.3, 40.6, 448),
    "RTX 3080": _chip((8, 6), 29.8, 29.8, 59.5, 760),
    "RTX 3090": "GeForce RTX 3090",
    "RTX A4000": _chip((8, 6), 19.2, 38.3, 76.7, 448),
    "RTX A4500": _chip((8, 6), 23.7, 47.3, 94.6, 640),
    "RTX A5000": _chip((8, 6), 27.8, 55.6, 111.1, 768),
    "RTX A5500": _chip((8, 6), 34.1, 68.2, 136.4, 768),
    "RTX A6000": "RTX A6000",
    "RTX A40": "A40",
    "A10": "NVIDIA A10",
    "A100 40GB PCIe": "A100-PCIE-40GB",
    "A100 40GB SXM4": "A100-SXM4-40GB",
    "A100 80GB PCIe": "NVIDIA A100 80GB PCIe",
    "A100 80GB SXM4": "A100-SXM4-80GB",
    "RTX 6000 Ada": "NVIDIA RTX 6000 Ada Generation",
    "RTX 4090": "NVIDIA GeForce RTX 4090",
    "H100 80GB PCIe": "NVIDIA H100 PCIe",
    "H100 80GB SXM5": "NVIDIA H100 80GB HBM3",
    "GH200 96GB": "NVIDIA GH200 480GB",
    "H200": "NVIDIA H200",
    "B200 192GB SXM5": "NVIDIA B200",
    **_OWN,
}


@functools.cache
def gpu(name: str) -> GpuModel:
    found = _GPUS[name]
    model = find_gpu_model(found) if isinstance(found, str) else found
    assert model is not None, name
    return model


def rate(name: str, dtype: str) -> float:
    """Return the peak that a format's products run at: float32's below TF32, and in 16 bits without Tensor Cores."""
    model = gpu(name)
    if dtype == "fp32" or model.capability < (7, 0):  # type: ignore[operator]  # all are CUDA's
        return model.peaks["fp32"]  # type: ignore[return-value]
    return model.peaks[{"bf16": "fp16"}.get(dtype, dtype)] or model.peaks["fp32"]  # type: ignore[return-value]


def bandwidth(name: str) -> float:
    return gpu(name).bandwidth_bytes_per_second


class Relation(StrEnum):
    """How two GPUs differ in what float32 and 16-bit products run on, which decides how alike gains are."""

    SAME = "same compute capability"
    SAME_KIND = "other capability, TF32 on both or neither"
    TO_TF32 = "to a GPU with TF32"
    FROM_TF32 = "from a GPU with TF32"
    TO_BLACKWELL = "to a Blackwell GPU"
    OTHER = "one without Tensor Cores"


def relation(source: str, target: str) -> Relation:
    """Return how two GPUs differ.

    To Blackwell, gains differ more than between older ones, and no two of its GPUs are in public figures.
    """
    here, there = (gpu(name).capability or (0, 0) for name in (source, target))
    if min(here, there) < (7, 0):
        return Relation.OTHER
    if there >= (10, 0):
        return Relation.TO_BLACKWELL
    if has_tf32(source) == has_tf32(target):
        return Relation.SAME if here == there else Relation.SAME_KIND
    return Relation.TO_TF32 if has_tf32(target) else Relation.FROM_TF32


def has_tf32(name: str) -> bool:
    return gpu(name).peaks.get("tf32") is not None


def _read(path: Path, prefix: str = "") -> dict[str, dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    key = next(iter(rows[0]))
    return {
        row[key].replace("LambdaCloud", "").replace("1x ", "").removesuffix(" Gen5").strip().removeprefix(prefix): row
        for row in rows
    }


def _lambda(folder: Path, form: str, names: Iterable[str] = _GPUS) -> dict[str, dict[str, Cell]]:
    """Return the cells of a table of Lambda's: of one GPU, without those whose batch in float32 is tiny."""
    rates = {bits: _read(folder / form.format("throughput", bits)) for bits in ("fp16", "fp32")}
    size_file = folder / form.format("bs", "fp32")
    sizes = _read(size_file) if size_file.exists() else {}
    found: dict[str, dict[str, Cell]] = {}
    for name in names:
        for workload, text in rates["fp16"].get(name, {}).items():
            if workload in ("", "name_gpu", "num_gpu", "watt", "price") or name not in rates["fp32"]:
                continue
            fast, slow = float(text), float(rates["fp32"][name][workload])
            few = name in sizes and float(sizes[name].get(workload) or 99) < _FEWEST_SAMPLES
            if fast and slow and not few:
                found.setdefault(name, {})[workload] = Cell(1 / slow, 1 / fast)
    return found


def tables(folder: Path) -> dict[str, Table]:
    """Return the public tables by name."""
    lambda_ = folder / "lambda"
    new = _lambda(lambda_, "csv_v1_v2_pytorch-train-{}-{}.csv")
    for name, cells in _lambda(lambda_, "pytorch-train-{}-{}.csv").items():  # three more workloads
        if name in new:
            new[name] = {**cells, **new[name]}
    host = "LambdaBM_ENG04_1xH200_140GB_SXM_h200_v2"
    _GPUS[host] = _GPUS["H200"]
    new["H200"] = _lambda(lambda_, "pytorch-train-{}-v2-{}.csv", [host])[host]
    return {CHOSEN_ON: new, "lambda-2022": _lambda(lambda_, "2022_pytorch-train-{}-{}.csv"), "ryujaehun": _cnns(folder)}


def _cnns(folder: Path) -> Table:
    """Return ryujaehun's cells: the median of 50 steps, without the first."""
    single, kinds = ("single", "half"), ("float", "half")
    files = {
        "GTX 1080Ti": ("1080TI-GeForce_GTX_1080_Ti_{}_model_training_benchmark.csv", single),
        "RTX 2080Ti": ("2080TI-GeForce_RTX_2080_Ti_1_gpus__{}_model_training_benchmark.csv", kinds),
        "Titan Xp": ("TITANXP-TITAN_Xp_1_gpus__{}_model_train_benchmark.csv", kinds),
        "Titan RTX": ("TitanRTX-TITAN_RTX_1_gpus__{}_model_train_benchmark.csv", kinds),
        "Titan V": ("TitanV-TITAN_V_{}_model_training_benchmark.csv", single),
        "A100 40GB SXM4": ("dgx-a100-A100-SXM4-40GB_1_gpus__{}_model_train_benchmark.csv", kinds),
    }
    found: dict[str, dict[str, Cell]] = {}
    for name, (file, own) in files.items():
        slow, fast = _medians(folder, file, own)
        found[name] = {workload: Cell(slow[workload], fast[workload]) for workload in slow}
    return found


def _medians(folder: Path, file: str, kinds: Iterable[str]) -> list[dict[str, float]]:
    """Return the median step by CNN, without the first, of a file for each kind."""
    found = []
    for kind in kinds:
        with (folder / "ryujaehun" / file.format(kind)).open(encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))[1:]
        found.append({workload: statistics.median(float(row[workload]) for row in rows) for workload in rows[0]})
    return found


def host_noise(folder: Path) -> dict[str, Any]:
    """Return how much the seconds of a 2080 Ti in two hosts differ, over ryujaehun's CNNs in both formats."""
    first = _medians(folder, "2080TI-GeForce_RTX_2080_Ti_1_gpus__{}_model_training_benchmark.csv", ("float", "half"))
    second = _medians(folder, "2080ti_2_-GeForce_RTX_2080_Ti_1_gpus__{}_model_train_benchmark.csv", ("float", "half"))
    pairs = [(ours[name], other[name]) for ours, other in zip(first, second, strict=True) for name in ours]
    return summary([math.log(one / another) for one, another in pairs])


# castwise's own records.


class Loop(NamedTuple):
    name: str
    precision: str
    seconds: Mapping[str, float]  # a step, by GPU
    profile: StepProfile | None  # on the H100


def loops() -> list[Loop]:
    """Return what castwise measured: by workload, batch and techniques, and by precision."""
    found: dict[tuple[str, str], list[Trial]] = {}
    for folder in ("trials", "why", "techniques"):
        for trial in load(RECORDS / folder):
            spec = trial.spec
            if spec.kind == "steady" and spec.world_size == 1 and trial.status == "ok" and trial.ranks:
                name = " ".join(filter(None, (spec.workload, f"b{spec.batch_size}", *spec.techniques)))
                found.setdefault((name, spec.precision), []).append(trial)
    made = []
    for (name, precision), trials in found.items():
        seconds = {
            short: statistics.median(times)
            for short, full in _OWN.items()
            if (times := [step_seconds(t) or math.inf for t in trials if t.environment.gpu == full])
        }
        profiled = (t.profile for t in trials if t.profile is not None and t.environment.gpu == _OWN["H100"])
        made.append(Loop(name, precision, seconds, next((p for p in profiled if p.class_seconds), None)))
    return made


def own_tables() -> dict[str, Table]:
    """Return the loops that both GPUs have as cells: over each kind of float32, in each mixed precision."""
    by_name = {(loop.name, loop.precision): loop for loop in loops() if len(loop.seconds) == len(_OWN)}
    found: dict[str, dict[str, dict[str, Cell]]] = {"castwise": {}, "castwise-host-bound": {}}
    for (name, precision), base in by_name.items():
        for mixed in ("bf16-mixed", "fp16-mixed"):
            fast = by_name.get((name, mixed))
            if precision not in ("fp32", "default", "tf32") or fast is None or idle_share(fast) is None:
                continue
            kind = "castwise-host-bound" if (idle_share(fast) or 0) > _MOST_IDLE else "castwise"
            for short in _OWN:
                cell = Cell(base.seconds[short], fast.seconds[short])
                found[kind].setdefault(short, {})[f"{name} {precision} {mixed}"] = cell
    return dict(found)


def idle_share(loop: Loop) -> float | None:
    """Return in which share of an H100's step no kernel runs; None without a profile."""
    return None if loop.profile is None else max(0.0, 1 - loop.profile.busy_seconds / loop.seconds["H100"])


def from_kernels(loop: Loop, target: str, source: str = "H100") -> float:
    """Return a step's seconds on another GPU: products by the ratio of the peaks, the rest by that of the bandwidths.

    Each class of kernels keeps the share of the peak, or of the bandwidth, that it reaches; idle time stays.
    """
    profile = loop.profile
    assert profile is not None
    seconds = loop.seconds[source]
    busy = min(1.0, profile.busy_seconds / seconds)
    scale = busy * seconds / sum(profile.class_seconds.values())
    usual = {"fp32": "fp32", "bf16-mixed": "fp16", "fp16-mixed": "fp16"}.get(loop.precision, "tf32")

    def slower(dtype: str) -> float:
        return rate(source, dtype) / rate(target, dtype)

    total = (1 - busy) * seconds
    for kind in KERNEL_CLASSES:
        own = scale * profile.class_seconds.get(kind, 0.0)
        formats = profile.format_seconds if kind == "tensor_core_product" else {}
        if formats:
            whole = sum(formats.values())
            total += sum(own * part / whole * slower(dtype) for dtype, part in formats.items())
        elif kind in PRODUCTS:
            total += own * slower("fp32" if kind == "plain_product" else usual)
        else:
            total += own * bandwidth(source) / bandwidth(target)
    return total


# Methods: each returns the gain that it predicts for a pair, or None.


def carried(table: Table, source: str, _: str, workload: str) -> float | None:
    return table[source][workload].gain


def median_of_others(table: Table, _: str, target: str, workload: str, *, alike: bool = False) -> float | None:
    others = [name for name in table if name != target and workload in table[name]]
    if alike:
        others = [name for name in others if has_tf32(name) == has_tf32(target)]
    return statistics.median(table[name][workload].gain for name in others) if len(others) > 1 else None


def peak_ratio(name: str) -> float:
    return rate(name, "fp16") / rate(name, "tf32")


def two_parts(table: Table, source: str, target: str, workload: str, *, stored: float = 1.0) -> float | None:
    """Return the gain of a step of products and moved bytes, whose shares give the source's gain.

    In 16 bits the bytes are `stored` times as few.
    """
    gain, at_peak = table[source][workload].gain, peak_ratio(source)
    if math.isclose(at_peak, stored):
        return gain
    products = min(1.0, max(0.0, (1 / stored - 1 / gain) / (1 / stored - 1 / at_peak)))

    def step(name: str, dtype: str, fewer: float) -> float:
        moved = (1 - products) * bandwidth(source) / bandwidth(name) / fewer
        return products * rate(source, "tf32") / rate(name, dtype) + moved

    def modelled(name: str) -> float:
        return step(name, "tf32", 1.0) / step(name, "fp16", stored)

    return gain * modelled(target) / modelled(source)


def shrunken(share: float) -> Callable[..., float | None]:
    def method(table: Table, *pair: str) -> float | None:
        other = two_parts(table, *pair)
        own = carried(table, *pair)
        return None if own is None or other is None else own ** (1 - share) * other**share

    return method


def fitted(table: Table, _: str, target: str, workload: str) -> float | None:
    """Return the gain by t = A/peak + s·M/bandwidth + C, fitted to the other GPUs of the target's kind; C not below 0.

    Nobody has those times of a workload of his own.
    """
    names = [n for n in table if n != target and workload in table[n] and has_tf32(n) == has_tf32(target)]
    if len(names) < 3:
        return None
    best: tuple[float, Any, float] | None = None
    for stored in (1.0, 1.25, 1.5, 2.0):
        sides = [(n, s, d, f) for n in names for s, d, f in _sides(table[n][workload], stored)]
        matrix = np.array([[1 / rate(n, d) / s, 1 / f / bandwidth(n) / s, 1 / s] for n, s, d, f in sides])
        scales = matrix.max(axis=0)
        parts = _non_negative(matrix / scales) / scales
        error = float(np.abs(matrix @ parts - 1).sum())
        if best is None or error < best[0]:
            best = error, parts, stored
    assert best is not None
    _, parts, stored = best
    slow, fast = ([1 / rate(target, d), 1 / f / bandwidth(target), 1] for d, f in (("tf32", 1.0), ("fp16", stored)))
    return float(parts @ slow / (parts @ fast))


def _sides(cell: Cell, stored: float) -> list[tuple[float, str, float]]:
    return [(cell.seconds, "tf32", 1.0), (cell.seconds_16, "fp16", stored)]


def _non_negative(matrix: Any) -> Any:
    """Return the coefficients, none below 0, of the least squares of a matrix against ones; there are three."""
    best, least = np.zeros(matrix.shape[1]), math.inf
    for number in range(1, matrix.shape[1] + 1):
        for chosen in itertools.combinations(range(matrix.shape[1]), number):
            found, *_ = np.linalg.lstsq(matrix[:, chosen], np.ones(len(matrix)), rcond=None)
            error = float(((matrix[:, chosen] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(matrix.shape[1]), error
                best[list(chosen)] = found
    return best


METHODS: dict[str, Callable[..., float | None]] = {
    "carried over": carried,
    "median of the other GPUs": median_of_others,
    "median of the other GPUs of its kind": functools.partial(median_of_others, alike=True),
    "ratio of the peaks": lambda _, __, target, ___: peak_ratio(target),
    "carried over, by the ratio of the peaks": lambda table, source, target, workload: (
        table[source][workload].gain * peak_ratio(target) / peak_ratio(source)
    ),
    "two parts, bytes as many": two_parts,
    "two parts, bytes 1.4 times fewer": functools.partial(two_parts, stored=1.4),
    "two parts, bytes halved": functools.partial(two_parts, stored=2.0),
    "a quarter two parts": shrunken(0.25),
    "half two parts": shrunken(0.5),
    "three quarters two parts": shrunken(0.75),
    "roofline fitted to the other GPUs": fitted,
}
# Two regressions, a third of five terms, half of `two parts, bytes 1.4 times fewer`, and kernels were tried, too.
NUM_TRIED = len(METHODS) + 5
_FEATURES = {  # a regression of the logarithm of the gain's change, on that of the source times these
    "regression on the balance": ("balance",),
    "regression on balance, peaks, bandwidth": ("balance", "peaks", "bandwidth"),
}


def pairs_of(table: Table, wanted: Relation | None = None) -> Iterator[Pair]:
    for source, target in itertools.permutations(table, 2):
        if wanted is None or relation(source, target) == wanted:
            for workload in table[target]:
                if workload in table[source]:
                    yield source, target, workload


def gain_of(table: Table, pair: Pair) -> float:
    return table[pair[1]][pair[2]].gain


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Return how large errors are, which are logarithms of ratios, as shares."""
    sizes = np.abs(np.array(errors))
    points = {"median": 0.5, "p80": 0.8, "p90": 0.9, "max": 1.0}
    return {"n": len(errors)} | {name: round(math.expm1(float(np.quantile(sizes, q))), 3) for name, q in points.items()}


def errors_of(table: Table, pairs: Sequence[Pair], method: Callable[..., float | None]) -> list[float]:
    found = ((method(table, *pair), gain_of(table, pair)) for pair in pairs)
    return [math.log(predicted / gain) for predicted, gain in found if predicted]


def regression(train: Table, test: Table, wanted: Relation, names: Sequence[str]) -> list[float]:
    """Return the errors of a robust regression (least absolute deviations) on another table than it was fitted on."""

    def features(table: Table, pair: Pair) -> list[float]:
        source, target, _ = pair
        change = {
            "balance": math.log(rate(target, "tf32") / rate(source, "tf32") * bandwidth(source) / bandwidth(target)),
            "peaks": math.log(peak_ratio(target) / peak_ratio(source)),
            "bandwidth": math.log(bandwidth(target) / bandwidth(source)),
        }
        return [math.log(table[source][pair[2]].gain) * change[name] for name in names]

    def sides(table: Table) -> tuple[Any, Any]:
        pairs = list(pairs_of(table, wanted))
        changes = [math.log(gain_of(table, p) / table[p[0]][p[2]].gain) for p in pairs]
        return np.array([features(table, p) for p in pairs]), np.array(changes)

    matrix, wished = sides(train)
    weights = np.ones(len(wished))
    for _ in range(30):
        found, *_ = np.linalg.lstsq(matrix * weights[:, None], wished * weights, rcond=None)
        weights = 1 / np.sqrt(np.maximum(np.abs(wished - matrix @ found), 0.02))
    other, change = sides(test)
    return list(other @ found - change)


def error_rows(all_tables: Mapping[str, Table]) -> list[dict[str, Any]]:
    rows = []
    for name, table in all_tables.items():
        for wanted in Relation:
            pairs = list(pairs_of(table, wanted))
            for method, predict in METHODS.items():
                if errors := errors_of(table, pairs, predict):
                    rows.append({"table": name, "relation": wanted, "method": method, **summary(errors)})
    for (train, test), (method, names) in itertools.product(
        itertools.permutations((CHOSEN_ON, "lambda-2022"), 2), _FEATURES.items()
    ):
        wanted = Relation.SAME_KIND
        errors = regression(all_tables[train], all_tables[test], wanted, names)
        rows.append({"table": test, "relation": wanted, "method": f"{method}, of {train}", **summary(errors)})
    return rows


# Intervals.


def quantile(errors: Sequence[float]) -> float:
    """Return the half-width of a split conformal interval: the ⌈0.8 (n + 1)⌉-th smallest of the errors' sizes."""
    place = math.ceil(_SHARE * (len(errors) + 1))
    return sorted(map(abs, errors))[min(place, len(errors)) - 1]


def interval(samples: Sequence[tuple[str, Pair, float]]) -> dict[str, Any]:
    """Return an interval of all samples, and which share of each table's an interval without the target's covers."""
    covered: dict[str, list[bool]] = {}
    for name, (_, target, _), error in samples:
        if (half := _without(tuple(samples), target)) is not None:
            covered.setdefault(name, []).append(abs(error) <= half)
    coverage = {name: round(statistics.fmean(found), 3) for name, found in covered.items()}
    everything = [each for found in covered.values() for each in found]
    half = quantile([error for *_, error in samples])
    return {
        "n": len(samples),
        "factor": round(math.exp(half), 3),
        "coverage": round(statistics.fmean(everything), 3) if everything else None,
        "coverage_by_table": coverage,
    }


@functools.cache
def _without(samples: tuple[tuple[str, Pair, float], ...], target: str) -> float | None:
    others = [error for _, pair, error in samples if gpu(target) not in (gpu(pair[0]), gpu(pair[1]))]
    return quantile(others) if others else None


def speed_ratio(source: str, target: str, exponent: float = PEAK_EXPONENT) -> float:
    """Return how many times as fast as the source the target is expected to be in 16 bits."""
    peaks, bandwidths = rate(target, "fp16") / rate(source, "fp16"), bandwidth(target) / bandwidth(source)
    return peaks**exponent * bandwidths ** (1 - exponent)


def measured_ratio(table: Table, pair: Pair) -> float:
    source, target, workload = pair
    return table[source][workload].seconds_16 / table[target][workload].seconds_16


def throughput_error(table: Table, pair: Pair, exponent: float) -> float:
    return math.log(speed_ratio(*pair[:2], exponent) / measured_ratio(table, pair))


def session_rows(table: Table) -> list[dict[str, Any]]:
    """Return what a record of one GPU says of five others, and what was measured there, by workload."""
    source, targets = _SESSION
    return [
        {
            "gpu": target,
            "relation": relation(source, target),
            "expected": round(speed_ratio(source, target), 3),
            "speeds": {name: round(measured_ratio(table, (source, target, name)), 3) for name in table[source]},
            "gains": {name: round(table[target][name].gain, 3) for name in table[source]},
        }
        for target in (source, *targets)
    ]


def kernel_rows(all_tables: Mapping[str, Table]) -> list[dict[str, Any]]:
    """Return what the classes of an H100's kernels predict for every GPU that has figures of the same workload."""
    by_name = {(loop.name, loop.precision): loop for loop in loops() if loop.profile is not None}

    def row(name: str, base: str, mixed: str, target: str, measured: float, where: str) -> dict[str, Any] | None:
        slow, fast, usual = by_name.get((name, base)), by_name.get((name, mixed)), by_name.get((name, "default"))
        if slow is None or fast is None or usual is None:
            return None
        seconds = slow.seconds["H100"] / fast.seconds["H100"]
        predicted = from_kernels(slow, target) / from_kernels(fast, target)
        others = None
        if where in all_tables:
            others = median_of_others(all_tables[where], "", target, name.split(maxsplit=1)[0])
        return {
            "table": where,
            "workload": f"{name} {base} → {mixed}",
            "target": target,
            "relation": relation("H100", target),
            "idle": round(idle_share(fast) or 0.0, 2),
            "measured": round(measured, 3),
            "carried over": round(seconds, 3),
            "kernels": round(predicted, 3),
            "median of the other GPUs": others and round(others, 3),
        }

    rows = []
    for where in (CHOSEN_ON, "lambda-2022"):
        for target, cells in all_tables[where].items():
            if target != "H100 80GB SXM5":
                base = "tf32" if has_tf32(target) else "fp32"
                rows.append(row("resnet50 b256", base, "fp16-mixed", target, cells["resnet50"].gain, where))
    for where in ("castwise", "castwise-host-bound"):
        for label, cell in all_tables[where]["H200"].items():
            name, base, mixed = label.rsplit(" ", 2)
            rows.append(row(name, base, mixed, "H200", cell.gain, where))
    rows += [row(name, "fp32", "fp16-mixed", target, gain, "suites") for name, target, gain in published()]
    return [each for each in rows if each is not None]


def published() -> Iterator[tuple[str, str, float]]:
    """Yield the suites' figures in float16 with their gain over float32: workload with float32's batch, and GPU."""
    names = {"GTX 1080 Ti": "GTX 1080Ti", "RTX 2080 Ti": "RTX 2080Ti", "Tesla T4": "T4", "Tesla P100": "P100"}
    seen = set[tuple[object, ...]]()
    for suite in map(find_suite, SUITE_NAMES):
        for fast in suite.published:
            base, target = baseline_of(suite, fast), names.get(fast.gpu, fast.gpu)
            key = (target, fast.workload, fast.precision, fast.batch_size)
            is_mixed = fast.precision in ("fp16-mixed", "fp16-master") and fast.world_size == 1
            if base and base.seconds and fast.seconds and is_mixed and target in _GPUS and key not in seen:
                seen.add(key)
                yield f"{base.workload} b{base.batch_size}", target, base.seconds / fast.seconds


def study(folder: Path) -> dict[str, Any]:
    all_tables = tables(folder) | own_tables()
    calibrating = (CHOSEN_ON, "lambda-2022", "castwise")
    ratio, rates, signs = {}, {}, {}
    for wanted in Relation:
        pairs = [(name, pair) for name in calibrating for pair in pairs_of(all_tables[name], wanted)]
        if not pairs:
            continue
        errors = [errors_of(all_tables[name], [pair], carried)[0] for name, pair in pairs]
        ratio[wanted] = interval([(name, pair, error) for (name, pair), error in zip(pairs, errors, strict=True)])
        rates[wanted] = interval(
            [(name, pair, throughput_error(all_tables[name], pair, PEAK_EXPONENT)) for name, pair in pairs]
        )
        gains = [
            gain_of(all_tables[name], pair)
            for name, pair in pairs
            if all_tables[name][pair[0]][pair[2]].gain >= SOURCE_GAIN
        ]
        signs[wanted] = {"n": len(gains), "right": sum(gain >= GAIN for gain in gains)}
    exponents = {
        name: {str(x): summary([throughput_error(table, pair, x) for pair in pairs_of(table)]) for x in _EXPONENTS}
        for name, table in all_tables.items()
        if name in calibrating
    }
    points = {
        name: [
            [round(statistics.median(all_tables[name][s][workload].gain for s in sources), 3), round(cell.gain, 3)]
            for target, cells in all_tables[name].items()
            for workload, cell in cells.items()
            if (sources := [s for s, t, w in pairs_of(all_tables[name], Relation.SAME) if (t, w) == (target, workload)])
        ]
        for name in calibrating
    }
    return {
        "sources": _SOURCES,
        "methods_tried": NUM_TRIED,
        "hosts": host_noise(folder),
        "thresholds": {"gain": GAIN, "source_gain": SOURCE_GAIN},
        "errors": error_rows(all_tables),
        "kernels": kernel_rows(all_tables),
        "ratio": ratio,
        "throughput": rates,
        "throughput_exponents": exponents,
        "signs": signs,
        "session": session_rows(all_tables["lambda-2022"]),
        "points": points,
    }


# What docs show of the record.

_SHOWN = {
    "carried over": "same gain",
    "median of the other GPUs": "median of others",
    "median of the other GPUs of its kind": "median of others of its kind",
    "ratio of the peaks": "ratio of peaks",
    "a quarter two parts": "a quarter roofline",
    "roofline fitted to the other GPUs": "roofline fitted to others",
}
_WORKLOADS = {
    "ssd": "SSD",
    "bert_base_squad": "BERT base",
    "gnmt": "GNMT",
    "resnet50": "ResNet-50",
    "tacotron2": "Tacotron 2",
}


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.095 else f"{100 * share:.1f}"


def _figures(found: Mapping[str, float]) -> str:
    return " / ".join(_percent(found[name]) for name in ("median", "p80", "p90"))


def _lines_of(heading: str, alignment: str, rows: Iterable[Sequence[object]]) -> str:
    return "\n".join(markdown(heading, alignment, rows)) + "\n"


def errors_table(record: Mapping[str, Any]) -> str:
    """Return the errors by kind of pair and table."""
    cells = {(row["relation"], row["table"], row["method"]): row for row in record["errors"]}
    rows = []
    for wanted, table in dict.fromkeys((row["relation"], row["table"]) for row in record["errors"]):
        found = [cells.get((wanted, table, method)) for method in _SHOWN]
        if wanted != Relation.OTHER and found[0]:
            rows.append([wanted, table, found[0]["n"], *("–" if each is None else _figures(each) for each in found)])
    rows.sort(key=lambda row: list(Relation).index(row[0]))
    return _lines_of(f"pairs | table | n | {' | '.join(_SHOWN.values())}", "llr" + "r" * len(_SHOWN), rows)


def kernels_table(record: Mapping[str, Any]) -> str:
    """Return the errors of kernels' classes beside those of the baselines, on the same cells."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in record["kernels"]:
        words = "ResNet-50, Lambda" if row["table"].startswith("lambda") else row["table"]
        words += ", the host decides" if row["idle"] > _MOST_IDLE and words == "suites" else ""
        groups.setdefault(f"{words}: {row['relation']}", []).append(row)
    rows = []
    for words, own in groups.items():
        cells = []
        for method in ("kernels", "carried over", "median of the other GPUs"):
            errors = [math.log(row[method] / row["measured"]) for row in own if row[method]]
            cells.append(_figures(summary(errors)) if errors else "–")
        rows.append([words, len(own), *cells])
    return _lines_of("from an H100 | n | kernels | same gain | median of others", "lrrrr", rows)


def calibration_table(record: Mapping[str, Any]) -> str:
    """Return the ranges that hold 80 %, what they hold of a GPU that is left out, and how often a gain stays one."""
    rows = []
    for wanted, found in record["ratio"].items():
        signs, rates, by_table = record["signs"][wanted], record["throughput"][wanted], found["coverage_by_table"]
        held = ", ".join(f"{name} {100 * share:.0f} %" for name, share in by_table.items()) or "–"
        stays = f"{signs['right']} of {signs['n']}"
        rows.append([wanted, found["n"], f"×/÷ {found['factor']:.2f}", held, stays, f"×/÷ {rates['factor']:.2f}"])
    heading = f"pairs | n | 80 % of gains within | held for a GPU left out | {SOURCE_GAIN}× here is {GAIN}× there"
    return _lines_of(f"{heading} | 80 % of speeds within", "lrrlrr", rows)


def session_table(record: Mapping[str, Any]) -> str:
    """Return what one GPU's record says of five others, beside what was measured on them."""
    first, *others = record["session"]
    widest = record["ratio"][Relation.SAME]["factor"]

    def cells(row: Mapping[str, Any]) -> list[str]:
        return [f"{row['speeds'][name]:.1f} ({row['gains'][name]:.1f}×)" for name in _WORKLOADS]

    rows, speeds = [[first["gpu"], "the GPU that you have", "1", *cells(first)]], []
    near: dict[bool, list[bool]] = {True: [], False: []}
    for row in others:
        factor = record["throughput"][row["relation"]]["factor"]
        low, high = row["expected"] / factor, row["expected"] * factor
        speeds += [low <= speed <= high for speed in row["speeds"].values()]
        near[row["relation"] == Relation.SAME] += [
            1 / widest <= gain / first["gains"][name] <= widest for name, gain in row["gains"].items()
        ]
        rows.append([row["gpu"], row["relation"], f"{low:.1f} to {high:.1f}", *cells(row)])
    heading = f"GPU | pair | expected speed (80 %) | {' | '.join(_WORKLOADS.values())}"
    said = (
        f"{sum(speeds)} of {len(speeds)} measured speeds are in the expected range. Within ×/÷ {widest:.2f} of the "
        f"{first['gpu']}'s are {sum(near[True])} of {len(near[True])} gains on the GPU of the same capability, and "
        f"{sum(near[False])} of {len(near[False])} on the others."
    )
    return _lines_of(heading, "llr" + "r" * len(_WORKLOADS), rows) + f"\n{said}\n"


def table(name: str) -> str:
    """Return a table of docs by its name."""
    made = {"errors": errors_table, "kernels": kernels_table, "calibration": calibration_table}
    return (made | {"session": session_table})[name](json.loads(OUTPUT.read_text()))


def picture() -> str:
    """Return predicted against measured gains of pairs of one capability, with the 80 % interval."""
    record = json.loads(OUTPUT.read_text())
    points = record["points"]
    factor = record["ratio"][Relation.SAME]["factor"]
    highest = max(value for own in points.values() for pair in own for value in pair)
    ends = [float(each) for each in np.geomspace(0.9, highest, 30)]
    looks = (("circle", "#0969da"), ("diamond", "#bc4c00"), ("triangle-up", "#1a7f37"))

    def panel(title: str, height: Callable[[float, float], float]) -> Panel:
        band = [(height(x, x / factor), height(x, x * factor)) for x in ends]
        expected = [Point(x, height(x, x)) for x in ends]
        lines = [Line("as expected, with the range of 80 %", expected, SOFT, "", "dash", band=band)]
        for (name, own), (mark, colour) in zip(points.items(), looks, strict=True):
            lines.append(Line(name, [Point(x, height(x, y)) for x, y in own], colour, mark, dash=""))
        return Panel(title, lines, "expected gain: the median of other GPUs of its compute capability", is_log=True)

    panels = [panel("measured gain", lambda _, y: y), panel("measured ÷ expected", lambda x, y: y / x)]
    chart = Chart(
        "The gain of mixed precision, expected and measured",
        "Gains expected from other GPUs of the same compute capability, and measured ones.",
        lambda width: line_chart(panels, width),
    )
    counts = ", ".join(f"{name} {len(own)}" for name, own in points.items())
    return for_dark_pages(chart.as_file(f"A point is a workload on a GPU. Points: {counts}"))


def main() -> None:
    if sys.argv[1:] == ["--draw"]:
        (IMAGES / "predict.svg").write_text(picture())
    else:
        found = study(Path(sys.argv[1])).items()
        lines = (f"{json.dumps(name)}: {_lines(value)}" for name, value in found)
        (Path(sys.argv[2]) if len(sys.argv) > 2 else OUTPUT).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _lines(value: Any) -> str:
    """Return a part of the record as JSON, of lists an entry a line."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(f" {json.dumps(each)}" for each in value) + "\n]"


if __name__ == "__main__":
    main()
