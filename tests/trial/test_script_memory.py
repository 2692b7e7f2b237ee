"""Scripts on a GPU that is not there: what their steps hold there, beside what can be counted by hand."""

from collections.abc import Callable
from contextlib import closing

import pytest
from fake_engine import fake_spec

from castwise.orchestrator.processes import ForkserverEngine
from castwise.orchestrator.session import OnNote, TrialFailedError
from castwise.records.schema import MemoryParts, TracedMemory
from castwise.spec.trial import MeasurementProtocol
from castwise.spec.user_model import UserModel

pytestmark = pytest.mark.xdist_group("script memory")  # one engine serves them
BATCH, WIDTH = 256, 128
WEIGHTS = 4 * 3 * WIDTH * WIDTH
Trace = Callable[..., TracedMemory]

SCRIPT = f"""\
import copy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
assert torch.cuda.is_available()
device = torch.device("cuda")
layers = nn.Linear({WIDTH}, {WIDTH}, bias=False), nn.ReLU(), nn.Linear({WIDTH}, {WIDTH}, bias=False), nn.ReLU()
model = nn.Sequential(*layers, nn.Linear({WIDTH}, {WIDTH}, bias=False))
optimizer = torch.optim.Adam(model.parameters())
model.to(device)
data = TensorDataset(torch.arange({4 * BATCH * WIDTH}.0).view(-1, {WIDTH}), torch.arange({4 * BATCH}))
for step, (inputs, target) in enumerate(DataLoader(data, batch_size={BATCH}, pin_memory=True)):
    assert inputs[1, 0].item() == step * {BATCH * WIDTH} + {WIDTH}  # its data is real
    output = model(inputs.to(device, non_blocking=True))
    loss = nn.functional.mse_loss(output, torch.zeros_like(output))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    engine = ForkserverEngine()
    file = tmp_path_factory.mktemp("script") / "train.py"

    def traced(
        text: str = SCRIPT,
        precision: str = "as-written",
        launcher: tuple[str, ...] = (),
        limit: float = 600.0,
        on_note: OnNote | None = None,
    ) -> TracedMemory:
        file.write_text(text)
        model = UserModel(kind="script", path=str(file), name="", launcher=launcher)
        protocol = MeasurementProtocol(timeout_seconds=limit)
        spec = fake_spec(precision=precision, workload="python train.py", protocol=protocol)
        spec = spec.model_copy(update={"user_model": model})
        with closing(engine.start(120.0)) as session:
            session.open("cpu")
            return session.trace_memory(spec, (1,), (), on_note=on_note)

    return traced


def parts_of(memory: TracedMemory) -> MemoryParts:
    return memory.batches[BATCH]


def with_lines(*lines: str, instead_of: str = "    loss = ") -> str:
    """Return the script with lines before the one that begins so."""
    return SCRIPT.replace(instead_of, "".join(f"    {line}\n" for line in lines) + instead_of, 1)


def test_a_script_s_second_step_is_counted_to_the_byte(trace: Trace) -> None:
    memory = trace()
    parts = parts_of(memory)
    assert parts.weights_bytes == WEIGHTS
    assert parts.optimizer_bytes == 2 * WEIGHTS
    # The inputs, what each ReLU saves, which the layer after it saves, too, and both of the loss.
    assert parts.saved_bytes == 4 * BATCH * WIDTH * 5
    assert memory.guesses == memory.compiling == ()


def test_a_precision_is_applied_to_a_script(trace: Trace) -> None:
    parts = parts_of(trace(precision="bf16-mixed"))
    assert parts.weights_bytes == WEIGHTS
    assert 0 < parts.weight_casts_bytes <= WEIGHTS // 2
    assert parts.saved_bytes < parts_of(trace()).saved_bytes


def test_shapes_that_follow_from_known_values_are_those_of_a_real_run(trace: Trace) -> None:
    known = trace(with_lines("kept = output[(target.to(device) % 2 == 0)]", "assert len(kept) == 128, kept.shape"))
    assert parts_of(known).weights_bytes == WEIGHTS
    assert known.guesses == ()


def test_a_value_that_the_script_reads_is_guessed_and_its_line_noted(trace: Trace) -> None:
    found = trace(SCRIPT + "    print(loss.item(), output.cpu().sum())\n")
    line = 1 + SCRIPT.count("\n")
    assert found.guesses == (f"train.py:{line}",)


def test_a_script_that_saves_and_that_ends_if_its_loss_is_not_finite_goes_on(trace: Trace) -> None:
    lines = 'torch.save(model.state_dict(), "best.pt")', "if not torch.isfinite(loss) or loss.isnan().any(): exit(1)"
    memory = trace(with_lines(*lines, instead_of="    optimizer.zero_grad()"))
    assert parts_of(memory).peak_bytes == pytest.approx(parts_of(trace()).peak_bytes, rel=1e-3)
    assert not memory.guesses


def test_a_shape_that_a_model_decides_is_refused_with_its_line(trace: Trace) -> None:
    with pytest.raises(TrialFailedError, match=r"aten.nonzero.default needs values\. .*train\.py:15"):
        trace(with_lines("output = output[output[:, 0] > 0]"))


def test_tied_weights_stay_one_and_a_copy_is_another(trace: Trace) -> None:
    tied = SCRIPT.replace("optimizer = ", "model[4].weight = model[2].weight; optimizer = ")
    parts = parts_of(trace(tied))
    assert parts.weights_bytes == WEIGHTS * 2 // 3
    assert parts.optimizer_bytes == 2 * parts.weights_bytes
    copied = tied.replace("model.to(device)", "model.to(device); old = copy.deepcopy(model)")
    assert parts_of(trace(copied)).peak_bytes - parts.peak_bytes == parts.weights_bytes


def test_compiled_code_is_traced_without_the_compiler_and_noted(trace: Trace) -> None:
    memory = trace(SCRIPT.replace("model.to(device)", "model.to(device); model = torch.compile(model)"))
    assert memory.compiling == ("train.py:10",)
    assert parts_of(memory) == parts_of(trace())


def in_ddp(options: str = "") -> str:
    """Return the script as a rank of several."""
    lines = (
        "import os; rank = int(os.environ.get('LOCAL_RANK', 0))",
        "torch.distributed.init_process_group('nccl', rank=rank, world_size=4)",
        "torch.cuda.set_device(rank)",
        f"model = nn.parallel.DistributedDataParallel(model, device_ids=[rank]{options})",
    )
    text = SCRIPT.replace("data = ", "\n".join([*lines, "data = "]), 1)
    gathered = (
        "found = [None] * torch.distributed.get_world_size()",
        "torch.distributed.all_gather_object(found, [step])",
    )
    return text + "\n    ".join(
        ["    torch.distributed.all_reduce(loss.detach())", *gathered, "assert found[-1] == [step]"]
    )


def test_a_rank_holds_its_gradients_twice_unless_they_are_views_of_buckets(trace: Trace) -> None:
    alone, twice, views = map(
        parts_of, (trace(), trace(in_ddp()), trace(in_ddp(", gradient_as_bucket_view=True, static_graph=True")))
    )
    assert alone.gradients_bytes == views.gradients_bytes == WEIGHTS
    assert twice.gradients_bytes == 2 * WEIGHTS
    assert twice.peak_bytes - alone.peak_bytes == pytest.approx(WEIGHTS, abs=2048)


def test_a_launcher_s_first_rank_is_traced_in_a_group_of_as_many_as_it_starts(trace: Trace) -> None:
    text = in_ddp().replace(
        "data = ", "assert torch.distributed.get_world_size() == torch.cuda.device_count() == 3\ndata = ", 1
    )
    assert parts_of(trace(text, launcher=("torchrun", "--nproc-per-node", "3"))) == parts_of(trace(in_ddp()))


def test_weights_that_are_shared_out_among_ranks_are_refused(trace: Trace) -> None:
    text = in_ddp().replace("data = ", "from torch.distributed.fsdp import fully_shard\nfully_shard(model)\ndata = ", 1)
    with pytest.raises(TrialFailedError, match="FSDP shares out the weights, which is not traced"):
        trace(text)


def test_a_script_that_takes_no_step_says_what_is_waited_for_and_ends(trace: Trace) -> None:
    notes: list[str] = []
    with pytest.raises(
        TrialFailedError, match=r"took no optimizer step within 1\.8 s\. Give it more time with --timeout\.$"
    ):
        trace("import time\nwhile True:\n    time.sleep(0.1)\n", limit=2.0, on_note=notes.append)
    assert [note.partition(",")[0] for note in notes] == ["waiting for step 1 of train.py"]


def test_weights_in_16_bits_that_a_precision_widens_or_leaves_are_noted(trace: Trace) -> None:
    narrow = SCRIPT.replace("model.to(device)", "model.to(device, torch.bfloat16)")
    memory = trace(narrow, precision="fp32")
    assert parts_of(memory).weights_bytes == WEIGHTS
    assert memory.notes == ("fp32: its weights, in bfloat16 by train.py:10, are trained in float32",)
    assert (
        parts_of(trace(narrow.replace("inputs.to(device", "inputs.to(device, torch.bfloat16"))).weights_bytes
        == WEIGHTS // 2
    )
    lines = (
        "model[0].bfloat16().requires_grad_(False)",
        "model[0].register_forward_pre_hook(lambda _, given: (given[0].bfloat16(),))",
        "model[0].register_forward_hook(lambda _, given, made: made.float())",
    )
    frozen = SCRIPT.replace("optimizer = ", "\n".join([*lines, "optimizer = "]), 1)
    assert trace(frozen, precision="fp32").notes == ("fp32: its frozen weights stay in bfloat16",)
    assert trace(frozen).notes == ()


PACKED = """\
import torch
from torch import nn
from torch.nn.utils import rnn
layer = nn.KIND(8, 16, num_layers=2, batch_first=True).cuda()
optimizer = torch.optim.SGD(layer.parameters())
lengths = torch.tensor([3, 7, 5])
for _ in range(3):
    data = torch.randn(3, 7, 8, device="cuda")
    packed = rnn.pack_padded_sequence(data, lengths, batch_first=True, enforce_sorted=False) if PACKS else data
    output, _ = layer(packed)
    if PACKS:
        assert output.data.shape == (15, 16)
        output, found = rnn.pad_packed_sequence(output, batch_first=True)
        assert found.tolist() == [3, 7, 5]
    optimizer.zero_grad()
    output.square().sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_packed_sequences_hold_what_padded_ones_do_and_their_rows(trace: Trace, kind: str) -> None:
    text = PACKED.replace("KIND", kind)
    packed, padded = (trace(text.replace("PACKS", str(packs))).batches.popitem()[1] for packs in (True, False))
    assert 0 <= packed.saved_bytes - padded.saved_bytes <= 4096
    assert packed.weights_bytes == padded.weights_bytes > 0


