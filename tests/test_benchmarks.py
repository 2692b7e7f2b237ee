"""The documents' tables are what their records give."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_tables_are_up_to_date() -> None:
    check = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"]
    result = subprocess.run(check, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_no_document_has_an_empty_table() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert not [path.name for path in documents if "-->\n<!-- /table" in path.read_text()]
