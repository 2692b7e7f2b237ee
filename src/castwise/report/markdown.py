"""A collection of records as Markdown, for issues and pull requests."""

from castwise.analysis.advice import recommend
from castwise.max_batch.render import markdown_max_batches
from castwise.max_batch.result import max_batches_of
from castwise.render import training_table
from castwise.render.run_report import to_markdown
from castwise.render.table import markdown_grid, markdown_text
from castwise.report.collection import Collection, ComparisonGroup
from castwise.report.conclusions import answers_of, in_one_sentence


def markdown_report(collection: Collection) -> str:
    """Return the answer, and a table for each group, as Markdown."""
    answers = answers_of(collection)
    parts = [
        f"**{markdown_text(in_one_sentence(collection, answers))}**",
        markdown_text(collection.summary),
        *(_group(group) for group in collection.groups),
    ]
    if collection.notes:
        parts.append("\n".join(f"- {markdown_text(note)}" for note in collection.notes))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _group(group: ComparisonGroup) -> str:
    head = f"### {markdown_text(group.title)}\n\n"
    if group.is_max_batch:
        return head + markdown_max_batches(
            max_batches_of(trial for config in group.configurations for trial in config.trials)
        )
    if not group.is_training:
        return head + to_markdown(group.rows, recommend(group.rows))
    table = training_table.data_table(group.runs)
    lines = [markdown_text(group.description), "", *markdown_grid(table.columns, table.rows)]
    failed = [run.trial for run in group.runs if run.trial.status != "ok"]
    lines += ["", *(f"- {markdown_text(f'{t.spec.label}: {t.status}: {t.message}')}" for t in failed)]
    return head + "\n".join(lines)
