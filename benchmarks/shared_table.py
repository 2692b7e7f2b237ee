"""Writes the records that come with castwise: those of this repository by card, and those that others contributed.

`make tables` does it. Cards are told apart by their UUIDs here; what is written has none.
"""

from pathlib import Path

from stored import markdown

from castwise.analysis.result_table import Row
from castwise.records.shared import SharedRecord, SharedRow, question_of, shared_records
from castwise.report.files import SelectionOptions, find
from castwise.report.share import shared_of

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "src" / "castwise" / "records" / "shared.json"


def own_records() -> list[SharedRecord]:
    """Return a record for each card with each version of torch; of a configuration, the figures of most processes.

    `why` times for too short a while to reach a power limit: its figures are for what `run` has not measured.
    """

    def asked(row: Row) -> tuple[object, ...]:
        return row.trial.environment.gpu, *question_of(row.trial.spec)

    every = find([Path(__file__).with_name("records")], SelectionOptions()).collection.configurations
    timed = {asked(row) for row in every if not row.trial.spec.protocol.profile_steps}
    cards: dict[tuple[str | None, str], list[Row]] = {}
    for row in every:
        environment = row.trial.environment
        if not row.trial.spec.protocol.profile_steps or asked(row) not in timed:
            cards.setdefault((environment.gpu_uuid, environment.torch), []).append(row)
    found = []
    for rows in cards.values():
        records = sorted(shared_of(rows)[0], key=lambda record: record.date)
        kept: dict[tuple[object, ...], SharedRow] = {}
        for each in (each for record in records for each in record.rows):
            if each.question not in kept or each.n >= kept[each.question].n:
                kept[each.question] = each
        found += [records[-1].model_copy(update={"rows": tuple(kept.values())})] if records else []
    return found


def contributed() -> list[SharedRecord]:
    return [
        SharedRecord.model_validate_json(path.read_bytes()) for path in sorted((ROOT / "community").rglob("*.json"))
    ]


def text() -> str:
    records = sorted([*own_records(), *contributed()], key=lambda record: str(record.path))
    return "".join(f"{record.model_dump_json(exclude_defaults=True)}\n" for record in records)


def table() -> str:
    """Return what comes with castwise, by GPU model, as a Markdown table."""
    rows = []
    for gpu in sorted({record.gpu for record in shared_records()}):
        records = [record for record in shared_records() if record.gpu == gpu]
        own = [row for record in records for row in record.rows]
        workloads, questions = {row.workload for row in own}, {row.question for row in own}
        dates = sorted(record.date for record in records)
        versions = ", ".join(sorted({record.torch.partition("+")[0] for record in records}))
        rows.append([gpu, len(records), len(workloads), len(questions), versions, f"{dates[0]} to {dates[-1]}"])
    several: dict[tuple[object, ...], list[float]] = {}
    for record in shared_records():
        for row in record.rows:
            several.setdefault((record.gpu, *row.question), []).append(row.throughput)
    ratios = [max(each) / min(each) - 1 for each in several.values() if len(each) > 1]
    spread = f"{len(ratios)} configurations were measured on several cards of one model: they differ by at most "
    lines = markdown("GPU | cards | workloads | configurations | torch | measured", "lrrrll", rows)
    return "\n".join([*lines, "", f"{spread}{100 * max(ratios):.1f} %."]) + "\n"
