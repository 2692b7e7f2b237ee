"""What to set in the frameworks round PyTorch, as comments behind the lines to paste."""

from castwise.analysis.advice import Advice


def snippet_lines(advice: Advice) -> list[str]:
    """Return a comment a framework, and one for those that have no such mode."""
    shown = [snippet for snippet in advice.snippets if snippet.code]
    lacking = [snippet.framework for snippet in advice.snippets if not snippet.code]
    lines = [f"# {snippet.framework}: {snippet.code}" for snippet in shown]
    return lines + ([f"# {', '.join(lacking)}: no such mode"] if lacking else [])
