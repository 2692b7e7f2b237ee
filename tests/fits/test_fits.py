"""`castwise fits` on an engine that makes its figures up: what fits, how sure that is, and what is said of it."""

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import CommandLine
from fake_engine import FIXED_BYTES, FakeEngine, Fault, fake_spec, machine_with
from rich.console import Console

import castwise
from castwise.errors import UsageError
from castwise.fits.options import FitsOptions
from castwise.fits.predict import (
    ERROR,
    ERROR_BATCHES,
    ERROR_SCRIPTS,
    NUM_ERRORS_SCRIPTS,
    Fit,
    Loop,
    Prediction,
    predict,
    space_of,
)
from castwise.fits.render import present, sentences
from castwise.records.schema import MemoryParts, TracedMemory
from castwise.registry.gpus import gpus_named, total_bytes
from castwise.show.presentation import print_parts
from castwise.spec.memory_line import largest_batch, needed_bytes

GIB = 2**30


def predicted(engine: FakeEngine, **options: Any) -> Prediction:
    given = {"workload": "resnet50", "precisions": ("bf16-mixed",), "techniques": ("none",), **options}
    return predict(FitsOptions(**given), machine_with(engine))


@pytest.fixture
def tracing(engine: FakeEngine) -> FakeEngine:
    """Return the engine that the package gets, of which every step can be traced."""
    engine.traces, engine.exclusive = 1.0, False
    return engine


@pytest.mark.parametrize(("size", "needed"), [(8, 10), (12, 14), (16, 18), (24, 34), (40, 66), (4, 6)])
def test_memory_is_a_line_between_known_sizes_and_beyond_them(size: int, needed: int) -> None:
    known = {8: 10, 16: 18, 32: 50}
    assert needed_bytes(known, size) == needed
    assert largest_batch(known, needed) == size


def test_not_even_a_sample_fits_and_memory_that_does_not_grow_fits_always() -> None:
    assert largest_batch({8: 100, 16: 200}, -1) == 0
    assert largest_batch({8: 100, 16: 100}, 200) is None


def test_each_gpu_has_an_answer_in_the_order_asked_for(tracing: FakeEngine) -> None:
    found = predicted(tracing, gpus=("L4", "A100", "H200"), batch_size=64)
    assert [(fit.gpu.memory_gigabytes, fit.verdict) for fit in found.fits] == [
        *((24, "yes"), (80, "yes"), (40, "yes"), (141, "yes"))
    ]
    sizes = {fit.gpu.memory_gigabytes: fit.largest() or 0 for fit in found.fits}
    assert sorted(sizes) == sorted(sizes, key=lambda memory: sizes[memory])
    assert {spec.batch_size for spec in tracing.traced} == {64}
    assert tracing.num_open == 0


@pytest.mark.parametrize(("share", "verdict"), [(0.9, "yes"), (1.0, "close"), (1.1, "no")])
def test_a_batch_within_the_interval_of_the_limit_is_close(tracing: FakeEngine, share: float, verdict: str) -> None:
    fit = predicted(tracing, gpus=("L4",)).fits[0]
    size = int(share * (fit.largest() or 0))
    found = predicted(tracing, gpus=("L4",), batch_size=size)
    assert found.fits[0].verdict == verdict
    assert ("`close`" in sentences(found)[0]) == (verdict == "close"), "a word that is not there is not explained"
    assert sentences(found)[-1].endswith("castwise max-batch resnet50"), "it can be copied"


def test_the_interval_of_the_largest_batch_is_that_of_the_memory(tracing: FakeEngine) -> None:
    fit = predicted(tracing, gpus=("RTX 4090",)).fits[0]
    low, high = fit.largest(-ERROR), fit.largest(ERROR)
    assert low is not None
    assert high is not None
    assert low < (fit.largest() or 0) < high
    assert needed_bytes(fit.loop.known, low) == pytest.approx(fit.room_bytes * math.exp(-ERROR), rel=1e-3)


