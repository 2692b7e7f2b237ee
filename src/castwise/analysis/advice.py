"""Decide which loop to take, from the intervals of the speed-ups, and say it in words: one answer everywhere."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from castwise.analysis.causes import diagnose, try_line
from castwise.analysis.code_snippets import Snippet, framework_snippets, own_calls, pytorch_code, script_code
from castwise.analysis.model_flops import why_inexact
from castwise.analysis.result_table import Row
from castwise.analysis.speedup import speedup_estimate
from castwise.analysis.statistics import MOST_ROUNDS, Estimate
from castwise.analysis.warnings import WarningName, warnings_of_all
from castwise.records.schema import Trial
from castwise.registry.precisions import (
    AS_WRITTEN,
    BASELINE,
    BESIDE_FP8,
    DEFAULT,
    REFERENCE_WORDS,
    find_precision,
    is_same_as_fp32,
    precision_row,
    why_emulated,
)
from castwise.registry.techniques import join, rows_of
from castwise.spec.quantities import TOO_NOISY, format_interval, with_interval
from castwise.spec.typed import TypedLine, advised_line
from castwise.spec.types import SYNTHETIC
from castwise.spec.user_model import is_object

# A gain smaller than this is not worth a change of numerics. The figure is a choice, not a measurement.
WORTHWHILE = 1.03
# One process that is slower than this share of the reference's speed needs no interval: processes of a configuration
# were never seen to differ by so much. One of an emulated precision need only be slower, as is to be expected.
_HOPELESS = 0.5
# The same if the machine was disturbed. Source: equal loops on a busy CPU, which differed by 0.39 to 2.09.
_HOPELESS_WITH_DOUBTS = 0.2

Decision = Literal["take", "stay", "undecided", "nothing"]

# Why a reference has no figures, by its status.
_WITHOUT_REFERENCE = {
    "oom": "{} does not fit into memory at this batch size",
    "crashed": "{} crashed, so there is nothing to compare with",
    "timeout": "{} took too long, so there is nothing to compare with",
    "unsupported": "{} does not run here, so there is nothing to compare with",
    "diverged": "{} diverged: look at the learning rate before anything else",
}
# Intervals hold what processes differ by. These say that the machine itself was disturbed.
_DOUBTS: dict[WarningName, str] = {
    "noisy": "noisy",
    "cpu-starved": "busy CPU",
    "foreign-process": "shared GPU",
    "thermal-drift": "GPU warming up",
}
_FAILURES = {"diverged": "diverged", "oom": "ran out of memory"}
_REFERENCES = (AS_WRITTEN, DEFAULT, BASELINE)  # the first that was measured is what a gain is over
_CHECK_ACCURACY = "check the accuracy first."
_NO_INTERVAL = "but one process of each gives no interval"


@dataclass(frozen=True, repr=False)
class Advice:
    """What to do, how sure that is, and the code that does it."""

    workload: str
    batch_size: int  # on each GPU
    num_gpus: int
    decision: Decision  # `take` another loop and `stay` rest on intervals
    precision: str | None  # to take or to stay with; None if that is undecided
    sentence: str
    techniques: tuple[str, ...] = ()  # of the loop to take
    over_default: Estimate | None = None  # its speed-up over PyTorch's default in the plain loop
    over_fp32: Estimate | None = None  # and over fp32
    memory_ratio: float | None = None  # peak allocated over that of what it is compared with
    why: str = ""  # why this one and no other
    how_sure: str = ""  # how many processes it rests on, and what disturbed them
    accuracy: str = ""  # whether what is taken trains as well, as far as records show it; empty if that is no question
    is_less_accurate: bool = False  # it trains worse, or some of its runs diverge
    limit: str = ""  # why the fastest is no faster, as far as the records show it
    code: str = ""  # the lines of PyTorch that switch the precision on; empty if there is nothing to switch
    key: str | None = None  # of the trial that it rests on
    snippets: tuple[Snippet, ...] = ()  # what to set in the frameworks around PyTorch
    command: str = ""  # decides what is undecided; of objects a call of castwise.compare
    ask: str = ""  # the command, or the call, that says more of the limit

    def __repr__(self) -> str:
        """Return it in a line; `print` shows the sentence."""
        return f"Advice({self.sentence!r})"

    def __str__(self) -> str:
        """Return the decision in words."""
        return self.sentence


def recommend(rows: Sequence[Row], typed: TypedLine | None = None) -> list[Advice]:
    """Return one piece of advice for each workload, batch size and number of GPUs, in order.

    It is the fastest loop that keeps float32 weights, over all precisions and techniques that were measured, compared
    with the plain loop. Its commands are built from what the user typed, if that is at hand.
    """
    groups: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        spec = row.trial.spec
        groups.setdefault((spec.workload, spec.batch_size, spec.world_size), []).append(row)
    return [
        replace(item, limit=_limit(item, group), ask=_ask(item.workload, typed))
        for group in groups.values()
        for item in [_advise(group, typed)]
    ]


def _ask(workload: str, typed: TypedLine | None) -> str:
    return "castwise.why" if is_object(workload) else advised_line("why", workload, {}, typed)


def _limit(advice: Advice, rows: Sequence[Row]) -> str:
    """Return the first cause of what is taken, or of the fastest that is not; empty if none is known."""
    timed = [row for row in rows if row.trial.status == "ok" and row.throughput is not None]
    taken = [row for row in timed if row.trial.spec.key == advice.key]
    if advice.decision != "take":
        taken = [row for row in timed if row.precision not in (DEFAULT, BASELINE) and _keeps_float32_weights(row)]
    if not taken:
        return ""
    (found,) = diagnose([max(taken, key=_speed)], rows)
    if not found.causes:
        return ""
    cause, spec = found.causes[0], found.row.trial.spec
    said = f"{_name(found.row)}: {cause.evidence}"
    lines = [each.code.loader for each in rows_of([cause.technique]) if each.code is not None and each.code.loader]
    line = f"; DataLoader(..., {lines[0]})" if lines else ""
    return f"{said}. Try {try_line(cause, spec.techniques)}{line}" if spec.is_script else said


def _advise(rows: list[Row], typed: TypedLine | None) -> Advice:
    spec = rows[0].trial.spec
    setting = (spec.workload, spec.batch_size, spec.world_size)
    where = f"{spec.workload}, batch {spec.batch_size}"
    where += f" on {spec.world_size} GPUs" if spec.world_size > 1 else ""
    measured = [row for row in rows if row.trial.status == "ok" and row.throughput is not None]
    if not measured:
        why = next((row.trial.message for row in rows if row.trial.message), "")
        return Advice(*setting, "nothing", None, f"{where}: nothing to recommend. No trial ended well.", why=why)
    references = references_among(rows)
    reference = next((row for row in references if row in measured), None)
    keeping = [row for row in measured if _keeps_float32_weights(row) and row is not reference]
    if reference is None:
        keeping = [row for row in keeping if _why_not_fp8(row, is_proven=True) is None]
        return _without_reference(setting, where, references, keeping or measured, measured, typed)
    name = _reference_name(reference)
    keeping = [row for row in keeping if _why_not_fp8(row) is None]
    ratios = [(row, ratio) for row in keeping if (ratio := speedup_estimate(reference.trials, row.trials)) is not None]
    if not ratios:
        kind = " with float32 weights" if len(measured) > 1 else ""
        sentence = f"{where}: only {name} was measured{kind}: there is nothing to compare it with."
        failed = [f"{row.trial.spec.precision}: {row.trial.status}" for row in rows if row.trial.status != "ok"]
        why = ", ".join(failed) or "no other was asked for, or the time ran out (--budget gives more)"
        return Advice(*setting, "nothing", None, sentence + _caution(measured, reference), why=why)
    proven = [row for row, ratio in ratios if _is_known(ratio) and ratio.low > 1 and ratio.value >= WORTHWHILE]
    if proven:
        best = _simplest_of_the_fastest(proven)
        doubts = _doubts(reference, best)
        verb = f"{_name(best)} looks faster ({', '.join(doubts)})" if doubts else f"take {_name(best)}"
        written = reference.trial if reference.precision == AS_WRITTEN else None
        advice = replace(_take(best, setting, written), **_beside(best, reference, references, rows))
        gain = _gain(best, advice, reference)
        return replace(advice, sentence=f"{where}: {verb}. It trains {gain}.{_caution(measured, best)}")
    best, ratio = max(ratios, key=lambda pair: pair[1].value)
    may_be_faster = [
        (row, each)
        for row, each in ratios
        if (_is_open(each) or not _is_known(each)) and not is_clearly_slower(reference.trials, row.trials)
    ]
    if may_be_faster:
        return _undecided(setting, where, may_be_faster, reference, name, typed)
    found = f"{_name(best)} comes closest, at {_times(ratio)} its speed."
    if ratio.value > 1:
        found = f"{_name(best)} gains too little for a change of numerics: it trains {_times(ratio)} as fast."
    sentence = f"{where}: stay with {name}. {found}{_why_clear(best, ratio)}{_caution(measured, reference)}"
    advice = Advice(*setting, "stay", reference.trial.spec.precision, sentence, key=reference.trial.spec.key)
    why = f"{_name(best)}, the next, trains {_times(ratio)} as fast"
    beside = _beside(reference, reference, references, rows) | {"how_sure": _how_sure(reference, best)}
    return replace(advice, **(beside | {"why": why}))


def _why_not_fp8(row: Row, *, is_proven: bool = False) -> str | None:
    """Return why a row of FP8 is not taken; None if it may be, and for other precisions.

    Its products have to be good enough, and it has to be proven faster than bf16-mixed in the same loop, unless the
    caller proves that itself.
    """
    if not precision_row(row.precision).float8_recipe:
        return None
    if (reason := why_inexact(row.trials)) is not None:
        return reason
    ratio = row.bf16_estimate
    if ratio is None:
        return f"{BESIDE_FP8} was not measured in the same loop"
    if is_proven or (_is_known(ratio) and ratio.low > 1 and ratio.value >= WORTHWHILE):
        return None
    return f"not proven faster than {BESIDE_FP8} in the same loop"


def references_among(rows: Sequence[Row]) -> list[Row]:
    """Return PyTorch's default and fp32 in the simplest loop that was measured in one of them, the default first.

    A script as it is written comes before both.
    """
    plain = [row for row in rows if row.trial.spec.precision in _REFERENCES]
    if not plain:
        return []
    spec = min(plain, key=lambda row: (len(row.trial.spec.techniques), row.trial.spec.parallelism == "dp")).trial.spec
    same = [
        row
        for row in plain
        if (row.trial.spec.techniques, row.trial.spec.parallelism) == (spec.techniques, spec.parallelism)
    ]
    return sorted(same, key=lambda row: _REFERENCES.index(row.trial.spec.precision))


def _beside(best: Row, reference: Row, references: Sequence[Row], rows: Sequence[Row]) -> dict[str, Any]:
    """Return the fields of the answer that compare what is taken with the references and with all others."""
    by_name = {row.trial.spec.precision: row for row in references}
    over = {name: speedup_estimate(row.trials, best.trials) for name, row in by_name.items() if row is not best}
    memory = None
    if best.peak_allocated_bytes and reference.peak_allocated_bytes:
        memory = best.peak_allocated_bytes / reference.peak_allocated_bytes
    return {
        "over_default": over.get(DEFAULT),
        "over_fp32": over.get(BASELINE),
        "memory_ratio": memory,
        "why": _why(best, rows),
        "how_sure": _how_sure(reference, best),
    }


def _why(best: Row, rows: Sequence[Row]) -> str:
    """Return why this row and no other, in a few words: what was faster, and why it is not taken."""
    faster = [row for row in rows if row is not best and _speed(row) > _speed(best)]
    faster = [row for row in faster if _why_not_fp8(row) is None]  # the sentence says why not
    keeping = [row for row in faster if row.trial.status == "ok" and _keeps_float32_weights(row)]
    near = max((row for row in keeping if _speed(row) <= _speed(best) * WORTHWHILE), key=_speed, default=None)
    unproven = max((row for row in keeping if _speed(row) > _speed(best) * WORTHWHILE), key=_speed, default=None)
    dropping = [row for row in faster if row.trial.status == "ok" and not _keeps_float32_weights(row)]
    failed = [row for row in rows if row.trial.status in ("diverged", "oom")]
    reasons = []
    if dropping and (pure := max(dropping, key=_speed)):
        reasons.append(f"{_loop_name(pure, best)} {_percent(pure, best)}, but keeps no fp32 weights")
    if near is not None:
        reasons.append(f"{_loop_name(near, best)} {_percent(near, best)}: within 3 %, so the simpler one")
    if unproven is not None:
        reasons.append(f"{_loop_name(unproven, best)} {_percent(unproven, best)}, but not proven")
    reasons += [f"{_loop_name(row, best)} {_FAILURES[row.trial.status]}" for row in failed[:1] if not reasons]
    return "; ".join(reasons) or "the fastest"


def _loop_name(row: Row, best: Row) -> str:
    """Return a row's precision, and the techniques that the best one has not."""
    spec, techniques = row.trial.spec, best.trial.spec.techniques
    if spec.techniques == techniques:
        return spec.precision
    added = [each for each in spec.techniques if each not in techniques]
    return f"{spec.precision} with {join(added) if added else 'fewer techniques'}"