def test_a_script_that_trains_on_the_cpu_is_told_so_without_options_that_fits_lacks(trace: Trace) -> None:
    with pytest.raises(
        TrialFailedError,
        match=r"train\.py trains on cpu, .* a GPU, which it sees. Give it its argument for that",
    ):
        trace(SCRIPT.replace('torch.device("cuda")', 'torch.device("cpu")'))


def test_a_script_that_asks_for_its_gpu_is_noted_with_the_line(trace: Trace) -> None:
    asking = SCRIPT.replace("data = ", "assert torch.cuda.get_device_capability() >= (8, 0)\ndata = ", 1)
    said = "train.py:11 asks which GPU it has, and sees an H100, whatever --gpu names"
    assert trace(asking).notes == (said,)
    assert trace().notes == ()


def test_a_script_without_a_loader_has_its_model_s_batch_and_its_lone_weights_are_no_masters(trace: Trace) -> None:
    lone = SCRIPT.replace("optimizer = torch.optim.Adam(model.parameters())\n", "").replace(
        "model.to(device)\n",
        f"model.to(device)\nscale = nn.Parameter(torch.ones({WIDTH}, device=device))\n"
        "optimizer = torch.optim.Adam([*model.parameters(), scale])\n",
    )
    lone = lone.replace(f"DataLoader(data, batch_size={BATCH}, pin_memory=True)", f"[data[:{BATCH}]] * 4")
    lone = lone.replace("    assert inputs[1, 0]", "    0 and inputs[1, 0]").replace(
        "output = model(", "output = scale * model("
    )
    parts = parts_of(trace(lone))
    assert (parts.weights_bytes, parts.masters_bytes) == (WEIGHTS + 4 * WIDTH, 0)
