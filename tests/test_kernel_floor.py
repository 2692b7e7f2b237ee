"""The floor of a goal's step with the library's own kernels: the program in its smallest form, and its table."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import kernel_floor as program
import pytest
import tables
import torch
from goal_rows import find_rows
from goal_summary import OURS
from goal_turns import HERE
from kernel_floor_tables import TRAFFIC, floor_of, kernel_floor_table, lines_of
from kernel_products import FORWARD, OF_INPUT, OF_WEIGHT, PARTS
from kernel_times import CHANNELS_LAST, MATMUL, Manner, Way
from test_goal_summary import row, turn

BANDWIDTH = 4e12
ENVIRONMENT = {"gpu": "NVIDIA H200", "cpu": "c", "torch": "2.11", "driver": "580", "commit": "abc"}


def product(part: str, count: int, **seconds: float) -> dict[str, Any]:
    own = {name.replace("_", " "): value for name, value in seconds.items()}
    return {"part": part, "label": f"the {part}'s", "count": count, "flops": 6e11, "seconds": own}


def floor_row(**more: Any) -> dict[str, Any]:
    products = [
        product(FORWARD, 2, channels_last=0.003, matrix_product=0.002),
        product(FORWARD, 1, its_bytes=0.001),
        product(OF_INPUT, 1, channels_last=0.005),
        product(OF_WEIGHT, 3, channels_last=0.004, its_bytes=0.003),
    ]
    return row(products=products, format="bf16", rest_bytes=2e10, steps_per_epoch=None, **more)


def document(**more: Any) -> dict[str, Any]:
    return {
        "environment": ENVIRONMENT,
        "date": "2026-11-22",
        "bytes_per_second": BANDWIDTH,
        "rotated_bytes": 200,
        "rows": [floor_row(**more)],
    }


def test_each_product_counts_in_its_fastest_way_as_often_as_it_occurs() -> None:
    floor = floor_of(floor_row(), BANDWIDTH)
    assert floor.parts == {FORWARD: pytest.approx(0.005), OF_INPUT: 0.005, OF_WEIGHT: pytest.approx(0.009)}
    assert floor.rest == 0.005
    assert floor.seconds == pytest.approx(0.024)


def test_the_table_of_a_record() -> None:
    text = kernel_floor_table(document(), {})
    assert "NVIDIA H200, torch 2.11, driver 580, 2026-11-22, castwise at abc; copies 4.00 TB/s\n" in text
    line = "| resnet50, batch 256 | bf16 | 5.00 ms | 5.00 ms | 9.00 ms | 5.00 ms | 24.0 ms | 32.0 ms | yes |"
    assert f"{line} – | – |" in text
    assert "castwise's step:" not in text, "none was measured"
    measured = row(turn(OURS, 0.048), steps_per_epoch=None, where="NVIDIA H200, 2026-11-23, castwise at def")
    beside = kernel_floor_table(document(), {"resnet50": measured, "wrn": measured | {"where": "of no row here"}})
    assert f"{line} 48.0 ms | 50.0 % |" in beside
    assert "\n\ncastwise's step: NVIDIA H200, 2026-11-23, castwise at def\n\n| what |" in beside
    assert "| 12.8 ms | no |" in kernel_floor_table(document(goal=20_000.0), {})
    assert (
        "- resnet50: 3 of 4 products timed; the slowest: weight gradient of the weight gradient's: "
        "3 × 3.00 ms = 9.00 ms, 200.0 TFLOP/s, its bytes; "
    ) in text


def test_what_is_cut_short_is_in_no_table_and_beside_no_step_of_castwise() -> None:
    line = lines_of(floor_row(is_whole=False), BANDWIDTH, row(turn(OURS, 0.048), steps_per_epoch=None))[0]
    assert line.endswith("castwise's –; smallest sizes, which tell nothing of it")
    assert "resnet50" not in kernel_floor_table(document(is_whole=False), {})


def test_tensors_in_the_cache_are_told() -> None:
    assert "; tensors in the cache where they fit\n" in kernel_floor_table(document() | {"rotated_bytes": 0}, {})


def test_the_documents_can_have_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kernel_floor"
    folder.mkdir()
    (folder / "one.json").write_text(json.dumps(document()))
    monkeypatch.setattr(tables, "RECORDS", tmp_path)
    filled = tables.fill("<!-- table: kernel_floor one -->\n<!-- /table -->")
    assert "| resnet50, batch 256 | bf16 |" in filled


def test_lines_begin_with_the_slowest_product() -> None:
    first, untimed, *products = lines_of(floor_row(), BANDWIDTH, row(turn(OURS, 0.048), steps_per_epoch=None))
    assert first == (
        "resnet50      forward 5.00 ms, input gradient 5.00 ms, weight gradient 9.00 ms, the rest 5.00 ms "
        "(20 GB at 4.00 TB/s): 24.0 ms; the goal's step 32.0 ms, castwise's 48.0 ms"
    )
    assert untimed == "    1 of 4 products not timed, and counted by their bytes"
    assert [line.split("the ")[0].strip() for line in products] == [OF_WEIGHT, OF_INPUT, FORWARD, FORWARD]


def bench(budget: float = 100.0) -> program.FloorBench:
    return program.FloorBench(torch.device("cpu"), 1e9, budget, rotated_bytes=0, is_tiny=True)


def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Manner]]:
    """Have every product take a millisecond, and return what is timed."""
    seen: list[tuple[str, Manner]] = []

    def time_way(way: Way, product: object, manner: Manner, seconds: float) -> float:
        seen.append((way.name, manner))
        if way.name == MATMUL:
            raise RuntimeError("no kernel\nfor that")
        return 0.001

    monkeypatch.setattr(program, "time_way", time_way)
    return seen


def smallest(name: str) -> Any:
    (found,) = find_rows(name)
    return program.smallest(found, "cpu")


def test_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = timed(monkeypatch)
    found = bench().measure(smallest("wrn"))
    assert found is not None
    assert {manner.dtype for _, manner in seen} == {torch.bfloat16}
    assert (found["format"], found["is_whole"], found["batch_size"]) == ("bf16", False, 2)
    count = {part: sum(each["count"] for each in found["products"] if each["part"] == part) for part in PARTS}
    assert count == {FORWARD: 29, OF_INPUT: 28, OF_WEIGHT: 29}
    by_label = {(each["label"], each["part"]): each for each in found["products"]}
    assert by_label["3×3, 160 → 160 channels, 2×32×32", FORWARD]["seconds"] == {CHANNELS_LAST: 0.001}
    # The first layer's pictures: a loop may take another kernel than the library's.
    stem = by_label["3×3, 3 → 16 channels, 2×32×32", FORWARD]
    assert stem["seconds"][TRAFFIC] == stem["elements"] * 2 / 1e9
    (point,) = (each for each in found["products"] if each["label"].startswith("1×1, 16 →") and each["part"] == FORWARD)
    assert point["failed"] == {MATMUL: "no kernel"}
    json.dumps(found)


def test_rows_share_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, shared = timed(monkeypatch), bench()
    first = shared.measure(smallest("wrn"))
    number = len(seen)
    again = shared.measure(smallest("wrn-run"))
    assert len(seen) == number
    assert first is not None
    assert again is not None
    assert again["products"] == first["products"]


def test_what_the_budget_leaves_out_counts_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = timed(monkeypatch)
    found = bench(budget=0.0).measure(smallest("mlp"))
    assert found is not None
    assert not seen
    assert all(set(each["seconds"]) == {TRAFFIC} for each in found["products"])
    assert "3 of 3 products not timed, and counted by their bytes" in lines_of(found, 1e9, None)[1]


def test_recurrent_layers_are_left_out() -> None:
    assert bench().measure(smallest("lstm-200")) is None


@pytest.mark.slow
def test_a_run_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "floor.json"
    arguments = ["--device", "cpu", "--tiny", "--rows", "mnist,lstm-200", "--out", str(out)]
    command = [sys.executable, str(HERE / "kernel_floor.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stderr
    kept = json.loads(out.read_text())
    (found,) = kept["rows"]
    assert len(found["products"]) == 11
    assert all(seconds > 0 for each in found["products"] for seconds in each["seconds"].values())
    assert not any(each["failed"] for each in found["products"])
    assert "smallest sizes, which tell nothing of it" in result.stdout
    assert "lstm-200      has recurrent layers, which are not timed here" in result.stdout
    assert "mnist" not in kernel_floor_table(kept, {})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "vgg"], "No row named 'vgg'. Rows: mlp, "),
        (["--rows", "mnist", "--device", "cpu"], "Kernels are timed on a GPU; --tiny tries the program on a CPU."),
    ],
)
def test_what_cannot_be_asked_for_is_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kernel_floor.py", *arguments])
    assert program.main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(said)