@pytest.mark.parametrize(("batch_size", "verdict"), [(90, "yes"), (100, "close"), (110, "no")])
def test_the_allocator_s_gaps_decide_where_they_are_known(batch_size: int, verdict: str) -> None:
    (gpu,) = gpus_named("H200")
    line = {8: 8 * GIB, 16: 16 * GIB}  # all that fits by bytes are 137
    spec = fake_spec(batch_size=batch_size)
    known = TracedMemory(batches={size: MemoryParts(saved_bytes=held) for size, held in line.items()})
    assert Fit(Loop(spec, known), gpu).largest() == 137
    known = known.model_copy(update={"largest": {space_of(gpu): 100}})
    fit = Fit(Loop(spec, known), gpu)
    assert fit.largest() == 100
    low, high = fit.largest(-ERROR), fit.largest(ERROR)
    assert (low, high) == (int(100 * math.exp(-ERROR_BATCHES)), int(100 * math.exp(ERROR_BATCHES)))
    assert fit.verdict == verdict


def test_measured_gpus_have_the_drivers_memory_and_others_less_than_the_vendors(tracing: FakeEngine) -> None:
    measured, assumed = (fit.gpu for fit in predicted(tracing, gpus=("H200", "RTX 4090")).fits)
    assert total_bytes(measured) == (150_109_880_320, True)
    assert 23.4 * GIB < total_bytes(assumed)[0] < 23.65 * GIB


def test_a_precision_that_a_gpu_lacks_says_so(tracing: FakeEngine) -> None:
    found = predicted(tracing, gpus=("T4", "H100"), precisions=("fp8-tensorwise",), techniques=("compile",))
    old, new = found.fits
    assert "needs CUDA compute capability" in old.problem
    assert (old.verdict, old.largest()) == (None, None)
    assert new.verdict == "yes"
    assert new.loop.left_out == ["compile"]


def test_an_unknown_gpu_has_near_names(tracing: FakeEngine) -> None:
    with pytest.raises(UsageError, match=r"No GPU named .RTX 4096.\. Did you mean RTX 4090"):
        predicted(tracing, gpus=("RTX 4096",))


def test_what_cannot_be_traced_is_an_error_with_its_reason() -> None:
    with pytest.raises(UsageError, match="nothing can be traced"):
        predicted(FakeEngine(exclusive=False))


def test_a_loop_that_nobody_asked_for_is_left_out_if_the_model_does_not_allow_it(tracing: FakeEngine) -> None:
    tracing.faults = {"activation-checkpointing": Fault("unsupported", "trace_memory")}
    assert [loop.spec.techniques for loop in predicted(tracing, techniques=None).loops] == [()]
    asked = predicted(tracing, techniques=("none", "activation-checkpointing"))
    assert "not implemented" in asked.loops[1].problem
    assert Fit(asked.loops[1], asked.gpus[0]).verdict is None


def test_what_fits_is_printed_within_80_columns(tracing: FakeEngine) -> None:
    found = predicted(tracing, gpus=("RTX 4090", "T4"), precisions=None, techniques=None)
    out = io.StringIO()
    print_parts(present(found).parts, Console(file=out, width=80))
    table = out.getvalue().partition("Of ")[0]
    assert "RTX 4090, 22.5 GiB for tensors" in table
    assert "activations saved for backward" in table
    assert max(map(len, table.splitlines())) <= 80
    assert "predicted without a GPU" in table
    assert all(f"{name}\n" not in table for name in ("needs", "fits")), "it is a table, not a list of figures"


def shown(found: Prediction) -> str:
    out = io.StringIO()
    print_parts(present(found).parts, Console(file=out, width=80))
    return " ".join(out.getvalue().split())


