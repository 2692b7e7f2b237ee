"""Diagnoses: a table with a few lines for each precision."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from castwise.analysis.causes import CLASS_WORDS, Diagnosis, LeftOut, try_line
from castwise.analysis.numerics import has_gradients, lost_here, lost_share, worst_first
from castwise.analysis.steady_metrics import data_share
from castwise.analysis.step_evidence import MEMORY, UPDATE
from castwise.records.schema import KernelTime
from castwise.registry.kernel_classes import PRODUCTS, short_name
from castwise.registry.precisions import DEFAULT
from castwise.registry.techniques import compiles, join, step_config_of
from castwise.show.fields import Field, FlatRow, column, estimate_values, find_fields, trial_values
from castwise.show.notes import headline, machine_line, warning_lines, warning_values
from castwise.show.presentation import Code, Grid, Lines, Part, Presentation, paragraph
from castwise.show.table import DataTable, json_document, short_table_of
from castwise.show.units import format_ratio, format_seconds
from castwise.spec.quantities import format_share
from castwise.spec.trial import TrialSpec

# In the order of the table, with its headings.
_COLUMNS = (
    column("precision"),
    column("techniques", title="loop"),
    column("step_seconds", title="step", otherwise="status"),
    column("default_speedup", title="× default"),
    column("speedup", title="× fp32"),
    *find_fields(("products_share", "moving_share", "update_share", "data_share", "idle_share")),
    column("tensor_share", title="tensor cores"),
)


def _share(name: str, title: str) -> Field:
    return Field(name, title, "share", lambda row: format_share(row[name]))


def _in_ms(seconds: float, sign: str = "") -> str:
    return f"{round(1e3 * seconds, 2) + 0.0:{sign}.2f}"  # no "-0.00"


def _added(name: str, title: str) -> Field:
    return Field(name, title, "number", lambda row: _in_ms(row[name], "+"))


def _decibels(name: str, title: str) -> Field:
    return Field(name, title, "number", lambda row: f"{row[name]:.0f} dB")


# Of a module, of a step that was compared with float32.
_NUMERIC = (
    column("precision"),
    Field("module", "module"),
    _share("unscaled_underflow_share", "lost in float16"),
    _share("underflow_share", "lost here"),
    _decibels("output_sqnr_db", "SQNR of outputs"),
    _decibels("gradient_sqnr_db", "SQNR of gradients"),
    _share("lost_update_share", "updates lost"),
)
# Of a step on several GPUs beside one, with what each part takes more.
_MORE = (
    column("precision"),
    column("techniques", title="loop"),
    Field("one_seconds", "one GPU", "number", lambda row: _in_ms(row["one_seconds"])),
    _added("communication_seconds", "collectives"),
    _added("clock_seconds", "clock"),
    _added("kernel_seconds", "kernels"),
    _added("idle_seconds", "host"),
    _added("rest_seconds", "rest"),
    Field("step_seconds", "step", "number", lambda row: _in_ms(row["step_seconds"])),
)
_SETTING = ("gpus", "parallelism")
_MOST_NUMERIC = 6  # rows
_MODULE_LENGTH = 24
GPUS_TITLE = "What the slowest rank's step takes more than a step on one GPU, in ms"
_LEAST_LONGER = 0.01  # of a step, that a class of kernels takes longer; less is noise
_MOST_CLASSES = 3
NUMERICS_TITLE = "Rounding of one step, against float32"
_FEW = 3  # of so many configurations two causes each fit into 25 lines, of more one
_MOST_MODULES = 10
_WIDTH = 76  # of kernels, which are set in by 4 columns
_PRECISIONS = "--precision ... "  # in commands that differ in the precision alone
_IN_JSON = "--format json has them"


def share_values(found: Diagnosis | None) -> dict[str, float | None]:
    """Return what a step's time is spent on by field name; None without a profile."""
    parts = {"products_share": PRODUCTS, "moving_share": MEMORY, "update_share": UPDATE}
    shares = {name: found.share_of(*classes) if found and found.shares else None for name, classes in parts.items()}
    return {**shares, "idle_share": found.idle_share if found else None}


