"""What castwise knows by name, as tables."""

from collections.abc import Sequence

from castwise.registry.architectures import ARCHITECTURES, FORMATS, dotted, needed_capabilities
from castwise.registry.gpus import GPU_MODELS, PEAK_DTYPES, peak
from castwise.registry.precisions import NAMED_PRECISIONS, PRECISIONS
from castwise.registry.suites import SUITE_NAMES, find_suite, specs_of
from castwise.registry.techniques import SETS, TECHNIQUES, TUNED, needs_of
from castwise.registry.workloads import WORKLOADS
from castwise.show.fields import Field, FlatRow
from castwise.show.presentation import Grid, Part, paragraph
from castwise.show.table import DataTable
from castwise.spec.types import SYNTHETIC


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Grid:
    """Return a table whose names stay whole on a narrow terminal: the other columns break between words."""
    fields = [Field(heading, heading, wraps=number > 0) for number, heading in enumerate(headings)]
    return Grid(DataTable(fields, [dict(zip(headings, row, strict=True)) for row in rows]))


def workloads() -> list[Part]:
    rows = [
        (r.name, r.unit, f"{r.batch_size}/{r.cpu_batch_size}", ", ".join(r.data_sets) or "–", r.summary)
        for r in WORKLOADS
    ]
    rows.append(("torchvision:NAME", "images", "64/4", "–", "any image classifier of torchvision"))
    rows.append(("timm:NAME", "images", "64/4", "–", "any model of timm with a classifier"))
    return [_table(("workload", "counts", "batch (GPU/CPU)", "real data", "what it is"), rows)]


def precisions() -> list[Part]:
    rows = []
    for row in (*PRECISIONS, *NAMED_PRECISIONS):
        needed = needed_capabilities(row.format or "")
        needs = "any" if needed is None else f"≥ {dotted(needed[0])}"
        needs += f", < {dotted(needed[1])}" if needed and needed[1] else ""
        needs += ", else emulated" if ARCHITECTURES[0].support(row.format or "") == "emulated" else ""
        also = ", ".join(alias.upper() if alias.startswith("o") else alias for alias in row.aliases)
        summary = f"{row.summary}; also called {also}" if also else row.summary
        rows.append((row.name, needs, "yes" if row.on_cpu else "no", row.loss_scale, summary))
    return [_table(("precision", "needs (CUDA)", "on CPU", "loss scale", "what it is"), rows)]


# What a technique does to the numbers, for people.
NUMERICS = {
    "bits": "the same",
    "rounding": "rounding",
    "draws": "other random draws",
    "sums": "sums in fewer bits",
    "state": "optimizer state in fewer bits",
    "shape": "another model",
}


def techniques() -> list[Part]:
    rows = []
    for row in TECHNIQUES:
        facts = [f"needs {needs_of(row)}", f"costs {row.cost}", f"numbers: {NUMERICS[row.numerics]}"]
        facts += [f"in suites{' and scripts' * row.fits_scripts} only"] if "steady" not in row.kinds else []
        rows.append((row.name, row.summary, "; ".join(each for each in facts if not each.endswith((" –", " none")))))
    for name, members in SETS.items():
        own = "; in a suite, for the loop that its file names" if name == TUNED else ""
        rows.append((name, f"short for {', '.join(members)}, as far as they apply{own}", ""))
    return [_table(("technique", "what it does", "needs, costs, numbers"), rows)]


def gpus() -> list[Part]:
    """Return what each generation of GPUs trains in, and which PyTorch has kernels for it."""
    rows = []
    for row in ARCHITECTURES:
        words = {"slow": "{}", "emulated": "{} (emulated)"}
        slow = ", ".join(words[kind].format(name) for name in FORMATS if (kind := row.support(name)) in words)
        native = ", ".join(row.native.split())
        rows.append((row.code, row.name, native or "–", slow or "–", row.build, row.note or "–"))
    head = "What each generation of GPUs trains in. `castwise list devices` has GPUs by their names, for `fits --gpu`."
    return [paragraph(head), _table(("since", "generation", "trains in", "no faster", "PyTorch", "note"), rows)]


def devices() -> list[Part]:
    """Return the GPUs whose datasheets are known: dense peaks in TFLOP/s, bandwidth in TB/s, below their source."""
    titles = {**dict.fromkeys(PEAK_DTYPES), "TB/s": None, "measured fp16, bf16": None}
    columns = [Field("gpu", "GPU (TFLOP/s, dense)", wraps=True), Field("memory", "GB", "count")]
    rows: list[FlatRow] = []
    for row in GPU_MODELS:
        measured = ", ".join(_figure(row.measured.get(dtype)) for dtype in ("fp16", "bf16")) if row.measured else "–"
        figures = [*(_figure(peak(row, dtype)) for dtype in PEAK_DTYPES), _figure(row.bandwidth_bytes_per_second)]
        texts = zip(titles, [*figures, measured], strict=True)
        rows.append({"gpu": row.names[0], "memory": row.memory_gigabytes, "source": row.source, **dict(texts)})
    table = DataTable([*columns, *(Field(title, title, "count") for title in titles)], rows)
    grid = Grid(table, setting=("source",), drop_first=("measured fp16, bf16",), elsewhere="a pipe gets it")
    head = "GPUs by their names, as `fits --gpu` takes them. `castwise list gpus` says what their generations train in."
    return [paragraph(head), grid]


def suites() -> list[Part]:
    rows = []
    for name in SUITE_NAMES:
        suite = find_suite(name)
        data = dict.fromkeys(cells.data_set for cells in suite.cells if cells.data_set != SYNTHETIC)
        gpus = dict.fromkeys(figure.gpu for figure in suite.published)
        runs = str(len(specs_of(suite, device="cuda:0")))
        rows.append((name, runs, ", ".join(data) or "–", ", ".join(gpus) or "no figures in numbers", suite.title))
    return [_table(("suite", "runs", "real data", "published on", "what it measures"), rows)]


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e12:.4g}"