def _percent(row: Row, best: Row) -> str:
    return f"+{100 * (_speed(row) / _speed(best) - 1):.1f} %".replace(".0 %", " %")


def _how_sure(reference: Row, best: Row) -> str:
    """Return on how many processes a comparison rests, and what disturbed them."""
    fewest = min(len(reference.trials), len(best.trials))
    words = "one run" if fewest == 1 else f"{fewest} runs each"
    return ", ".join([words, *_doubts(reference, best)])


def _doubts(*rows: Row) -> list[str]:
    return doubts_of([trial for row in rows for trial in row.trials])


def doubts_of(trials: Sequence[Trial]) -> list[str]:
    """Return what disturbed the machine while these processes ran, in a word each."""
    names = {warning.name for warning in warnings_of_all(trials)}
    return [word for name, word in _DOUBTS.items() if name in names]


def _undecided(
    setting: tuple[str, int, int],
    where: str,
    candidates: Sequence[tuple[Row, Estimate]],
    reference: Row,
    reference_name: str,
    typed: TypedLine | None,
) -> Advice:
    """Return what was seen, and the command that decides it."""
    best, ratio = max(candidates, key=lambda pair: pair[1].value)
    seen = f"{_name(best)} was {_times(ratio)} as fast as {reference_name}"
    doubt = "so it may be slower or faster" if _is_known(ratio) else _NO_INTERVAL
    if format_interval(ratio.value, ratio.low, ratio.high) == TOO_NOISY:
        seen, doubt = (
            f"{_name(best)} was about {ratio.value:.2f}× as fast as {reference_name}",
            "but runs differ too much",
        )
    rows = [reference, *(row for row, _ in candidates)]
    command = _command(rows, typed)
    sentence = _undecided_sentence(where, f"{seen}, {doubt}", rows, command)
    return Advice(*setting, "undecided", None, sentence, why=seen, how_sure=_how_sure(reference, best), command=command)


