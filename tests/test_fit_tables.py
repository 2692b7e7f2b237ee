"""The documents' tables of largest batches."""

from pathlib import Path

import fit_tables
import pytest
from fit_tables import (
    account,
    beside_sources,
    in_a_sentence,
    is_shared,
    measured_fits,
    predictions,
    sentences,
    summaries,
)
from stored import NOT_MEASURED
from test_fit import fit

from castwise.max_batch.result import MaxBatch, max_batches_of
from castwise.records.telemetry import TelemetrySummary

GIB = 2**30


def search(workload: str = "resnet50", **request: object) -> list[MaxBatch]:
    return list(fit(workload=workload, **{"precisions": ("fp32", "fp16-master", "bf16-mixed"), **request}).values())


FOUND = search()


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]


def batch(each: MaxBatch) -> int:
    assert each.largest is not None
    return each.largest.spec.batch_size


def test_searches_are_read_by_folder_and_by_the_limit_that_they_had(tmp_path: Path) -> None:
    for limit in (None, 4.0 * GIB):
        fit(results=tmp_path / "resnet50", memory_bytes=limit)
    found = measured_fits(tmp_path)
    assert list(found) == ["resnet50"]
    assert [{each.spec.memory_limit_bytes for each in fits} for fits in found["resnet50"]] == [{None}, {4 * GIB}]
    assert [len(fits) for fits in found["resnet50"]] == [2, 2]


def test_the_summary_is_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_tables, "IMAGES", tmp_path)
    text = summaries({"resnet50": [FOUND]})
    assert text.startswith("Largest batch of resnet50 on ")
    head, *lines = rows(text)
    assert [line[1] for line in lines] == [f"{batch(each):,}" for each in FOUND]
    assert head[:4] == ["precision", "largest batch", "first that fails", "over fp32"]
    assert "its curve" not in text
    (tmp_path / "fit-resnet50.png").touch()
    assert "([its curve](images/fit-resnet50.png))" in summaries({"resnet50": [FOUND]})


def test_what_a_clock_says_of_a_gpu_in_turns_is_left_out() -> None:
    reading = TelemetrySummary(seconds=1.0, num_samples=1, foreign_processes=2)
    shared = max_batches_of(
        trial.model_copy(update={"readings": (reading,)}) for each in FOUND for trial in each.trials
    )
    assert is_shared(shared)
    assert not is_shared(FOUND)
    head = rows(summaries({"resnet50": [shared]}))[0]
    assert "throughput" in rows(summaries({"resnet50": [FOUND]}))[0]
    assert not {"throughput", "knee", "at the knee"} & set(head)
    assert "up to 2 other processes computed on the GPU" in summaries({"resnet50": [shared]})


def test_parts_of_memory_are_lines_that_sum_to_all() -> None:
    text = account(FOUND)
    assert text.splitlines()[0].endswith("| fp32 | fp16-master | bf16-mixed |")
    lines = {line[0]: line[1:] for line in rows(text)}
    assert len(lines["weights"]) == len(FOUND)
    assert "in all" in lines
    assert lines["parts beside that peak"][0].endswith(" %")


def test_sentences_are_the_command_s() -> None:
    assert sentences(FOUND).startswith(f"- fp32: batch {batch(FOUND[0]):,} trained ")


def test_a_sentence_names_the_precisions_that_were_asked_for() -> None:
    text = in_a_sentence("resnet50", {"resnet50": [FOUND]})
    assert text.startswith("`castwise fit resnet50 --precision fp32,fp16-master,bf16-mixed` (Fake GPU, ")
    assert f"the largest batch that trains is {batch(FOUND[0]):,} in fp32, " in text


def test_predictions_that_were_near_are_counted() -> None:
    errors = [abs(each.prediction_error or 0.0) for each in FOUND]
    near = sum(error <= 0.03 for error in errors)
    assert predictions({"resnet50": [FOUND]}).startswith(f"Of {len(errors)} predictions {near} lie within 3 %")


def test_measured_ratios_stand_beside_the_sources_and_what_is_missing_says_so() -> None:
    measured = {"fastai-resnet18": [search("fastai-resnet18"), search("fastai-resnet18", memory_bytes=4.0 * GIB)]}
    text = rows(beside_sources(measured))
    ours = [row for row in text if row[0] == "fastai-resnet18"]
    assert ours[0][1:6] == ["fastai-cifar100", "RTX 2080 Ti, GTX 1080 Ti", "408", "720", "1.76×"]
    assert ours[1][6].startswith("4.00 GiB of an ")
    assert float(ours[0][-1].rstrip("×")) == pytest.approx(_number(ours[0][8]) / _number(ours[0][7]), abs=0.006)
    assert next(row for row in text if row[0] == "dpn92")[6] == "not measured yet"


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def test_nothing_measured_says_so(tmp_path: Path) -> None:
    assert measured_fits(tmp_path / "none") == {}
    assert summaries({}) == account([]) == sentences([]) == predictions({}) == in_a_sentence("a", {}) == NOT_MEASURED
