"""Draw the main result over all models, of the searches on record: docs/images/speedups.svg.

    python benchmarks/hero.py

A search counts if it started from PyTorch's default. The ring is the fastest precision in the plain loop.
"""

from html import escape
from pathlib import Path
from typing import Any

from search_tables import fastest_row, searches

from castwise.render.theme import look_of
from castwise.render.units import format_rate

TARGET = Path(__file__).resolve().parents[1] / "docs" / "images" / "speedups.svg"
_STYLE = (
    "text{font:13px Helvetica,Arial,sans-serif;fill:#4d5661}.title{font-size:18px;font-weight:700;fill:#1b1f24}"
    ".value{font-weight:700;fill:#1b1f24}.name{text-anchor:end;fill:#1b1f24}.axis{text-anchor:middle}"
)
_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 960, 130, 300, 74, 30


def picture() -> str:
    """Return the picture as SVG."""
    found = [each for each in searches().values() if each["precision"] == "default"]
    found.sort(key=lambda search: -fastest_row(search)["total_speedup"])
    highest = fastest_row(found[0])["total_speedup"]
    bottom = _TOP + _ROW * len(found)

    def x(speedup: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * speedup / highest, 1)

    parts = [
        _text(14, 28, "How many times as fast as PyTorch's default", "title"),
        _text(14, 50, f"{_where(found)}; ring: the fastest precision alone; dot: precision and loop by castwise tune"),
    ]
    for value in range(0, int(highest) + 1, 1 if highest < 6 else 2):
        dash = "" if value else ' stroke-width="1.5"'
        parts.append(
            f'<line x1="{x(value)}" x2="{x(value)}" y1="{_TOP - 8}" y2="{bottom - 8}" stroke="#dfe3e8"{dash}/>'
        )
        parts.append(_text(x(value), bottom + 10, f"{value}×", "axis"))
    parts.append(
        f'<line x1="{x(1)}" x2="{x(1)}" y1="{_TOP - 8}" y2="{bottom - 8}" stroke="#1b1f24" stroke-dasharray="3 3"/>'
    )
    parts.append(_text(x(1), bottom + 10, "default", "axis"))
    for index, search in enumerate(found):
        parts += _row(search, _TOP + _ROW * index + 8, x)
    height = bottom + 22
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>' + "".join(parts) + "</svg>\n"
    )


def _row(search: dict[str, Any], y: int, x: Any) -> list[str]:
    last = fastest_row(search)
    alone = [row for row in search["rows"] if row["techniques"] == "none" and row["total_speedup"]]
    best = max((row["total_speedup"] for row in alone), default=1.0)
    colour = look_of(last["precision"]).colour
    rate = f"{last['precision']}, {format_rate(last['throughput_per_second'])} {search['unit']}/s"
    name = search["workload"].removesuffix(".py:build")
    return [
        _text(_LEFT - 12, y + 4, name, "name"),
        f'<line x1="{x(best)}" x2="{x(last["total_speedup"])}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>',
        f'<circle cx="{x(best)}" cy="{y}" r="5" fill="#fff" stroke="{colour}" stroke-width="2.5"/>',
        f'<circle cx="{x(last["total_speedup"])}" cy="{y}" r="6" fill="{colour}"/>',
        _text(x(last["total_speedup"]) + 12, y + 4, f"{last['total_speedup']:.1f}×", "value"),
        _text(x(last["total_speedup"]) + 54, y + 4, rate),
    ]


def _where(found: list[dict[str, Any]]) -> str:
    gpus = sorted({search["environment"]["gpu"] for search in found})
    versions = sorted({search["environment"]["torch"].partition("+")[0] for search in found})
    dates = sorted({search["started_at"][:10] for search in found})
    return f"{', '.join(gpus)}, torch {', '.join(versions)}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}"


def _text(x: float, y: float, text: str, kind: str = "note") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(text)}</text>'


if __name__ == "__main__":
    TARGET.write_text(picture())
