"""What a collection of records says in the end: a sentence for each comparison in it, and one for all."""

from collections.abc import Sequence
from dataclasses import dataclass

from castwise.analysis.advice import WORTHWHILE, recommend
from castwise.analysis.training_metrics import epochs_of, is_whole, length_in_words, perplexity
from castwise.max_batch.result import MaxBatch, max_batches_of
from castwise.registry.datasets import imitated_data_set
from castwise.registry.precisions import BASELINE, precision_row
from castwise.registry.techniques import join
from castwise.report.collection import Collection, ComparisonGroup, Configuration, is_search
from castwise.spec.quantities import truncate_list

_MOST_NAMED = 4  # workloads in the one sentence for all


@dataclass(frozen=True)
class Answer:
    """What to take in one group, at one batch size and number of GPUs.

    Attributes:
        group: The group.
        precision: The precision to take; None where nothing could be measured.
        sentence: The same in words.
        code: The lines of PyTorch that switch it on; empty where there is nothing to switch.
        config: The config it rests on; None where nothing could be measured.
        baseline: The float32 config beside it; None where there is none.
        cut: How the training runs it rests on were cut short; empty where they were whole, and of steady state.
    """

    group: ComparisonGroup
    precision: str | None
    sentence: str
    code: str
    config: Configuration | None
    baseline: Configuration | None = None
    cut: str = ""

    @property
    def memory_ratio(self) -> float | None:
        """Return the peak of what tensors held over float32's."""
        own = self.config.peak_allocated_bytes if self.config is not None else None
        other = self.baseline.peak_allocated_bytes if self.baseline is not None else None
        return own / other if own and other else None

    @property
    def speedup(self) -> float | None:
        """Return the speed-up over float32 of what to take."""
        return self.config.speedup.value if self.config is not None and self.config.speedup is not None else None


def answers_of(collection: Collection) -> list[Answer]:
    """Return the answers of all topics, in order."""
    return [answer for group in collection.groups for answer in _of_group(group)]


def in_one_sentence(collection: Collection, answers: Sequence[Answer]) -> str:
    """Return what all answers come to."""
    if not answers:
        return _largest_batches(max_batches_of(collection.trials)) or "No trial was measured."
    if len(answers) == 1:
        return answers[0].sentence
    machines = list(dict.fromkeys(each.device_name for each in collection.machines.values()))
    where = "On " + ", ".join(machines[:_MOST_NAMED]) + (" and others" if len(machines) > _MOST_NAMED else "")
    # A steady measurement says more of a precision than a run that other things hold back.
    telling = [each for each in answers if not each.group.is_training] or list(answers)
    # So does one that has float32 beside it, by which the gain is known.
    telling = [each for each in telling if each.speedup is not None or each.precision == BASELINE] or telling
    by_precision: dict[tuple[str, bool], list[Answer]] = {}
    for answer in telling:
        if answer.precision is not None:
            by_precision.setdefault((answer.precision, bool(answer.cut)), []).append(answer)
    if not by_precision:
        return f"{where} nothing can be recommended: no trial ended well."
    taken = sorted(by_precision.items(), key=lambda pair: (pair[0][1], -len(pair[1])))
    workloads = [name for _, given in taken for name in {each.group.first.spec.workload for each in given}]
    torn = {name for name in workloads if workloads.count(name) > 1}
    return f"{where}: " + "; ".join(_clause(precision, given, torn) for (precision, _), given in taken) + "."


def _largest_batches(fits: Sequence[MaxBatch]) -> str:
    """Return the largest batches found, by workload; empty where none was looked for."""
    found: dict[str, list[str]] = {}
    for fit in fits:
        loop = ", ".join((fit.spec.precision, *fit.spec.techniques))
        size = "none" if fit.largest is None else f"{fit.largest.spec.batch_size:,}"
        found.setdefault(fit.spec.workload, []).append(f"{loop}: {size}")
    named = [f"{name}: {'; '.join(sizes)}" for name, sizes in found.items()][:_MOST_NAMED]
    return f"Largest batches that train. {'. '.join(named)}." if named else ""


def _clause(precision: str, given: Sequence[Answer], torn: set[str]) -> str:
    """Return what answers of one precision say; workloads that have several answers are named with their settings."""
    by_workload: dict[str, list[Answer]] = {}
    for each in given:
        by_workload.setdefault(each.group.first.spec.workload, []).append(each)
    names = [_named(name, answers) if name in torn else name for name, answers in by_workload.items()]
    words = truncate_list(
        names, most=_MOST_NAMED if len(names) <= _MOST_NAMED else _MOST_NAMED - 1
    )  # never "and 1 more"
    gains = sorted(each.speedup for each in given if each.speedup is not None)
    cut = given[0].cut  # and so of all the others
    if precision == BASELINE:
        return (
            f"in runs cut short no precision was worth leaving fp32, in {words}"
            if cut
            else f"stay with fp32 for {words}"
        )
    take = f"in runs cut short {precision} was the fastest for" if cut else f"take {precision} for"
    if not gains:
        return f"{take} {words}"
    low, high = f"{gains[0]:.2f}", f"{gains[-1]:.2f}"
    times = low if low == high else f"{low} to {high}"
    return f"{take} {words} ({times} times as fast as fp32)"


