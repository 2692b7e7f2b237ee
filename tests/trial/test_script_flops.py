"""FLOPs of scripts as they are: exactly those counted by hand, in their formats, and without a change to the script."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from castwise.records.schema import StepFlops

pytestmark = pytest.mark.xdist_group("hooked scripts")
TESTS = Path(__file__).parents[1]

_LOOP = """
import torch, torch.utils.flop_counter
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
MODEL
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for _ in range(40):
    LOSS.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_ATTENTION = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.qkv, self.out, self.head = nn.Embedding(9, 16), *(nn.Linear(16, n) for n in (48, 16, 9))
    def forward(self, tokens):
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).view(2, 7, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x + self.out(y))
net = Net()
"""
_MIXED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5).double()
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.a(x)
            with torch.autocast("cpu", enabled=False):
                x = self.b(x.float())  # in float32
        return self.c(x.double())  # in float64
net = Net()
"""
_ARGMAX = "torch.zeros(4, dtype=torch.int64)"
_MLP = "nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))"
_COMPILED = f"net = {_MLP}\nrun = torch.compile(net, backend='aot_eager')"
_CONV = """
net = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2), nn.Flatten(), nn.Linear(64, 5)
)
"""
_LSTM = "net = nn.LSTM(6, 8)"
SCRIPTS = {
    "mlp": (f"net = {_MLP}", "F.mse_loss(net(torch.randn(4, 6)), torch.zeros(4, 5))"),
    "accumulates": (
        f"net = {_MLP}\nfor _ in 1, 2: pass",
        "(net(torch.randn(4, 6)).sum() + net(torch.randn(3, 6)).sum())",
    ),
    "conv": (_CONV, f"F.cross_entropy(net(torch.randn(4, 3, 10, 10)), {_ARGMAX})"),
    "attention": (_ATTENTION, "net(torch.randint(9, (2, 7))).sum()"),
    "lstm": (_LSTM, "net(torch.randn(7, 3, 6))[0].sum()"),
    "mixed": (_MIXED, "net(torch.randn(4, 6)).sum()"),
    "compiled": (_COMPILED, "run(torch.randn(4, 6)).sum()"),
    "misaligned": (f"net = {_MLP}.bfloat16()", "net(torch.randn(4, 6).bfloat16()).square().sum()"),
    "aligned": ("net = nn.Linear(16, 8).bfloat16()", "net(torch.randn(5, 16).bfloat16()).sum()"),
    "within-a-mode": (
        f"net = {_MLP}\ntorch.utils.flop_counter.FlopCounterMode(display=False).__enter__()",
        "net(torch.randn(4, 6)).sum()",
    ),
    "functional": (
        f"net = {_MLP}",
        "(net(torch.randn(4, 6)).sum() + 0 * torch.func.grad(torch.sum)(torch.ones(2)).sum())",
    ),
}
# Multiply-adds of the forward pass, of the gradients of weights and of those of inputs that have one.
MLP = 4 * (2 * 6 * 8 + 3 * 8 * 5)
CONV = 4 * (2 * 8 * 10 * 10 * 3 * 9 + 3 * 4 * 4 * 4 * 8 * 9)
TOKENS = 2 * 7
ATTENTION = 3 * TOKENS * 16 * (48 + 16 + 9), 3 * 2 * 2 * 2 * 7 * 7 * 8
LSTM = 2 * 3 * 7 * 3 * 4 * 8 * (6 + 8), 2 * 3 * 4 * 8 * (7 * (2 * 6 + 3 * 8) - 8)


@pytest.fixture(scope="module")
def flops(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StepFlops]:
    folder, jobs = tmp_path_factory.mktemp("scripts"), []
    for name, (model, loss) in SCRIPTS.items():
        (folder / f"{name}.py").write_text(_LOOP.replace("MODEL", model).replace("LOSS", loss))
        jobs.append((str(folder / f"{name}.py"), "flops", "as-written"))
    command = [sys.executable, str(TESTS / "hooked_scripts.py"), json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return {
        name: StepFlops.model_validate_json(each) for name, each in zip(SCRIPTS, json.loads(done.stdout), strict=True)
    }


def test_the_flops_of_scripts_are_those_by_hand(flops: dict[str, StepFlops]) -> None:
    found = {name: each.products for name, each in flops.items() if not each.missing}
    lstm = sum(found.pop("lstm")["recurrent" if "recurrent" in flops["lstm"].products else "linear"].values())
    assert lstm in LSTM, "whether the library has a kernel for it"
    assert found == {
        "mlp": {"linear": {"fp32": 2 * MLP}},
        "accumulates": {"linear": {"fp32": 2 * MLP * 7 // 4}},
        "conv": {"convolution": {"fp32": 2 * CONV}, "linear": {"fp32": 2 * 4 * 3 * 64 * 5}},
        "attention": {"linear": {"fp32": 2 * ATTENTION[0]}, "attention": {"fp32": 2 * ATTENTION[1]}},
        "mixed": {"linear": {"bf16": 2 * 4 * 2 * 6 * 8, "fp32": 2 * 4 * 3 * 8 * 8, "fp64": 2 * 4 * 3 * 8 * 5}},
        "compiled": {"linear": {"fp32": 2 * MLP}},
        "misaligned": {"linear": {"bf16": 2 * MLP}},
        "aligned": {"linear": {"bf16": 2 * 5 * 2 * 16 * 8}},
    }


def test_what_float32_and_float64_products_cost_has_their_lines(flops: dict[str, StepFlops]) -> None:
    file = [line.strip() for line in _LOOP.replace("MODEL", _MIXED).splitlines()]
    lines = {
        name: [file[int(each.partition(":")[2]) - 1] for each in found] for name, found in flops["mixed"].lines.items()
    }
    assert lines == {
        "fp32": ["x = self.b(x.float())  # in float32"],
        "fp64": ["return self.c(x.double())  # in float64"],
    }
    assert flops["misaligned"].lines == {}


def test_products_of_misaligned_rows_are_told_by_strides(flops: dict[str, StepFlops]) -> None:
    odd = flops["misaligned"]
    assert odd.misaligned_flops == odd.total == 2 * MLP
    assert set(odd.misaligned_shapes) == {(4, 6), (6, 8)}
    assert flops["aligned"].misaligned_flops == flops["mlp"].misaligned_flops == 0


def test_bytes_are_those_of_weights_gradients_and_what_is_saved(flops: dict[str, StepFlops]) -> None:
    found, weights = flops["mlp"], 4 * (6 * 8 + 8 + 8 * 5 + 5)
    assert (found.weights_bytes, found.gradients_bytes, found.update_bytes) == (weights, weights, weights)
    assert found.saved_bytes == 4 * 4 * (6 + 8 + 2 * 5), "what layers and loss read in backward"


@pytest.mark.parametrize(("name", "reason"), [("within-a-mode", "of its own"), ("functional", "torch.func")])
def test_a_script_that_cannot_be_counted_says_why(flops: dict[str, StepFlops], name: str, reason: str) -> None:
    assert flops[name].total == 0
    assert flops[name].missing.startswith("its products could not be counted: RuntimeError: ")
    assert reason in flops[name].missing