def _without_reference(
    setting: tuple[str, int, int],
    where: str,
    references: Sequence[Row],
    candidates: Sequence[Row],
    measured: Sequence[Row],
    typed: TypedLine | None,
) -> Advice:
    """Return the fastest of those that could be measured, if that is proven, and why there is nothing to compare."""
    why = "neither PyTorch's default nor fp32 was measured"
    if references:
        failed = references[0].trial
        why = _WITHOUT_REFERENCE.get(failed.status, "{} was not measured").format(_reference_name(references[0]))
    elif len({row.trial.spec.precision for row in measured}) == 1:
        sentence = f"{where}: nothing to compare {_name(candidates[0])} with: {why}."
        return Advice(*setting, "nothing", None, sentence)
    among = " with float32 weights" if len(candidates) < len(measured) else ""
    fastest = max(candidates, key=_speed)
    rivals = [(row, speedup_estimate(row.trials, fastest.trials)) for row in candidates if row is not fastest]
    rest = [row for row, ratio in rivals if ratio is None or not _is_known(ratio) or _is_open(ratio)]
    how_sure = _how_sure(fastest, (rest or candidates)[0])
    if rest:
        doubt = f"but {_and(rest)} may be as fast" if all(_is_known(ratio) for _, ratio in rivals) else _NO_INTERVAL
        rows = [fastest, *rest]
        if any(precision_row(row.precision).float8_recipe for row in rows):
            rows = [row for row in candidates if row.precision == BESIDE_FP8 and row not in rows] + rows
        command = _command(rows, typed)
        seen = f"{_name(fastest)} was the fastest{among}, {doubt}; {why}"
        sentence = _undecided_sentence(where, seen, [fastest, *rest], command)
        return Advice(*setting, "undecided", None, sentence, why=seen, how_sure=how_sure, command=command)
    best = _simplest_of_the_fastest(candidates)
    rank = f"the fastest{among}" if best is fastest else f"simpler than {_name(fastest)} and hardly slower"
    if not rivals:
        is_fp8_refused = any(_why_not_fp8(row, is_proven=True) for row in measured)
        rank = f"the only one{among} that {'can be taken' if is_fp8_refused else 'trained'}"
    sentence = f"{where}: take {_name(best)}, {rank}; {why}."
    if not _keeps_float32_weights(best):
        sentence += f" It keeps no float32 weights: {_CHECK_ACCURACY}"
    sentence += _caution(measured, best)
    return replace(_take(best, setting), sentence=sentence, why=why, how_sure=how_sure)