def _named(workload: str, answers: Sequence[Answer]) -> str:
    """Return a workload with the setting of its one answer, or the number of its settings."""
    if len(answers) > 1:
        return f"{workload} in {len(answers)} settings"
    config, first = answers[0].config, answers[0].group.first
    spec = config.trial.spec if config is not None else first.spec
    return f"{workload} at batch {spec.batch_size}" + (f" on {spec.spread}" if spec.spread else "")


def _of_group(group: ComparisonGroup) -> list[Answer]:
    if group.is_max_batch:
        return []  # what fits is no word on what to take
    if group.is_training:
        return _of_runs(group)
    configurations = {config.trial.spec.key: config for config in group.configurations}
    baselines = {
        config.trial.spec.comparison: config for config in group.configurations if config.precision == BASELINE
    }
    answers = []
    for advice in recommend(group.rows):
        config = configurations.get(advice.key or "")
        baseline = baselines.get(config.trial.spec.comparison) if config is not None else None
        answers.append(Answer(group, advice.precision, advice.sentence, advice.code, config, baseline))
    return answers


def _of_runs(group: ComparisonGroup) -> list[Answer]:
    """Return what training runs say, which is less: what else holds them back is in their times."""
    groups: dict[tuple[object, ...], list[Configuration]] = {}
    for config in () if is_search(group.first) else group.configurations:
        spec = config.trial.spec
        groups.setdefault((spec.batch_size, spec.world_size, spec.parallelism, spec.techniques, spec.seed), []).append(
            config
        )
    found = (_of_setting(group, configurations) for configurations in groups.values())
    return [answer for answer in found if answer is not None]


def _of_setting(group: ComparisonGroup, configurations: Sequence[Configuration]) -> Answer | None:
    ended = [config for config in configurations if config.trial.status == "ok" and config.speedup is not None]
    baseline = next((config for config in ended if config.precision == BASELINE), None)
    keeping = [config for config in ended if precision_row(config.precision).keeps_float32_weights]
    others = [config for config in keeping if config.precision != BASELINE]
    if baseline is None or not others:
        return None  # runs of one precision, or without float32 beside them, say nothing about precision
    best = max(others, key=_gain)
    spec = best.trial.spec
    spread = f" on {spec.spread}" if spec.spread else ""
    setting = f"batch {spec.batch_size}{spread}" + (f", {join(spec.techniques)}" if spec.techniques else "")
    where = f"{group.title}, {setting}"
    cut = next((length_in_words(config.trial) for config in (best, baseline) if not is_whole(config.trial)), "")
    if _gain(best) < WORTHWHILE:
        unsafe = [config for config in ended if config not in keeping]
        faster = any(_gain(config) > _gain(best) for config in unsafe)
        among = " of those that keep float32 weights" if faster else ""
        comes = f"{best.precision} comes closest{among}, at {_gain(best):.2f} times its speed{_in_runs(cut)}."
        return Answer(group, BASELINE, f"{where}: stay with fp32. {comes}", "", baseline, baseline, cut)
    if cut:
        sentence = f"{where}: {best.precision} trains {_gain(best):.2f} times as fast as fp32{_quality(best, baseline)}"
        sentence += f"{_in_runs(cut)}."
        return Answer(group, best.precision, sentence, "", best, baseline, cut)
    sentence = (
        f"{where}: take {best.precision}. It trains {_gain(best):.2f} times as fast as fp32{_quality(best, baseline)}."
    )
    return Answer(group, best.precision, sentence, "", best, baseline)


def _in_runs(cut: str) -> str:
    """Return of which runs a speed-up is, where these were cut short: what they learn in the end is open."""
    return f" in runs that were cut short ({cut}), whose end nobody has seen" if cut else ""


def _gain(config: Configuration) -> float:
    return config.speedup.value if config.speedup is not None else 0.0


def _quality(best: Configuration, baseline: Configuration) -> str:
    """Return what both runs had learned after as many epochs, where their data is real."""
    pairs = list(zip(epochs_of(best.trial), epochs_of(baseline.trial), strict=False))
    if not pairs or imitated_data_set(best.trial.spec.data_set) is not None:
        return ""
    own, other = pairs[-1]
    after = f" after {len(pairs)} epoch{'s' if len(pairs) > 1 else ''}"
    if own.accuracy is not None and other.accuracy is not None:
        return f", at {100 * own.accuracy:.1f} % accuracy beside {100 * other.accuracy:.1f} %{after}"
    mine, theirs = perplexity(own), perplexity(other)
    return "" if mine is None or theirs is None else f", at perplexity {mine:.4g} beside {theirs:.4g}{after}"
