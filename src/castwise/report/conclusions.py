"""The conclusions from a collection of records: an answer for each setting in it, their table, and a title for all."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from castwise.accuracy.advice import UNTESTED, with_accuracy
from castwise.analysis.advice import WORTHWHILE, Advice, Decision, recommend
from castwise.analysis.result_table import Row
from castwise.analysis.statistics import Estimate
from castwise.analysis.training_metrics import data_share, epochs_of, is_whole, length_in_words, perplexity
from castwise.max_batch.result import max_batches_of
from castwise.records.schema import Epoch, Trial
from castwise.registry.datasets import imitated_data_set
from castwise.registry.precisions import BASELINE, DEFAULT, precision_row
from castwise.registry.suites import is_search
from castwise.report.collection import Collection, ComparisonGroup
from castwise.report.machine_names import short_name
from castwise.show.fields import Field, FlatRow, estimate_values, find_field, interval_text, worth_showing
from castwise.show.table import DataTable
from castwise.show.units import format_ratio, pluralize
from castwise.spec.quantities import format_interval, truncate_list, with_interval
from castwise.spec.trial import TrialSpec

_WAITS = 0.5  # of the training time; a run that waits longer for its data says little about precisions
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
    spec: TrialSpec  # of the configuration that the answer is based on, or of another one of the same setting
    config: Row | None  # that the answer is based on; None without a precision
    reference: Row | None  # what the others are compared with: PyTorch's default, or else fp32
    configurations: Sequence[Row] = ()  # of the same batch size and GPUs
    cut: str = ""  # how training runs were cut short, in words; empty for whole runs and for steady state

    @property
    def speedup(self) -> float | None:
        """Return the speed-up of what to take over the reference; None for the reference itself."""
        found = self.advice.over_default or self.advice.over_fp32
        return found.value if found is not None else None

    @property
    def setting(self) -> str:
        """Return batch size and GPUs in words."""
        return ", ".join(part for part in (f"batch {self.spec.batch_size}", self.spec.world_size_label) if part)


def answers_of(collection: Collection) -> list[Answer]:
    """Return the answers of all groups, in order; searches for the largest batch have none."""
    answers: list[Answer] = []
    for group in collection.groups:
        if group.is_max_batch or is_search(group.first.spec):
            continue
        found = _answers_of_runs(group) if group.is_training else _answers_of_steady_state(group)
        answers += [_judged(each, collection.trials) for each in found]
    return answers


def _judged(answer: Answer, trials: Sequence[Trial]) -> Answer:
    """Return an answer that says whether it trains as well; of training runs the fastest that does, if one does."""
    (advice,) = with_accuracy([answer.advice], trials)
    answer = replace(answer, advice=advice)
    if answer.group.is_training and advice.is_less_accurate:
        others = [config for config in answer.configurations if config is not answer.config]
        slower = _answer_of_runs(answer.group, others, "the fastest that is no less accurate")
        if slower is not None and slower.advice.decision == "take":
            slower = _judged(slower, trials)
            if not slower.advice.is_less_accurate:
                return replace(slower, configurations=answer.configurations)
    return answer


def headline(collection: Collection, answers: Sequence[Answer]) -> str:
    """Return all answers in a line, the title of a report: what trains how many times as fast, on what."""
    if not answers:
        largest: dict[str, list[str]] = {}  # batches, by workload
        for each in max_batches_of(collection.trials):
            loop = ", ".join((each.spec.precision, *each.spec.techniques))
            size = "none" if each.largest is None else f"{each.largest.spec.batch_size:,}"
            largest.setdefault(each.spec.workload, []).append(f"{size} in {loop}")
        named = [f"{name} {', '.join(sizes)}" for name, sizes in largest.items()][:_MAX_NAMES]
        return f"Largest batches that train: {'; '.join(named)}" if named else "No trial was measured"
    devices = list(dict.fromkeys(short_name(machine.device_name) for machine in collection.machines.values()))
    where = " on " + truncate_list(devices, most=_MAX_NAMES)
    models = list(dict.fromkeys(answer.spec.workload for answer in answers))
    best = ranked(answers)[0]
    if len(models) == 1:
        more = f"; {pluralize(len(answers) - 1, 'more setting')} below" if len(answers) > 1 else ""
        batch = f", batch {best.spec.batch_size}" if more else ""
        return f"{models[0]}{batch}{where}: {_outcome(best)}{more}"
    what = f"{len(models)} models" + (f" in {len(answers)} settings" if len(answers) > len(models) else "")
    taken = [each for each in answers if each.advice.decision == "take" and each.speedup is not None]
    whole, cut = ([each for each in taken if bool(each.cut) is is_cut] for is_cut in (False, True))
    over = " or ".join(dict.fromkeys(_name(each.reference.precision) for each in whole or cut if each.reference))
    parts = [f"{len(whole)} train faster than {over}, {_span(whole)}"] if whole else []
    if cut:
        parts.append(f"{len(cut)} faster than {over} in runs cut short, {_span(cut)}")
    rest = Counter(WORDS[a.advice.decision] for a in answers if a.advice.decision != "take" or a.speedup is None)
    parts += [f"{rest[word]} {word}" for word in WORDS.values() if rest[word]]
    return f"{what}{where}: {'; '.join(parts)}"


def _span(answers: Sequence[Answer]) -> str:
    gains = sorted(each.speedup for each in answers if each.speedup is not None)
    return " to ".join(dict.fromkeys(f"{gain:.2f}×" for gain in (gains[0], gains[-1])))


def ranked(answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers as a reader wants them: the largest gain first, what is no recommendation last."""
    ranks: tuple[Decision, ...] = ("take", "stay", "undecided", "nothing")
    return sorted(answers, key=lambda a: (ranks.index(a.advice.decision), bool(a.cut), -(a.speedup or 0.0)))


