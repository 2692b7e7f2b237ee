"""What every row of every registry keeps to; a new row is tested from the moment it exists."""

import ast
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from castwise.apply.precision import numeric_state, read_fp32_precision, restore_fp32_precision
from castwise.errors import UsageError
from castwise.registry.architectures import FORMATS
from castwise.registry.datasets import DATA_SETS, find_data_set
from castwise.registry.gpus import PEAK_DTYPES
from castwise.registry.precisions import NARROW_PRECISIONS, PRECISIONS, Precision, find_precision
from castwise.registry.techniques import TECHNIQUES, find_technique
from castwise.registry.workloads import WORKLOADS, Workload, find_workload
from castwise.spec.loss_scale import parse_loss_scale
from castwise.spec.types import SYNTHETIC
from castwise.trial.step import describe_optimizer

every_precision = pytest.mark.parametrize("row", [*PRECISIONS, *NARROW_PRECISIONS], ids=lambda row: row.name)
every_workload = pytest.mark.parametrize("row", WORKLOADS, ids=lambda row: row.name)

CUDA_PRODUCTS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")


@pytest.fixture
def switches() -> Iterator[None]:
    """Give the float32 switches back, whatever the test leaves."""
    before = read_fp32_precision()
    yield
    restore_fp32_precision(before)


# Names


ROWS = [
    (find_precision, (*PRECISIONS, *NARROW_PRECISIONS), lambda row: (row.name, *row.aliases)),
    (find_technique, TECHNIQUES, lambda row: (row.name,)),
    (find_workload, WORKLOADS, lambda row: (row.name,)),
    (find_data_set, DATA_SETS, lambda row: (row.name,)),
]


@pytest.mark.parametrize(("find", "rows", "names_of"), ROWS, ids=["precisions", "techniques", "workloads", "data sets"])
def test_a_name_finds_one_row(
    find: Callable[[str], Any], rows: Any, names_of: Callable[[Any], tuple[str, ...]]
) -> None:
    names = [name for row in rows for name in names_of(row)]
    assert len(set(names) | {SYNTHETIC}) == len(names) + 1
    assert [name for name in names if name != name.lower() or set(name) & set(", +:'\"")] == [], "of a command line"
    for row in rows:
        for name in names_of(row):
            assert find(name) is find(name.upper()) is find(f"  {name} ") is row


@pytest.mark.parametrize(
    ("find", "name", "nearest"),
    [
        (find_precision, "FP16-MIXD", "fp16-mixed"),
        (find_workload, "mnist-cn", "mnist-cnn"),
        (find_data_set, "mnits", "mnist"),
        (find_precision, "qqqqqqqqqqqq", "fp32"),
        (find_workload, "", "castwise list workloads"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(find: Callable[[str], Any], name: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"named '{name}'.*{nearest}"):
        find(name)


@pytest.mark.parametrize("name", ["fp8", "INT8", "float8_e4m3"])
def test_8_bit_names_are_answered_with_what_is_measured(name: str) -> None:
    with pytest.raises(UsageError, match=f"does not measure '{name}'.*fp8-tensorwise, fp8-rowwise"):
        find_precision(name)


# Precisions


@every_precision
def test_a_precision_says_things_that_exist(row: Precision) -> None:
    computes_in_two = row.float32_matmul is None or row in NARROW_PRECISIONS
    assert row.peak_dtype == "" if computes_in_two else row.peak_dtype in PEAK_DTYPES
    assert parse_loss_scale(row.loss_scale) == row.loss_scale
    for name in (row.param_dtype, row.batch_norm_dtype, row.autocast_dtype or row.param_dtype):
        assert getattr(torch, name).is_floating_point
    assert row.summary
    assert len(row.summary.splitlines()) == 1


@every_precision
def test_a_precision_is_consistent(row: Precision) -> None:
    assert row.keeps_float32_weights == (row.param_dtype == "float32" or row.master_weights)
    if row.master_weights:
        assert row.param_dtype != "float32", "masters are copies of lower-precision weights"
    if row.autocast_dtype is not None:
        assert row.param_dtype == "float32"
    if row.float32_matmul == "tf32":
        assert row.param_dtype == "float32"
        assert row.format == "tf32"
    assert row.format is None or row.format in FORMATS


@every_precision
def test_a_snippet_is_code(row: Precision) -> None:
    code = row.code.format(device="cuda")
    compile(code, row.name, "exec")
    assert "{" not in code
    names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    used = {node.id for node in names}
    made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    made |= {node.arg for node in ast.walk(ast.parse(code)) if isinstance(node, ast.arg)}
    made |= {node.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.alias)}
    given = {"torch", "model", "x", "y", "loss_fn", "optimizer", "lr"}
    assert used - made - given <= {"isinstance", "list", "type", "zip"}


@every_precision
@pytest.mark.usefixtures("switches")
def test_a_snippet_sets_the_switches_as_the_precision_does(row: Precision) -> None:
    switch_lines = [line for line in row.code.splitlines() if line.startswith("torch.backends.")]
    if row.float32_matmul is None:
        assert not row.code, "PyTorch's default needs no line"
        before = read_fp32_precision()
        with numeric_state(row):
            assert read_fp32_precision() == before
    elif row.param_dtype == "float32" and row.autocast_dtype is None:
        assert switch_lines == row.code.splitlines(), "such a row is nothing but its switches"
        exec("\n".join(switch_lines), {"torch": torch})
        # After allow_tf32 = False newer versions read "none", which computes as "ieee".
        got = {path: "ieee" if switch == "none" else switch for path, switch in read_fp32_precision().items()}
        with numeric_state(row):
            wanted = read_fp32_precision()
        # The flags leave cuDNN's switches at "none" for IEEE, which is what torch computes if nobody asks for TF32.
        assert {path: got[path] == "tf32" for path in CUDA_PRODUCTS} == {
            path: wanted[path] == "tf32" for path in CUDA_PRODUCTS
        }
        assert set(wanted.values()) <= {"ieee", row.float32_matmul}
    else:
        assert not switch_lines


# Workloads


@every_workload
def test_a_workload_says_things_that_exist(row: Workload) -> None:
    assert row.batch_size >= 1
    assert row.cpu_batch_size >= 1
    assert row.resident_batches >= 1
    assert all(side >= 1 for side in row.input_shape)
    assert (row.input_shape == ()) == (row.unit == "tokens")
    for name in row.data_sets:
        assert find_data_set(name).name == name
    assert row.source
    assert len(row.summary.splitlines()) == 1


@every_workload
def test_a_workload_s_optimizer_is_one_of_torch_s(row: Workload) -> None:
    make = getattr(torch.optim, row.optimizer.name)
    make([torch.nn.Parameter(torch.zeros(1))], **dict(row.optimizer.arguments))
    assert describe_optimizer(row.optimizer).startswith(f"{row.optimizer.name}(")


# Data sets


@pytest.mark.parametrize("row", DATA_SETS, ids=lambda row: row.name)
def test_a_data_set_s_files_can_be_told_apart(row: Any) -> None:
    layout, layouts = row, []
    while layout is not None:
        assert layout.name == row.name
        parts = [file.part for file in layout.files]
        names = [name for file in layout.files for name in (file.name, *file.aliases)]
        assert len(parts) == len(set(parts))
        assert len(names) == len(set(names))
        assert all(file.num_bytes > 0 for file in layout.files)
        assert layout.folders
        layouts.append(layout.layout)
        layout = layout.other
    assert len(layouts) == len(set(layouts))
