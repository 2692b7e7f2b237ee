"""The table of models that nobody here wrote (tests/six_models.py), from the trials under benchmarks/records/own/."""

import re
from collections.abc import Sequence

from stored import NOT_MEASURED

from castwise.analysis.result_table import compare
from castwise.records.schema import Trial
from castwise.render.run_report import markdown_table


def models(trials: Sequence[Trial]) -> str:
    """Return the models in every precision beside each other, as `castwise run` prints them, by their short names."""
    if not trials:
        return NOT_MEASURED
    return re.sub(r"\bsix_models\.py:(\w+?)_full\b", r"\1", markdown_table(compare(trials)))
