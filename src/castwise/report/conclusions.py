"""The conclusions from a collection of records: an answer for each setting in it, their table, and a title for all."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from castwise.accuracy.advice import UNTESTED, with_accuracy
from castwise.analysis.decide import Advice, Decision, decide
from castwise.analysis.result_table import Row
from castwise.max_batch.result import max_batches_of
from castwise.registry.gpus import short_device_name
from castwise.registry.precisions import REFERENCE_WORDS, precision_row
from castwise.registry.suites import is_search
from castwise.report.collection import Collection, ComparisonGroup
from castwise.show.fields import Field, FlatRow, estimate_values, find_field, worth_showing
from castwise.show.table import DataTable
from castwise.show.units import pluralize
from castwise.spec.quantities import truncate_list

_MAX_NAMES = 4  # of workloads or devices in the title
# What an answer says where no precision is named.
WORDS: dict[Decision, str] = {
    "stay": "stay as is",
    "undecided": "undecided",
    "nothing": "not compared",
    "take": "without reference",
}


@dataclass(frozen=True)
class Answer:
    """What to take in a comparison group, at one batch size and number of GPUs."""

    group: ComparisonGroup
    advice: Advice

    @property
    def setting(self) -> str:
        spec = self.advice.rows[0].trial.spec
        return ", ".join(part for part in (f"batch {spec.batch_size}", spec.world_size_label) if part)


def answers_of(collection: Collection) -> list[Answer]:
    """Return the answers of all groups, in order; searches for the largest batch have none."""
    judge = partial(with_accuracy, trials=collection.trials)
    answers: list[Answer] = []
    for group in collection.groups:
        if group.is_max_batch or is_search(group.first.spec):
            continue
        found = decide(group.over_seeds.configurations, judge=judge)
        for advice in found:
            is_alone = advice.reference is None or advice.decision == "nothing"  # of runs it says nothing of precisions
            if not (is_alone if group.is_training else _is_probe(advice, found)):
                answers.append(Answer(group, advice))
    return answers


def _is_probe(advice: Advice, others: Sequence[Advice]) -> bool:
    """Return whether it is about the half batch that a search measures once to find what bounds a loop."""

    def loops(rows: Sequence[Row]) -> set[tuple[object, ...]]:
        return {(row.precision, row.techniques) for row in rows}

    return all(len(row.trials) == 1 for row in advice.rows) and any(
        (other.batch_size, other.num_gpus) == (2 * advice.batch_size, advice.num_gpus)
        and other.decision in ("take", "stay")
        and any(len(row.trials) > 1 for row in other.rows)
        and loops(advice.rows) <= loops(other.rows)
        for other in others
    )


def headline(collection: Collection, answers: Sequence[Answer]) -> str:
    """Return all answers in a line, the title of a report: what trains how many times as fast, on what."""
    if not answers:
        return _largest_batches(collection)
    devices = list(dict.fromkeys(short_device_name(machine.device_name) for machine in collection.machines.values()))
    where = " on " + truncate_list(devices, most=_MAX_NAMES)
    models = list(dict.fromkeys(answer.advice.workload for answer in answers))
    if len(models) == 1:
        best = ranked(answers)[0]
        more = f"; {pluralize(len(answers) - 1, 'more setting')} below" if len(answers) > 1 else ""
        batch = f", batch {best.advice.batch_size}" if more else ""
        return f"{models[0]}{batch}{where}: {outcome_of(best)}{more}"
    what = f"{len(models)} models" + (f" in {len(answers)} settings" if len(answers) > len(models) else "")
    return f"{what}{where}: {_counts([answer.advice for answer in answers])}"


def _counts(advice: Sequence[Advice]) -> str:
    """Return how many answers are to take what is faster, by how much, and how many are none."""
    faster = [each for each in advice if each.decision == "take" and each.speedup is not None]
    parts = []
    for own, form in (
        ([each for each in faster if not each.cut], "{} train{} faster{}, {}"),
        ([each for each in faster if each.cut], "{} train{} faster{} in runs cut short, {}"),
    ):
        gains = sorted(each.speedup or 0.0 for each in own)
        names = list(dict.fromkeys(_name(each.reference.precision) for each in own if each.reference))
        over = f" than {names[0]}" if len(names) == 1 else ""  # the table has each
        span = " to ".join(dict.fromkeys(f"{gain:.2f}×" for gain in (gains[:1] + gains[-1:])))
        parts += [form.format(len(own), "s" * (len(own) == 1), over, span)] if own else []
    rest = Counter(WORDS[each.decision] for each in advice if each not in faster)
    parts += [f"{rest[word]} {word}" for word in WORDS.values() if rest[word]]
    return "; ".join(parts)


def _largest_batches(collection: Collection) -> str:
    largest: dict[str, list[str]] = {}  # batches, by workload
    for each in max_batches_of(collection.trials):
        loop = ", ".join((each.spec.precision, *each.spec.techniques))
        largest.setdefault(each.spec.workload, []).append(f"{each.words} in {loop}")
    named = [f"{name} {', '.join(sizes)}" for name, sizes in largest.items()][:_MAX_NAMES]
    return f"Largest batches that train: {'; '.join(named)}" if named else "No trial was measured"


def ranked(answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers as a reader wants them: the largest gain first, what is no recommendation last."""
    ranks: tuple[Decision, ...] = ("take", "stay", "undecided", "nothing")
    return sorted(
        answers, key=lambda a: (ranks.index(a.advice.decision), bool(a.advice.cut), -(a.advice.speedup or 0.0))
    )