def _take(row: Row, setting: tuple[str, int, int], written: Trial | None = None) -> Advice:
    """Return the advice to take a row's loop, with what to paste; its words are still missing.

    `written` is the trial of the script as it is written, if it is what the row is compared with.
    """
    spec, facts = row.trial.spec, row.trial.facts
    precision = precision_row(spec.precision)
    snippets: tuple[Snippet, ...] = ()
    if written is not None and written.facts is not None and written.facts.framework is not None:
        code = script_code(written, row.trial)
    else:
        techniques = spec.techniques if precision.code else ()
        code = pytorch_code(precision, spec.device_type, facts, techniques, own_calls(spec, facts))
        snippets = framework_snippets(precision, spec.device_type, facts, spec.techniques) if code else ()
    if code and spec.changed_loss_scale:
        code = f"# Measured with the loss scale {spec.loss_scale}; this is {precision.loss_scale} loss scaling.\n{code}"
    return Advice(*setting, "take", spec.precision, "", spec.techniques, code=code, key=spec.key, snippets=snippets)


def _simplest_of_the_fastest(rows: Sequence[Row]) -> Row:
    """Return the fastest row, or of those hardly slower the one that changes the loop least."""
    fastest = max(_speed(row) for row in rows)
    near = [row for row in rows if _speed(row) * WORTHWHILE >= fastest]

    def changes(row: Row) -> tuple[int, int, int, float]:
        # Of loops as simple as each other the one that was measured most: the fastest of many is so by luck.
        spec = row.trial.spec
        return len(spec.techniques), precision_row(spec.precision).loop_changes, -len(row.trials), -_speed(row)

    return min(near, key=changes)


