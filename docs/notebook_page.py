"""A hook of MkDocs: shows docs/quickstart.ipynb as a page, with the outputs that the notebook holds."""

import json
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

NOTEBOOK = Path(__file__).with_name("quickstart.ipynb")


def on_files(files: Files, config: Any) -> Files:
    """Add the page."""
    files.append(File.generated(config, "quickstart.md", content=to_markdown(NOTEBOOK)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Make links to the notebook links to the page."""
    return markdown.replace("(quickstart.ipynb)", "(quickstart.md)")


def to_markdown(path: Path) -> str:
    """Return a notebook's text, code and outputs as Markdown."""
    lines: list[str] = []
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "markdown":
            lines += ["".join(cell["source"]), ""]
            continue
        lines += ["```python", "".join(cell["source"]), "```", ""]
        for output in cell["outputs"]:
            data = output.get("data", {})
            if html := data.get("text/html"):
                lines += [f"<div>{''.join(html)}</div>", ""]
            elif text := data.get("text/plain") or (output.get("text") if output.get("name") == "stdout" else None):
                lines += ["```text", "".join(text).rstrip(), "```", ""]
    return "\n".join(lines)
