"""A collection of records as Markdown, for issues and pull requests."""

from castwise.analysis.advice import recommend
from castwise.max_batch.render import markdown_max_batches
from castwise.max_batch.result import max_batches_of
from castwise.render import training_table
from castwise.render.run_report import to_markdown
from castwise.render.table import markdown_grid, markdown_text
from castwise.report.collection import Collection, ComparisonGroup
from castwise.report.conclusions import answers_of, in_one_sentence
from castwise.report.html.sections import summary, topic_line


def markdown_report(collection: Collection) -> str:
    """Return the answer, and a table for each topic, as Markdown."""
    answers = answers_of(collection)
    parts = [
        f"**{markdown_text(in_one_sentence(collection, answers))}**",
        markdown_text(summary(collection)),
        *(_topic(topic) for topic in collection.groups),
    ]
    if collection.notes:
        parts.append("\n".join(f"- {markdown_text(note)}" for note in collection.notes))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _topic(topic: ComparisonGroup) -> str:
    head = f"### {markdown_text(topic.title)}\n\n"
    if topic.is_max_batch:
        return head + markdown_max_batches(
            max_batches_of(trial for cell in topic.configurations for trial in cell.trials)
        )
    if not topic.is_training:
        return head + to_markdown(topic.rows, recommend(topic.rows))
    table = training_table.data_table(topic.runs)
    lines = [markdown_text(topic_line(topic)), "", *markdown_grid(table.columns, table.rows)]
    failed = [run.trial for run in topic.runs if run.trial.status != "ok"]
    lines += ["", *(f"- {markdown_text(f'{t.spec.label}: {t.status}: {t.message}')}" for t in failed)]
    return head + "\n".join(lines)
