"""docs/quickstart.ipynb runs from top to bottom, and the outputs that it holds are of such a run."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from programs import PATIENCE_SECONDS

QUICK = """\
from castwise.orchestrator import job
job.CPU_ROUND = job.CPU_ROUND.model_copy(update={"warm_up_seconds": 0.1})
"""
NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "quickstart.ipynb"


@pytest.mark.slow
def test_it_runs_and_shows_a_table(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:  # a CPU without bfloat16 takes half a second for a step of the whole batch
        cell.source = cell.source.replace("batch_size=64", "batch_size=4").replace("rounds=3", "rounds=1")
    next(cell for cell in notebook.cells if cell.cell_type == "code").source += f"\n{QUICK}"
    stored = [len(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, kernel_name="python3", startup_timeout=int(PATIENCE_SECONDS), resources=where).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [len(cell.outputs) for cell in cells] == stored
    (table,) = [output.data["text/html"] for cell in cells for output in cell.outputs if "data" in output]
    assert "<table>" in table
    assert all(f"{precision}<" in table for precision in ("fp32", "bf16-mixed"))
    assert cells[-1].outputs[0].text.startswith("ok [")