def _outcome(answer: Answer) -> str:
    """Return what to do in a few words."""
    advice, loop = answer.advice, loop_of(answer)
    if advice.decision == "nothing":
        return "nothing to compare"
    if loop is None:
        return f"undecided, {advice.why}"
    if advice.decision == "stay":
        return f"stay with {_name(loop)}"
    gain = ""
    if answer.speedup is not None and answer.reference is not None:
        gain = f", {answer.speedup:.2f}× as fast as {_name(answer.reference.precision)}"
    if advice.is_less_accurate:
        gain += ", if its lower accuracy will do"
    return f"{loop} was the fastest in runs cut short{gain}" if answer.cut else f"take {loop}{gain}"


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
                "take": f"({take})" if answer.cut else take,
                **estimate_values("default_speedup", advice.over_default),
                **estimate_values("speedup", advice.over_fp32),
                "memory_ratio": advice.memory_ratio,
                "why": advice.why,
                "how_sure": f"cut short: {answer.cut}" if answer.cut else how_sure,
            }
        )
    fields = [
        find_field("workload"),
        Field("setting", "setting"),
        Field("take", "take", wraps=True),
        Field("default_speedup", "× default", "ratio", interval_text("default_speedup")),
        Field("speedup", "× fp32", "ratio", interval_text("speedup")),
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
    return "PyTorch's default" if precision == DEFAULT else precision or ""


def _answers_of_steady_state(group: ComparisonGroup) -> list[Answer]:
    """Return the answers, without those for the half batches that a search measures to find what bounds a loop."""
    answers = []
    decided: dict[tuple[int, int], set[tuple[object, ...]]] = {}  # loops, by batch size and GPUs
    for advice in recommend(group.configurations):
        setting = (advice.batch_size, advice.num_gpus)
        own = [c for c in group.configurations if (c.trial.spec.batch_size, c.trial.spec.world_size) == setting]
        based_on = next((each for each in own if each.trial.spec.key == advice.key), None)
        ended = {each.precision: each for each in own if each.trial.status == "ok" and not each.trial.spec.techniques}
        reference = ended.get(DEFAULT) or ended.get(BASELINE)
        answers.append(Answer(group, advice, (based_on or own[0]).trial.spec, based_on, reference, own))
        if advice.decision in ("take", "stay"):
            decided[setting] = {(each.precision, each.trial.spec.techniques) for each in own}

    def is_probe(answer: Answer) -> bool:
        loops = {(each.precision, each.trial.spec.techniques) for each in answer.configurations}
        is_once = all(len(each.trials) == 1 for each in answer.configurations)
        return is_once and loops <= decided.get((2 * answer.spec.batch_size, answer.spec.world_size), set())

    return [each for each in answers if not is_probe(each)]


def _answers_of_runs(group: ComparisonGroup) -> list[Answer]:
    """Return the answers from training runs; their times include data loading and validation."""
    settings: dict[tuple[object, ...], list[Row]] = {}
    for config in group.over_seeds.configurations:
        spec = config.trial.spec
        settings.setdefault((spec.batch_size, spec.world_size, spec.parallelism), []).append(config)
    return [answer for own in settings.values() if (answer := _answer_of_runs(group, own)) is not None]


def _answer_of_runs(
    group: ComparisonGroup, configurations: Sequence[Row], fastest: str = "the fastest"
) -> Answer | None:
    """Return the answer of a setting: the best that keeps float32 weights, compared with fp32 in the plain loop.

    `fastest` says in words what the best is among all configurations of the setting.
    """
    ended = [config for config in configurations if config.trial.status == "ok" and config.speedup is not None]
    plain = [config for config in ended if config.precision == BASELINE]
    others = [config for config in ended if config.precision != BASELINE]
    safe = [config for config in others if precision_row(config.precision).keeps_float32_weights]
    if not plain or not safe:
        return None
    baseline = min(plain, key=lambda config: len(config.trial.spec.techniques))
    best = max(safe, key=lambda config: config.throughput or 0.0)
    spec = best.trial.spec
    over = best.speedup_estimate or Estimate(math.nan, math.nan, math.nan, 1)
    if spec.techniques != baseline.trial.spec.techniques:
        over = Estimate((best.throughput or 0.0) / (baseline.throughput or 0.0), math.nan, math.nan, 1)
    speedup = over.value
    count = min(len(best.trials), len(baseline.trials))
    how_sure = f"{count} runs" if count > 1 else "one run"
    cut = next((length_in_words(config.trial) for config in (best, baseline) if not is_whole(config.trial)), "")
    in_cut_runs = f" in runs that were cut short ({cut}), so that their end is unknown" if cut else ""
    spread = f" on {spec.world_size_label}" if spec.world_size_label else ""
    loop = f" with {', '.join(spec.techniques)}" if spec.techniques else ""
    setting = f"{group.title}, batch {spec.batch_size}{spread}"
    words = (spec.workload, spec.batch_size, spec.world_size)
    memory = None
    if best.peak_allocated_bytes and baseline.peak_allocated_bytes:
        memory = best.peak_allocated_bytes / baseline.peak_allocated_bytes
    waiting = data_share(best.trial) or 0.0
    why = f"waits for data {100 * waiting:.0f} % of the time" if waiting >= _WAITS else fastest
    if speedup < WORTHWHILE or over.low <= 1:  # without an interval, of one run, the figure counts
        faster = [c for c in others if (c.throughput or 0.0) > (best.throughput or 0.0)]
        among = " of those that keep float32 weights" if faster else ""
        comes = f"{best.precision}{loop} comes closest{among}, at {speedup:.2f} times its speed{in_cut_runs}."
        if speedup >= WORTHWHILE:
            figure = with_interval(format_ratio(speedup), format_interval(speedup, over.low, over.high))
            comes = f"{best.precision}{loop} trains {figure} as fast{in_cut_runs}, which may be chance."
        sentence = f"{setting}: stay with fp32. {comes}"
        if waiting < _WAITS:
            chance = ", perhaps by chance" if speedup >= WORTHWHILE else ""
            why = f"{best.precision}, the next, trains {speedup:.2f}× as fast{chance}"
        advice = Advice(*words, "stay", BASELINE, sentence, why=why, how_sure=how_sure)
        return Answer(group, advice, baseline.trial.spec, baseline, baseline, configurations, cut)
    trains = f"trains {speedup:.2f} times as fast as fp32{_learned(best, baseline)}{in_cut_runs}."
    scale = spec.changed_loss_scale and f" with loss scale {spec.changed_loss_scale}"
    name = f"{best.precision}{scale}{loop}"
    sentence = f"{setting}: {name} {trains}" if cut else f"{setting}: take {name}. It {trains}"
    advice = Advice(
        *words,
        "take",
        best.precision,
        sentence,
        spec.techniques,
        over_fp32=over,
        memory_ratio=memory,
        why=why,
        how_sure=how_sure,
        key=spec.key,
    )
    return Answer(group, advice, spec, best, baseline, configurations, cut)


def _learned(best: Row, baseline: Row) -> str:
    """Return what both reached, in the mean of their runs, after as many epochs; empty if their data is made up."""
    sides = [[epochs_of(trial) for trial in config.trials] for config in (best, baseline)]
    done = min(len(epochs) for side in sides for epochs in side)
    if not done or imitated_data_set(best.trial.spec.data_set) is not None:
        return ""
    measures: tuple[tuple[Callable[[Epoch], float | None], str], ...] = (
        (
            lambda epoch: None if epoch.accuracy is None else 100 * epoch.accuracy,
            "{:.1f} % accuracy compared with {:.1f} %",
        ),
        (perplexity, "perplexity {:.4g} compared with {:.4g}"),
        (lambda epoch: epoch.score, "a score of {:.4g} compared with {:.4g}"),
    )
    for value, text in measures:
        known = [[v for epochs in side if (v := value(epochs[done - 1])) is not None] for side in sides]
        if all(known):
            reached = text.format(*map(statistics.fmean, known))
            return f", at {reached} after {done} epoch{'s' if done > 1 else ''}"
    return ""
