"""The conclusions from a collection of records: a sentence for each comparison in it, and one for all."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from castwise.analysis.advice import WORTHWHILE, Advice, Decision, recommend
from castwise.analysis.statistics import Estimate
from castwise.analysis.training_metrics import data_share, epochs_of, is_whole, length_in_words, perplexity
from castwise.max_batch.result import max_batches_of
from castwise.registry.datasets import imitated_data_set
from castwise.registry.precisions import BASELINE, DEFAULT, precision_row
from castwise.registry.suites import is_search
from castwise.report.collection import Collection, ComparisonGroup, Configuration, value_of
from castwise.spec.quantities import truncate_list
from castwise.spec.trial import TrialSpec

_WAITS = 0.5  # of the training time; a run that waits longer for its data says little about precisions
_MAX_NAMES = 4  # of workloads or devices in the sentence for all


@dataclass(frozen=True)
class Answer:
    """What to take in a comparison group, at one batch size and number of GPUs."""

    group: ComparisonGroup
    advice: Advice
    spec: TrialSpec  # of the configuration that the answer is based on, or of another one of the same setting
    config: Configuration | None  # that the answer is based on; None without a precision
    reference: Configuration | None  # what the others are compared with: PyTorch's default, or else fp32
    cut: str = ""  # how training runs were cut short, in words; empty for whole runs and for steady state

    @property
    def speedup(self) -> float | None:
        """Return the speed-up of what to take over the reference; None for the reference itself."""
        found = self.advice.over_default or self.advice.over_fp32
        return found.value if found is not None else None


def answers_of(collection: Collection) -> list[Answer]:
    """Return the answers of all groups, in order; searches for the largest batch have none."""
    answers: list[Answer] = []
    for group in collection.groups:
        if group.is_max_batch or is_search(group.first.spec):
            continue
        answers += _answers_of_runs(group) if group.is_training else _answers_of_steady_state(group)
    return answers


def in_one_sentence(collection: Collection, answers: Sequence[Answer]) -> str:
    """Return all answers in one sentence."""
    if not answers:
        return _largest_batches(collection) or "No trial was measured."
    if len(answers) == 1:
        return answers[0].advice.sentence
    devices = list(dict.fromkeys(machine.device_name for machine in collection.machines.values()))
    where = "On " + ", ".join(devices[:_MAX_NAMES]) + (" and others" if len(devices) > _MAX_NAMES else "")
    # Steady state is preferred to training runs, which more than the precision slows down, and answers with a reference
    # to those without.
    preferred = [each for each in answers if not each.group.is_training] or list(answers)
    preferred = [each for each in preferred if each.reference is not None] or preferred
    clauses: dict[tuple[Decision, str | None, str, bool], list[Answer]] = {}
    for answer in preferred:
        if answer.advice.decision != "nothing":
            over = answer.reference.precision if answer.reference is not None else ""
            clauses.setdefault((answer.advice.decision, loop_of(answer), over, bool(answer.cut)), []).append(answer)
    if not clauses:
        return f"{where} nothing can be recommended: nothing that can be compared ended well."
    ranks = ("take", "stay", "undecided")

    def order(own: list[Answer]) -> tuple[bool, int, float]:
        gain = max((each.speedup or 0.0 for each in own), default=0.0)
        return bool(own[0].cut), ranks.index(own[0].advice.decision), -gain

    ordered = sorted(clauses.values(), key=order)
    workloads = [name for own in ordered for name in {each.spec.workload for each in own}]
    ambiguous = {name for name in workloads if workloads.count(name) > 1}
    return f"{where}: " + "; ".join(_clause(own, ambiguous) for own in ordered) + "."


def _largest_batches(collection: Collection) -> str:
    """Return the largest batches found, by workload; empty if none was searched for."""
    found: dict[str, list[str]] = {}
    for each in max_batches_of(collection.trials):
        loop = ", ".join((each.spec.precision, *each.spec.techniques))
        size = "none" if each.largest is None else f"{each.largest.spec.batch_size:,}"
        found.setdefault(each.spec.workload, []).append(f"{loop}: {size}")
    named = [f"{name}: {'; '.join(sizes)}" for name, sizes in found.items()][:_MAX_NAMES]
    return f"Largest batches that train. {'. '.join(named)}." if named else ""


def _clause(answers: Sequence[Answer], ambiguous: set[str]) -> str:
    """Return the clause for equal answers; ambiguous workloads, with several answers, name their setting."""
    by_workload: dict[str, list[Answer]] = {}
    for each in answers:
        by_workload.setdefault(each.spec.workload, []).append(each)
    names = []
    for name, own in by_workload.items():
        spec, setting = own[0].spec, ""
        if name in ambiguous and len(own) > 1:
            setting = f" in {len(own)} settings"
        elif name in ambiguous:
            setting = f" at batch {spec.batch_size}" + (f" on {spec.world_size_label}" if spec.world_size_label else "")
        names.append(name + setting)
    where = truncate_list(names, most=_MAX_NAMES if len(names) <= _MAX_NAMES else _MAX_NAMES - 1)  # never "and 1 more"
    decision, precision, is_cut = answers[0].advice.decision, loop_of(answers[0]), bool(answers[0].cut)  # all the same
    if decision == "undecided":
        return f"undecided for {where}"
    if decision == "stay":
        stay = f"in runs cut short no precision was worth leaving {_name(precision)}, in" if is_cut else ""
        return f"{stay or f'stay with {_name(precision)} for'} {where}"
    clause = f"in runs cut short {precision} was the fastest for {where}" if is_cut else f"take {precision} for {where}"
    speedups = sorted(each.speedup for each in answers if each.speedup is not None)
    reference = answers[0].reference
    if not speedups or reference is None:
        return clause
    span = " to ".join(dict.fromkeys((f"{speedups[0]:.2f}", f"{speedups[-1]:.2f}")))
    return f"{clause} ({span} times as fast as {_name(reference.precision)})"


def loop_of(answer: Answer) -> str | None:
    """Return the precision to take, with the number of techniques of its loop: "fp16-master with 6 techniques"."""
    techniques = answer.advice.techniques
    if not techniques:
        return answer.advice.precision
    return (
        f"{answer.advice.precision} with {techniques[0] if len(techniques) == 1 else f'{len(techniques)} techniques'}"
    )


def _name(precision: str | None) -> str:
    return "PyTorch's default" if precision == DEFAULT else precision or ""


def _answers_of_steady_state(group: ComparisonGroup) -> Iterator[Answer]:
    for advice in recommend(group.rows):
        own = [
            config
            for config in group.configurations
            if (config.trial.spec.batch_size, config.trial.spec.world_size) == (advice.batch_size, advice.num_gpus)
        ]
        based_on = next((each for each in own if each.trial.spec.key == advice.key), None)
        ended = {each.precision: each for each in own if each.trial.status == "ok" and not each.trial.spec.techniques}
        reference = ended.get(DEFAULT) or ended.get(BASELINE)
        yield Answer(group, advice, (based_on or own[0]).trial.spec, based_on, reference)


def _answers_of_runs(group: ComparisonGroup) -> Iterator[Answer]:
    """Yield the answers from training runs; their times include data loading and validation."""
    settings: dict[tuple[object, ...], list[Configuration]] = {}
    for config in group.configurations:
        spec = config.trial.spec
        settings.setdefault((spec.batch_size, spec.world_size, spec.parallelism, spec.seed), []).append(config)
    for configurations in settings.values():
        ended = [config for config in configurations if config.trial.status == "ok" and config.speedup is not None]
        plain = [config for config in ended if config.precision == BASELINE]
        baseline = min(plain, key=lambda config: len(config.trial.spec.techniques), default=None)
        others = [config for config in ended if config.precision != BASELINE]
        safe = [config for config in others if precision_row(config.precision).keeps_float32_weights]
        if baseline is not None and safe:
            yield _answer_of_runs(group, baseline, max(safe, key=lambda c: value_of(c.throughput)), others)


def _answer_of_runs(
    group: ComparisonGroup, baseline: Configuration, best: Configuration, others: Sequence[Configuration]
) -> Answer:
    """Return the answer of runs: `best` of those that keep float32 weights, compared with fp32 in the plain loop."""
    spec = best.trial.spec
    speedup = value_of(best.speedup)
    if spec.techniques != baseline.trial.spec.techniques:
        speedup = value_of(best.throughput) / value_of(baseline.throughput)
    cut = next((length_in_words(config.trial) for config in (best, baseline) if not is_whole(config.trial)), "")
    in_cut_runs = f" in runs that were cut short ({cut}), so that their end is unknown" if cut else ""
    spread = f" on {spec.world_size_label}" if spec.world_size_label else ""
    loop = f" with {', '.join(spec.techniques)}" if spec.techniques else ""
    setting = f"{group.title}, batch {spec.batch_size}{spread}"
    words = (spec.workload, spec.batch_size, spec.world_size)
    over = Estimate(speedup, math.nan, math.nan, 1)
    memory = None
    if best.peak_allocated_bytes and baseline.peak_allocated_bytes:
        memory = best.peak_allocated_bytes / baseline.peak_allocated_bytes
    waiting = data_share(best.trial) or 0.0
    why = f"waits for data {waiting:.0%} of the time" if waiting >= _WAITS else "the fastest"
    if speedup < WORTHWHILE:
        faster = [c for c in others if value_of(c.throughput) > value_of(best.throughput)]
        among = " of those that keep float32 weights" if faster else ""
        comes = f"{best.precision}{loop} comes closest{among}, at {speedup:.2f} times its speed{in_cut_runs}."
        sentence = f"{setting}: stay with fp32. {comes}"
        if waiting < _WAITS:
            why = f"{best.precision}, the next, trains {speedup:.2f}× as fast"
        advice = Advice(*words, "stay", BASELINE, sentence, why=why, how_sure="one run")
        return Answer(group, advice, baseline.trial.spec, baseline, baseline, cut)
    pairs = list(zip(epochs_of(best.trial), epochs_of(baseline.trial), strict=False))
    learned = ""  # by both runs after as many epochs, if their data is real
    if pairs and imitated_data_set(spec.data_set) is None:
        own, other = pairs[-1]
        after = f"after {len(pairs)} epoch{'s' if len(pairs) > 1 else ''}"
        if own.accuracy is not None and other.accuracy is not None:
            learned = f", at {100 * own.accuracy:.1f} % accuracy compared with {100 * other.accuracy:.1f} % {after}"
        elif perplexity(own) is not None and perplexity(other) is not None:
            learned = f", at perplexity {perplexity(own):.4g} compared with {perplexity(other):.4g} {after}"
    trains = f"trains {speedup:.2f} times as fast as fp32{learned}{in_cut_runs}."
    name = f"{best.precision}{loop}"
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
        how_sure="one run",
    )
    return Answer(group, advice, spec, best, baseline, cut)
