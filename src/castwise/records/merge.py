"""Results folders joined into one: each record once."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from castwise.errors import StoreError, UsageError
from castwise.records.schema import Trial
from castwise.records.store import Problem, Record, Store, read_records


class Merged(NamedTuple):
    num_records: int  # in the folder now
    num_written: int  # of them, those that it did not have
    problems: tuple[Problem, ...]  # files that are no records


def merge(folders: Sequence[Path], output: Path) -> Merged:
    """Join results folders into one; records that it has already stay, and count as those of a folder.

    A configuration may have several records of one repeat on one machine, as if it was measured again. Of two folders
    that have different ones, one must contain those of the other: else the same trial was measured twice, and nothing
    says which one counts.

    Raises:
        UsageError: A folder does not exist, there are no records, or two folders have different ones of a trial.
        StoreError: A folder cannot be read or written.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"There is no folder '{folder}'.")
    problems: list[Problem] = []
    # By machine and trial: what each folder has of it, by content.
    found: dict[tuple[str, str], dict[Path, dict[str, Record]]] = {}
    for folder in dict.fromkeys([output, *folders]):
        try:
            records, failed = read_records(sorted(folder.rglob("*.json")))
        except OSError as error:
            raise StoreError(f"'{folder}' cannot be read: {error.strerror or error}.") from None
        problems += failed
        for record in records:
            key = (record.trial.environment.fingerprint, record.trial.spec.key)
            content = record.trial.model_dump_json()
            found.setdefault(key, {}).setdefault(folder, {}).setdefault(content, record)
    if not found:
        raise UsageError(f"There are no records in {', '.join(repr(str(folder)) for folder in folders)}.")
    for of_trial in found.values():
        largest, *others = sorted(of_trial.values(), key=len, reverse=True)
        for other in others:
            if new := other.keys() - largest.keys():
                one, two = largest[next(iter(largest))], other[next(iter(new))]
                raise UsageError(
                    f"'{one.path}' and '{two.path}' are different records of one trial: {one.trial.spec.label} on "
                    f"{one.trial.environment.host}. Leave one of the folders out, or move one of the files away."
                )
    store = Store(output)
    new_trials: list[Trial] = []
    num_records = 0
    for of_trial in found.values():
        contents = {content: record.trial for of_folder in of_trial.values() for content, record in of_folder.items()}
        num_records += len(contents)
        new_trials += (trial for content, trial in contents.items() if content not in of_trial.get(output, {}))
    for trial in sorted(new_trials, key=lambda trial: trial.started_at):
        store.save(trial)
    return Merged(num_records, len(new_trials), tuple(problems))