def simplest_of(advice: Advice) -> tuple[Row, float] | None:
    """Return the fastest in plain autocast with its speed-up, if it is proven faster; None if it is taken."""
    reference = advice.reference
    plain = [row for row in advice.rows if precision_row(row.precision).autocast_dtype and not row.techniques]
    if reference is None or advice.row in plain or reference.trial.spec.is_script:
        return None
    gains = [(row, over) for row in plain if row.trial.status == "ok" and (over := row.over(reference)) is not None]
    proven = [(row, over.value) for row, over in gains if over.low > 1]
    return max(proven, key=lambda pair: pair[1], default=None)


def outcome_of(answer: Answer) -> str:
    """Return an answer in words, without its workload."""
    advice, loop = answer.advice, loop_of(answer)
    if advice.decision == "nothing":
        return "nothing to compare"
    if loop is None:
        return f"undecided, {advice.why}"
    if advice.decision == "stay":
        return f"stay with {_name(loop)}"
    gain = ""
    if advice.speedup is not None and advice.reference is not None:
        gain = f", {advice.speedup:.2f}× as fast as {_name(advice.reference.precision)}{advice.same_loop}"
    if advice.is_less_accurate:
        gain += ", if its lower accuracy will do"
    return f"{loop} was the fastest in runs cut short{gain}" if advice.cut else f"take {loop}{gain}"


def answer_table(answers: Sequence[Answer]) -> DataTable[FlatRow]:
    """Return the table of what to take for which workload; what is no recommendation is in brackets."""
    rows: list[FlatRow] = []
    for answer in ranked(answers):
        advice = answer.advice
        take = _name(loop_of(answer)) or WORDS[advice.decision]
        accuracy = advice.accuracy.partition(":")[0]
        how_sure = advice.how_sure + (f"; accuracy {accuracy}" if accuracy and accuracy != UNTESTED else "")
        rows.append(
            {
                "workload": answer.group.title,
                "setting": answer.setting,
                "take": f"({take})" if advice.cut else take,
                **estimate_values("written_speedup", advice.over_written),
                **estimate_values("default_speedup", advice.over_default),
                **estimate_values("speedup", advice.over_fp32),
                "memory_ratio": advice.memory_ratio,
                "why": advice.why,
                "how_sure": f"cut short: {advice.cut}" if advice.cut else how_sure,
            }
        )
    fields = [
        find_field("workload"),
        Field("setting", "setting"),
        Field("take", "take", wraps=True),
        find_field("written_speedup", "× written"),
        find_field("default_speedup", "× default"),
        find_field("speedup", "× fp32"),
        find_field("memory_ratio", "memory"),
        Field("why", "why", wraps=True),
        Field("how_sure", "how sure", wraps=True),
    ]
    return DataTable(worth_showing(fields, rows, always=("workload", "setting", "take", "why", "how_sure")), rows)


def loop_of(answer: Answer) -> str | None:
    """Return the precision to take, with the number of techniques of its loop: "fp16-master with 6 techniques"."""
    techniques = answer.advice.techniques
    what = f"{len(techniques)} techniques" if len(techniques) > 1 else "".join(techniques)
    return f"{answer.advice.precision} with {what}" if what else answer.advice.precision


def _name(precision: str | None) -> str:
    return REFERENCE_WORDS.get(precision or "", precision or "")