def flat_row(found: Diagnosis) -> FlatRow:
    row = found.row
    return {
        **trial_values(row.trial),
        "step_seconds": row.step_seconds,
        "data_share": data_share(row.trials),
        **estimate_values("default_speedup", row.default_estimate),
        **estimate_values("speedup", row.speedup_estimate),
        **share_values(found),
    }


def short_table(diagnoses: Sequence[Diagnosis], left_out: Sequence[LeftOut] = ()) -> DataTable[FlatRow]:
    """Return what each step's time is spent on; what was not timed has its status in the place of a time."""
    rows = [flat_row(each) for each in diagnoses]
    for each in left_out:
        fields = {name: getattr(each.spec, name) for name in ("precision", "loss_scale", "batch_size", "parallelism")}
        rest = {"gpus": each.spec.num_gpus, "techniques": join(each.spec.techniques), "status": each.status}
        rows.append({**fields, **rest})
    # One ratio is enough here: the other is in `castwise run`'s table.
    ratio = "default_speedup" if any(row.get("default_speedup") for row in rows) else "speedup"
    other = {"default_speedup", "speedup"} - {ratio}
    dropped = other | ({"techniques"} if len({row["techniques"] for row in rows}) == 1 else set())
    columns = [each for each in _COLUMNS if each.name not in dropped]
    return short_table_of(columns, rows, ["step_seconds"], formats={ratio: lambda row: format_ratio(row[ratio])})


def gpus_table(diagnoses: Sequence[Diagnosis]) -> DataTable[FlatRow] | None:
    """Return what steps on several GPUs take more than the same loop's on one; None if nothing is to compare."""
    found = [(each, beside) for each in diagnoses if (beside := each.beside_one_gpu) is not None]
    rows = [{**trial_values(each.row.trial), **asdict(beside)} for each, beside in found]
    dropped = {"techniques"} if len({row["techniques"] for row in rows}) == 1 else set()
    return short_table_of([each for each in _MORE if each.name not in dropped], rows) if rows else None