def _gain(row: Row, advice: Advice, reference: Row) -> str:
    """Return how much faster a row is than the reference and than fp32, and in how much memory."""
    over = speedup_estimate(reference.trials, row.trials)
    words = f"{_times(over)} as fast as {_reference_name(reference)}" if over is not None else ""
    if reference.trial.spec.precision != BASELINE and advice.over_fp32 is not None:
        words += f" ({advice.over_fp32.value:.2f}× as fast as fp32)"
    if (memory := advice.memory_ratio) is not None:
        words += ", in the same memory" if 0.995 <= memory < 1.005 else f", in {memory:.2f}× the memory"
    if row.skipped_steps:
        words += f"; loss scaling skipped {row.skipped_steps} step{'s' if row.skipped_steps > 1 else ''}"
    return words


def _caution(measured: Sequence[Row], best: Row) -> str:
    """Return sentences about FP8 that is not taken, and about what was faster and keeps no float32 weights."""
    refused = [(row, why) for row in measured if row is not best and (why := _why_not_fp8(row))]
    said = f" Not taken: {'; '.join(f'{_name(row)} ({why})' for row, why in refused)}." if refused else ""
    faster = [row for row in measured if not _keeps_float32_weights(row) and _speed(row) > _speed(best) * WORTHWHILE]
    if not faster or not _keeps_float32_weights(best):
        return said
    names = _and(faster, lambda row: f" ({_speed(row) / _speed(best):.2f}×)")
    verbs = "was faster but keeps" if len(faster) == 1 else "were faster but keep"
    return f"{said} {names} {verbs} no float32 weights: {_CHECK_ACCURACY}"


