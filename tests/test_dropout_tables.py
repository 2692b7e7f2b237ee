"""The table of how models validate, of made-up runs."""

import json
from pathlib import Path

import dropout_tables


def test_a_loop_s_seeds_are_a_row_with_means_and_spreads(tmp_path: Path) -> None:
    runs = [
        {
            "techniques": techniques,
            "seed": seed,
            "training_loss": 0.2,
            "accuracy": accuracy,
            "accuracy_without_dropout": 0.88,
            "variance_ratios": {"bn1": 0.5 + seed / 10, "bn2": 1.5},
        }
        for techniques, seed, accuracy in (([], 0, 0.85), ([], 2, 0.87), (["compile"], 0, 0.84))
    ]
    environment = {"gpu": "H200", "torch": "2.11", "driver": "580", "commit": "abc"}
    path = tmp_path / "2026-11-22-h200.json"
    path.write_text(json.dumps({"environment": environment, "runs": runs}))
    where, _, _, _, compiled, plain = dropout_tables.dropout_table(path).splitlines()
    assert where == "H200, torch 2.11, driver 580, 2026-11-22, castwise at abc"
    assert plain == "| none | 0, 2 | 0.2000 ± 0.0000 | 86.00 ± 1.41 % | 88.00 ± 0.00 % | 0.60 … 1.50 |"
    assert compiled == "| compile | 0 | 0.2000 | 84.00 % | 88.00 % | 0.50 … 1.50 |"


def test_without_a_record_it_says_so(tmp_path: Path) -> None:
    assert dropout_tables.dropout_table(tmp_path / "none.json") == "Not measured yet.\n"