def gpus_lines(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """Return which rank is the slowest, what waits for it, and which kernels take longer, of steps on several GPUs."""
    lines = list[str]()
    for found in diagnoses:
        if (beside := found.beside_one_gpu) is None:
            continue
        least, waited = _LEAST_LONGER * beside.step_seconds, beside.waited_seconds
        longer = [(name, seconds) for name, seconds in beside.slower_classes.items() if seconds >= least]
        said = [f"others wait for rank {beside.rank}, up to {format_seconds(waited)}"] if waited else []
        if longer:
            named = (f"{CLASS_WORDS.get(name, name.replace('_', ' '))} {_in_ms(each, '+')}" for name, each in longer)
            said.append(f"kernels that take longer, in ms: {', '.join([*named][:_MOST_CLASSES])}")
        spec = found.row.trial.spec
        has_buckets = spec.parallelism == "ddp" and not step_config_of(spec.techniques).coalesced_reduce
        if longer and has_buckets and compiles(spec.techniques):
            said.append(
                "DistributedDataParallel cuts a compiled step into a graph for each bucket, and these fuse less"
            )
        if spec.parallelism == "ddp" and not spec.is_script and beside.step_seconds - beside.one_seconds >= least:
            command = f"castwise tune {spec.workload} --gpus {spec.world_size}"
            said.append(f"`{command}` tries other ways to average gradients")
        lines += [f"{_name_of(found.row.trial.spec)}: {'; '.join(said)}."] if said else []
    return lines


def numerics_table(diagnoses: Sequence[Diagnosis]) -> DataTable[FlatRow] | None:
    """Return the worst modules of each precision whose step was compared with float32; None if there is none."""
    compared = [(each, each.numerics) for each in diagnoses if each.numerics and each.numerics.modules][:_MOST_NUMERIC]
    rows: list[FlatRow] = [
        {
            **module.model_dump(),
            "precision": found.row.precision,
            "module": module.name if len(module.name) <= _MODULE_LENGTH else f"…{module.name[1 - _MODULE_LENGTH :]}",
            "unscaled_underflow_share": lost_share(module, "float16") if has_gradients(module) else None,
            "underflow_share": lost_here(module, numerics, found.precision) if has_gradients(module) else None,
        }
        for found, numerics in compared
        for module in worst_first(numerics, found.precision)[: _MOST_NUMERIC // len(compared)]
    ]
    return short_table_of(_NUMERIC, rows, formats={"precision": None}) if rows else None


def numerics_lines(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """Return what rounding does in each precision, and why it is not known."""
    named = [(_name_of(found.row.trial.spec), each) for found in diagnoses for each in found.numeric_findings]
    return [f"{name}: {finding.sentence}" for name, finding in named]


def _name_of(spec: TrialSpec) -> str:
    label = spec.world_size_label or (f"{spec.num_gpus} ranks" if spec.num_gpus > 1 else "")
    gpus = label and f" on {label}"
    return f"{spec.precision} {' + '.join(spec.techniques)}".rstrip() + gpus


def lines_of(found: Diagnosis, most_causes: int | None = None, name: str = "") -> list[str]:
    """Return why a configuration is no faster: a line that names it, then each cause with what to try."""
    spec = found.row.trial.spec
    name = name or _name_of(spec)
    if not found.causes:
        return [f"{name}: no cause found. {found.bound[:1].upper()}{found.bound[1:]}."]
    lines: list[str] = []
    for cause in found.causes[:most_causes]:
        saves = "" if cause.share is None else f", at most {format_share(cause.share)} of the step"
        lines.append(f"{'  Then' if lines else f'{name}:'} {cause.name}{saves}.")
        lines += [f"    {cause.evidence}.", f"    Try {try_line(cause, spec.techniques)}."]
    return lines


def present(
    diagnoses: Sequence[Diagnosis],
    left_out: Sequence[LeftOut] = (),
    *,
    kernels: bool = False,
    verbose: bool = False,
) -> Presentation:
    """Return the table, then the causes of each configuration, why others have none, and what is not known."""
    rows = [each.row for each in diagnoses]
    table, drop_first = short_table(diagnoses, left_out), ("update_share", "idle_share")
    shares = Grid(table, setting=_SETTING, drop_first=drop_first, elsewhere=_IN_JSON)
    parts: list[Part] = [Lines([headline(rows)] if rows else [], "bold", is_list=False), shares]
    parts += [machine_line(rows, is_brief=not verbose)] if rows else []
    most = None if verbose else 2 if len(diagnoses) <= _FEW else 1
    # Among many, these are known: fp32 without Tensor Cores, and TF32 as in PyTorch's default.
    known = {"fp32", "tf32"} if most == 1 and any(row.precision == DEFAULT for row in rows) else set[str]()
    explained = [found for found in diagnoses if found.row.precision not in known]
    for found in explained:
        first, *others = lines_of(found, most)
        parts += [paragraph(first, gap=found is explained[0]), Lines(others)]
    if left := [row.precision for row in rows if row.precision in known]:
        parts.append(Lines([f"{', '.join(left)}: with --verbose"]))
    failures = [f"{_name_of(each.spec)}: {each.status}: {each.reason}" for each in left_out]
    doubts = [*remarks(diagnoses), *warning_lines(rows, in_full=verbose)]
    parts += [Lines(failures, "red"), Lines(doubts, "yellow")]
    if beside := gpus_table(diagnoses):
        grid = Grid(beside, setting=_SETTING, elsewhere=_IN_JSON)
        parts += [paragraph(GPUS_TITLE, gap=True), grid, Lines(gpus_lines(diagnoses))]
    if numerics := numerics_table(diagnoses):
        parts += [paragraph(NUMERICS_TITLE, gap=True), Grid(numerics, elsewhere=_IN_JSON)]
    parts.append(Lines(numerics_lines(diagnoses)))
    for found in diagnoses if kernels else ():
        parts += [Lines([""]), Code(kernel_lines(found), "text")]
    return Presentation(parts, document=lambda: document(diagnoses, left_out))


def remarks(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """Return what 16 bits could gain at most, from the first precision that says it, and what is not known."""
    ceilings = [found.ceiling.sentence for found in diagnoses if found.ceiling is not None]
    missing: dict[str, list[str]] = {}
    for found in diagnoses:
        for line in found.missing:
            shared = line.replace(f"--precision {found.row.precision} ", _PRECISIONS)
            missing.setdefault(shared, []).append(found.row.precision)
    lines = ceilings[:1]
    for shared, names in missing.items():
        who = "" if len(names) == len(diagnoses) else f" ({', '.join(names)})"
        line = shared.replace(_PRECISIONS, f"--precision {','.join(names)} ")
        lines.append(f"Not known{who}: {line.removesuffix('.')}.")
    return lines


def kernel_words(kernel: KernelTime) -> tuple[str, str]:
    """Return what a kernel is for, and the shapes that it worked on."""
    kind = " ".join(filter(None, [CLASS_WORDS.get(kernel.kind, kernel.kind.replace("_", " ")), kernel.format]))
    return kind, " ".join("×".join(map(str, shape)) for shape in kernel.shapes[:3] if shape)


def kernel_lines(found: Diagnosis) -> list[str]:
    profile, name = found.profile, found.row.trial.spec.label
    if profile is None:
        return [f"{name}: no kernels, because no step was profiled"]
    unit = "operators" if profile.device_type == "cpu" else "kernels"
    title = f"{name}: the {unit} that take longest, of {profile.num_kernels:,.0f} in a step of "
    lines = textwrap.wrap(title + format_seconds(found.row.step_seconds or profile.seconds), _WIDTH)
    for each in profile.kernels:
        kind, shapes = kernel_words(each)
        figures = f"  {format_seconds(each.seconds):>9} {each.launches:4,.0f}×  "
        inset = " " * len(figures)
        line = f"{kind}: {each.operator} {shapes}"
        lines += textwrap.wrap(line, _WIDTH, initial_indent=figures, subsequent_indent=inset)
        if each.name != each.operator:
            lines.append(f"{inset}{short_name(each.name, _WIDTH - len(inset))}")
    if profile.module_seconds:
        lines += textwrap.wrap(f"{name}: the modules that take longest, forward and backward", _WIDTH)
    modules = [(each.forward_seconds + each.backward_seconds, name) for name, each in profile.module_seconds.items()]
    for seconds, module in sorted(modules, reverse=True)[:_MOST_MODULES]:
        lines.append(f"  {format_seconds(seconds):>9}  {module or 'loss and optimizer'}")
    return lines


def document(diagnoses: Sequence[Diagnosis], left_out: Sequence[LeftOut] = ()) -> dict[str, Any]:
    """Return what `castwise why --format json` prints: shares of the step's time, 0 to 1, and causes in order.

    `warnings` are those of `castwise run`. `left_out` has the configurations that were not timed, each with its status
    and the reason.
    """
    figures = ("precision", "techniques", "batch_size", "step_seconds", "default_speedup", "speedup")
    found = [
        {
            "key": each.row.trial.spec.key,
            "workload": each.row.trial.spec.workload,
            **{name: getattr(each.row, name) for name in figures},
            "class_shares": dict(each.shares),
            "idle_share": each.idle_share,
            "counters": each.counters and each.counters.model_dump(),
            "beside_one_gpu": each.beside_one_gpu and asdict(each.beside_one_gpu),
            "causes": [asdict(cause) for cause in each.causes],
            "ceiling": each.ceiling and asdict(each.ceiling),
            "missing": each.missing,
            "numerics": each.numerics and each.numerics.model_dump(),
            "numeric_findings": [asdict(finding) for finding in each.numeric_findings],
            "profile": each.profile and each.profile.model_dump(exclude={"numerics"}),
        }
        for each in diagnoses
    ]
    others = [
        {name: getattr(each.spec, name) for name in ("key", "workload", "precision", "techniques", "batch_size")}
        | {"status": each.status, "reason": each.reason}
        for each in left_out
    ]
    return json_document(diagnoses=found, warnings=warning_values([each.row for each in diagnoses]), left_out=others)