def _is_known(ratio: Estimate | None) -> bool:
    return ratio is not None and math.isfinite(ratio.half_width)


def _is_open(ratio: Estimate) -> bool:
    """Return whether a speed-up may be worthwhile, and may be none."""
    return ratio.low <= 1 and ratio.high >= WORTHWHILE


def is_clearly_slower(baselines: Sequence[Trial], trials: Sequence[Trial]) -> bool:
    """Return whether one process shows that a configuration is slower, and no other one says that it is faster."""
    alone = [(trial, each.value) for trial in trials if (each := speedup_estimate(baselines, [trial])) is not None]

    def is_enough(trial: Trial, ratio: float) -> bool:
        has_doubts = any(warning.name in _DOUBTS for warning in warnings_of_all([trial]))
        return ratio <= (1.0 if _is_emulated(trial) else _HOPELESS_WITH_DOUBTS if has_doubts else _HOPELESS)

    return all(ratio <= 1 for _, ratio in alone) and any(is_enough(*each) for each in alone)


def _is_emulated(trial: Trial) -> bool:
    return why_emulated(precision_row(trial.spec.precision), trial.environment.hardware) is not None


def _times(ratio: Estimate) -> str:
    """Return a speed-up with its interval: `1.37× [1.35, 1.39]`."""
    return with_interval(f"{ratio.value:.2f}×", format_interval(ratio.value, ratio.low, ratio.high))


def _name(row: Row) -> str:
    """Return the precision, with the loss scale if it is not the precision's own, and the techniques."""
    spec = row.trial.spec
    precision = precision_row(spec.precision)
    name = spec.precision
    if precision.code and spec.changed_loss_scale:
        name += f" with loss scale {spec.loss_scale}"
    if spec.parallelism not in ("none", "ddp"):
        name += f" ({spec.parallelism})"
    return f"{name} with {', '.join(spec.techniques)}" if spec.techniques else name


def _reference_name(row: Row) -> str:
    if row.trial.spec.precision in REFERENCE_WORDS:
        return REFERENCE_WORDS[row.trial.spec.precision]
    is_default = is_same_as_fp32(find_precision(DEFAULT), row.trial.environment.hardware)
    return "fp32 (PyTorch's default here)" if is_default else "fp32"