def test_a_largest_batch_is_printed_as_far_as_it_is_known(tracing: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    found = predicted(tracing, gpus=("L4",))
    assert found.fits[0].largest() == 4398
    assert "1.45 GiB yes about 4,400 " in shown(found)
    monkeypatch.setattr(Loop, "error", 0.4)
    assert "1.45 GiB yes 3,000 to 7,000 " in shown(found)


def test_what_a_gpu_lacks_is_said_below_the_table(tracing: FakeEngine) -> None:
    text = shown(predicted(tracing, gpus=("T4", "L4"), precisions=("fp8-tensorwise",)))
    assert "fp8-tensorwise 1.70 GiB 1.45 GiB unsupported – " in text
    assert text.count("fp8-tensorwise needs CUDA compute capability 8.9 or newer; T4 has 7.5") == 1


def test_json_has_the_parts_of_each_loop(tracing: FakeEngine, command: CommandLine) -> None:
    done = command("fits", "resnet50", "--gpu", "L4", "--techniques", "none", "--format", "json", engine=tracing)
    (first, *_) = json.loads(done.out)["fits"]
    assert (first["gpu"], first["precision"], first["fits"]) == ("L4", "fp32", "yes")
    assert first["weights_bytes"] == FIXED_BYTES // 2
    assert json.loads(done.out)["error"] == pytest.approx(math.exp(ERROR) - 1)
    assert first["largest_batch_low"] < first["predicted_batch"] < first["largest_batch_high"]


def test_the_function_predicts_what_the_command_does(tracing: FakeEngine) -> None:
    found = castwise.fits("resnet50", gpu="L4", precision="fp32,bf16-mixed", techniques="none")
    assert list(found.largest) == ["L4"]
    assert (found.largest["L4"]["fp32"] or 0) < (found.largest["L4"]["bf16-mixed"] or 0)
    assert "\n" not in repr(found)
    assert "<table>" in found._repr_html_()
    assert len(tracing.traced) == 2


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "train.py"
    file.write_text("import torch\n")
    return f"python {file}"


def test_a_script_is_traced_at_its_own_batch_without_being_run(tracing: FakeEngine, script: str) -> None:
    found = predicted(tracing, workload=script, techniques=None, gpus=("L4", "H100"))
    assert [loop.spec.precision for loop in found.loops] == ["as-written", "bf16-mixed"]
    assert {fit.loop.spec.batch_size for fit in found.fits} == {1}
    assert {fit.verdict for fit in found.fits} == {"yes"}
    assert len(tracing.traced) == 2
    assert found.loops[0].known_errors == (ERROR_SCRIPTS, NUM_ERRORS_SCRIPTS)
    out = io.StringIO()
    print_parts(present(found).parts, Console(file=out, width=80))
    assert "largest" not in out.getvalue()
    assert f"castwise run -- {script}" in " ".join(out.getvalue().split())


def test_what_a_script_is_waited_for_is_said_once(tracing: FakeEngine, command: CommandLine, script: str) -> None:
    done = command("fits", "--precision", "bf16-mixed", "--gpu", "L4", "--", *script.split(), engine=tracing)
    assert len(tracing.traced) == 2
    assert done.err.count("waiting for step 1") == 1


def test_what_a_script_printed_is_shown_with_verbose(tracing: FakeEngine, command: CommandLine, script: str) -> None:
    words = "--gpu", "L4", "--precision", "as-written,bf16-mixed", "--", *script.split()
    for failing in (("bf16-mixed",), ("bf16-mixed", "as-written")):
        tracing.faults = dict.fromkeys(failing, Fault("crash", "trace_memory"))
        assert "Traceback (fake)" in command("fits", "--verbose", *words, engine=tracing).err
        assert "Traceback (fake)" not in command("fits", *words, engine=tracing).err


def test_what_a_precision_does_to_a_script_s_weights_is_said(tracing: FakeEngine, script: str) -> None:
    found = predicted(tracing, workload=script, techniques=None, gpus=("L4",))
    memory = found.loops[1].memory
    assert memory is not None
    noted = replace(found.loops[1], memory=memory.model_copy(update={"notes": ("bf16-mixed: its weights are wide",)}))
    assert "bf16-mixed: its weights are wide" in shown(replace(found, loops=(found.loops[0], noted)))


@pytest.mark.parametrize(
    ("options", "said"),
    [({"batch_size": 8}, "has one itself"), ({"precisions": ("fp8-tensorwise",)}, "cannot be given fp8-tensorwise")],
)
def test_what_a_script_cannot_be_given_is_refused(
    tracing: FakeEngine, script: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        predicted(tracing, workload=script, **options)


def test_it_says_how_many_loops_are_traced(tracing: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["castwise.fits.predict"], "_NOTE_SECONDS", 0.0)
    said = list[str]()
    request = FitsOptions("resnet50", precisions=("fp32", "bf16-mixed", "fp16-mixed"), techniques=("none",))
    predict(request, machine_with(tracing), said.append)
    assert [line.partition(",")[0] for line in said] == ["1 of 3 loops traced", "2 of 3 loops traced"]
