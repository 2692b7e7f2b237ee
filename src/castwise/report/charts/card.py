"""The answer as one picture to share: model and GPU, how many times as fast, what to take, date and command."""

import textwrap

from castwise._version import __version__
from castwise.registry.gpus import short_device_name
from castwise.registry.precisions import REFERENCE_WORDS, precision_row
from castwise.report.charts.svg import text
from castwise.report.conclusions import Answer, loop_of, outcome_of
from castwise.show.theme import look_of
from castwise.show.units import format_ratio
from castwise.spec.quantities import format_interval
from castwise.spec.typed import advised_line

_DARK, _PALE, _SOFT, _BLUE = "#0d1117", "#e6edf3", "#9da7b1", "#58a6ff"
_LEFT, _BARS, _LONGEST = 60, 300, 720  # pixels: of the texts, of the bars, and of the longest bar
_MOST_BARS = 3  # between what is taken and what that is compared with


def card(answer: Answer) -> str:
    """Return an answer as an SVG file."""
    advice, trial = answer.advice, answer.group.first
    over, reference, environment = advice.over, advice.reference, trial.environment
    parts = [
        _line(92, f"{answer.group.title}, {answer.setting}, {short_device_name(environment.device_name)}", 30, _SOFT)
    ]
    if advice.decision == "take" and over is not None and reference is not None:
        ratio = format_ratio(over.value)
        parts.append(f'<g font-weight="700">{text(_LEFT, 236, ratio, size=720 // max(5, len(ratio)), fill=_BLUE)}</g>')
        name = REFERENCE_WORDS.get(reference.precision, reference.precision)
        interval = format_interval(over.value, over.low, over.high)
        parts.append(text(590, 180, f"as fast as {name}{advice.same_loop}", size=36, fill=_PALE))
        sure = textwrap.wrap(f"{interval} {advice.how_sure}".strip(), 50)[:2]
        parts += [text(590, 220 + 30 * place, line, size=24, fill=_SOFT) for place, line in enumerate(sure)]
        memory = f", in {format_ratio(advice.memory_ratio)} the memory" if advice.memory_ratio else ""
        parts.append(_line(306, f"take {loop_of(answer)}{memory}", 30, _PALE))
        alike = [row for row in advice.rows if row.techniques == reference.techniques and row.trial.status == "ok"]
        safe = [row for row in alike if row is not reference and precision_row(row.precision).keeps_float32_weights]
        speeds = [(own.value, row.precision) for row in safe if (own := row.over(reference)) and own.value < over.value]
        bars = [(1.0, reference.precision), *sorted(speeds)[-_MOST_BARS:], (over.value, advice.precision or "")]
        for place, (value, label) in enumerate(bars):
            y, width = 330 + 45 * place, _LONGEST * value / over.value
            parts.append(text(_BARS - 16, y + 25, label, "end", 24, _PALE))
            parts.append(
                f'<rect x="{_BARS}" y="{y}" width="{width:.0f}" height="34" rx="4" fill="{look_of(label).colour}"/>'
            )
            parts.append(text(_BARS + width + 14, y + 25, format_ratio(value), size=24, fill=_PALE))
    else:
        outcome = textwrap.wrap(outcome_of(answer), 56)[:4]
        parts += [_line(236 + 48 * place, line, 34, _PALE) for place, line in enumerate(outcome)]
    spec = trial.spec
    command = advised_line("run", spec.workload, {} if spec.is_script else {"batch_size": advice.batch_size})
    made = f"castwise {__version__} · torch {environment.torch} · {trial.started_at[:10]}"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1200 630" width="1200" height="630" '
        f'font-family="Helvetica, Arial, sans-serif"><rect width="100%" height="100%" fill="{_DARK}"/>'
        f"{''.join(parts)}{_line(586, made, 20, _SOFT)}{_line(613, command, 20, _SOFT)}</svg>\n"
    )


def _line(y: float, words: str, size: int, colour: str) -> str:
    """Return a line of text from the left edge, cut off where the picture ends."""
    return text(_LEFT, y, textwrap.shorten(words, 2050 // size, placeholder=" …"), size=size, fill=colour)