def _and(rows: Sequence[Row], addition: Callable[[Row], str] = lambda _: "") -> str:
    """Return the rows' precisions as a list in words, each with an addition."""
    *others, last = (_name(row) + addition(row) for row in rows)
    return f"{', '.join(others)} and {last}" if others else last


def _undecided_sentence(where: str, seen: str, rows: Sequence[Row], command: str) -> str:
    """Return what was seen and what decides; on a busy CPU nothing does before other programs end.

    Without a command nothing decides.
    """
    if not command:
        many = f"after {min(len(row.trials) for row in rows)} rounds"
        return f"{where}: undecided. {seen}. This machine is too noisy to tell them apart {many}."
    warnings = (each for row in rows for each in warnings_of_all(row.trials))
    busy = next((each.brief for each in warnings if each.name == "cpu-starved"), None)
    if busy is None:
        return f"{where}: undecided. {seen}. More rounds decide: {command}"
    return f"{where}: undecided. {seen}. Other programs use the CPU ({busy}). Stop them, then run: {command}"


def _why_clear(row: Row, ratio: Estimate) -> str:
    """Return why a ratio is enough to stay although its interval is not, or there is none; empty if the interval is."""
    if _is_known(ratio) and not _is_open(ratio):
        return ""
    if _is_emulated(row.trial):
        return " It is emulated here, and one run shows that it is slower."
    return " At half the speed or less, one run is enough."


def _command(rows: Sequence[Row], typed: TypedLine | None) -> str:
    """Return what measures rows more closely: a command, or of a Python session's objects the call.

    It is empty if it would measure nothing, as they had the most rounds.
    """
    if min(len(row.trials) for row in rows) >= MOST_ROUNDS:
        return ""
    specs = [row.trial.spec for row in rows]
    spec = specs[0]
    # A loss scale goes to the precisions that scale their loss; if none does, to all.
    scaling = [each for each in specs if precision_row(each.precision).loss_scale != "none"] or specs
    options: dict[str, str | int] = {
        "precision": ",".join(dict.fromkeys(each.precision for each in specs)),
        "batch_size": spec.batch_size,
    }
    if any(each.changed_loss_scale for each in scaling):
        options["loss_scale"] = ",".join(dict.fromkeys(each.loss_scale for each in scaling))
    if any(each.techniques for each in specs):
        options["techniques"] = ",".join(dict.fromkeys(join(each.techniques) for each in specs))
    options |= {"gpus": spec.world_size} if spec.world_size > 1 else {}
    options |= {"nodes_per_trial": spec.num_nodes} if spec.num_nodes > 1 else {}
    options |= {"parallelism": spec.parallelism} if spec.parallelism not in ("none", "ddp") else {}
    options |= {"device": spec.device} if spec.device != "cuda:0" else {}
    options |= {"data_set": spec.data_set} if spec.data_set != SYNTHETIC and spec.user_model is None else {}
    options |= {"seed": spec.seed} if spec.seed else {}
    options["within"] = "1%"
    if is_object(spec.workload):
        written = (f"{name}={json.dumps(value)}" for name, value in options.items())
        return f"castwise.compare(..., {', '.join(written)})"
    script = spec.user_model if spec.is_script else None
    if script is not None:
        asked = {"steps": spec.protocol.num_steps, "units_per_step": script.units_per_step, "unit": script.unit}
        options = {name: options[name] for name in ("precision", "techniques", "within") if name in options}
        options |= {name: value for name, value in asked.items() if value is not None}
    return advised_line("run", spec.workload, options, typed)


def _keeps_float32_weights(row: Row) -> bool:
    return precision_row(row.trial.spec.precision).keeps_float32_weights


def _speed(row: Row) -> float:
    return row.throughput or 0.0
