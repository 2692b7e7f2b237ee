"""Scripts as they are, hooked: the losses as alone, and in another precision those of a script changed by hand."""

import copy
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from castwise.trial.script.hooks import _num_samples
from castwise.trial.script.run import extra_work

pytestmark = pytest.mark.xdist_group("hooked scripts")  # one process runs them
TESTS = Path(__file__).parents[1]
SCRIPTS = {
    file.stem: ("bf16",) if file.stem in ("transformers_trainer", "accelerate_loop") else ("bf16", "fp16")
    for file in sorted((TESTS / "training_scripts").glob("*.py"))
    if file.stem != "by_hand"
}  # with the precisions that each has itself on a CPU
NUM_STEPS = 8
# Losses of a few steps on the same weights in 16 bits. The hooked run takes no other products, so they differ by what
# rounding in another order does. Source: chosen here.
_ROUNDING = 0.02


# What scripts do themselves, by their own precision: autocasts and GradScalers with their lines, and the framework.
OWN = {
    "own_amp": {
        "none": ({}, ""),
        "bf16": ({"autocast bfloat16": "@torch.autocast("}, ""),
        "fp16": ({"autocast float16": "@torch.autocast(", "GradScaler": "return torch.amp.GradScaler("}, ""),
    },
    "lightning_module": {"bf16": ({"GradScaler": "own = ", "autocast bfloat16": ".fit("}, "Lightning")},
    "accelerate_loop": {"none": ({}, "Accelerate")},
    "transformers_trainer": {"none": ({}, "transformers")},
}


def job(name: str, how: str, amp: str) -> tuple[str, str, str]:
    return str(TESTS / "training_scripts" / f"{name}.py"), how, amp


@pytest.fixture(scope="module")
def losses() -> dict[tuple[str, str, str], list[list[float]]]:
    """Return the losses of the first steps by script, precision ("alone": not hooked) and own precision."""
    ways = {name: [("alone", each) for each in ("none", *own)] for name, own in SCRIPTS.items()}
    for name, own in SCRIPTS.items():
        ways[name] += [(how, amp) for how in ("as-written", "fp32") for amp in ("none", own[-1])]
        ways[name] += [("bf16-mixed", "none"), ("fp16-mixed", "bf16")]
        ways[name] += [("own", each) for each in OWN.get(name, ())]
    jobs = [(name, how, amp) for name in SCRIPTS for how, amp in ways[name]]
    command = [sys.executable, str(TESTS / "hooked_scripts.py"), json.dumps([job(*each) for each in jobs])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(jobs, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize(("name", "amp"), [(name, amp) for name, expected in OWN.items() for amp in expected])
@pytest.mark.slow
def test_what_a_script_does_itself_is_recorded_with_its_lines(losses, name, amp):
    expected, framework = OWN[name][amp]
    found, by, _ = json.loads(losses[name, "own", amp])
    assert (found.keys(), by) == (expected.keys(), framework)
    for kind, text in expected.items():
        (place,) = found[kind]
        file, _, number = place.partition(":")
        assert text in (TESTS / "training_scripts" / file).read_text().splitlines()[int(number) - 1]


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.slow
def test_hooked_losses_are_bit_identical_to_those_of_the_script_alone(losses, name):
    for hooked, alone in [("as-written", "none"), ("as-written", SCRIPTS[name][-1]), ("fp32", "none")]:
        found = losses[name, hooked, alone]
        # The script logs a step's loss after the step, in which it is stopped; some log each of its batches.
        assert found == losses[name, "alone", alone][: len(found)]
        assert len(found) >= NUM_STEPS - 1
    assert losses[name, "fp32", SCRIPTS[name][-1]] == losses[name, "fp32", "none"], "its own precision is replaced"


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(("precision", "amp", "own"), [("bf16-mixed", "bf16", "none"), ("fp16-mixed", "fp16", "bf16")])
@pytest.mark.slow
def test_mixed_precision_from_outside_agrees_with_the_script_changed_by_hand(losses, name, precision, amp, own):
    """Transformers and Accelerate have no fp16 on a CPU: their losses agree with those in float32, and are others."""
    by_hand = losses[name, "alone", amp if amp in SCRIPTS[name] else "none"]
    hooked = losses[name, precision, own]
    assert len(hooked) >= NUM_STEPS - 1
    for ours, theirs in zip(hooked, by_hand, strict=False):
        assert ours == pytest.approx(theirs, rel=_ROUNDING)
    assert hooked != losses[name, "fp32", "none"], "it is another precision"


_SHARDED = """
import runpy, sys, torch, torch.distributed as dist
sys.path.insert(0, {folder!r})
from by_hand import autocast, log
shard = runpy.run_path({folder!r} + "/{kind}.py")["shard"]
dist.init_process_group("gloo")
torch.manual_seed(9)
model = shard(torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    optimizer.zero_grad()
    with autocast():
        out = model(torch.ones(2, 8)).float()
    # Only the gradient of the first row overflows, which one rank holds.
    (out[:, 0].mean() * (2e34 if step % 3 == 1 else 1.0) + out[:, 7].mean()).backward()
    optimizer.step()
    own = [each.to_local() if hasattr(each, "to_local") else each for each in model.parameters()]
    totals = [torch.zeros(()), torch.zeros(())]
    dist.all_gather(totals, sum(each.detach().sum() for each in own))
    log(*totals)
"""


@pytest.mark.parametrize("kind", ["fsdp", "fsdp2"])
@pytest.mark.slow
def test_ranks_skip_a_step_together_though_one_holds_the_gradient_that_overflows(kind, tmp_path):
    file = tmp_path / f"{kind}.py"
    file.write_text(_SHARDED.format(folder=str(TESTS / "training_scripts"), kind=kind))
    jobs = [(str(file), how, "none") for how in ("fp32", "fp16-mixed")]
    command = [sys.executable, str(TESTS / "hooked_scripts.py"), json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plain, scaled = json.loads(done.stdout.splitlines()[-1])
    assert not any(before[1] == after[1] for before, after in itertools.pairwise(plain))
    pairs = list(itertools.pairwise(scaled))
    assert any(before == after for before, after in pairs), "no step was skipped"
    assert all((before[0] == after[0]) == (before[1] == after[1]) for before, after in pairs)


@pytest.mark.slow
def test_lightning_validates_in_the_precision_as_it_does_by_itself(losses):
    hooked = losses["lightning_module", "bf16-mixed", "none"]
    by_hand = losses["lightning_module", "alone", "bf16"]
    assert hooked == by_hand[: len(hooked)]
    assert hooked[-1][1] != losses["lightning_module", "fp32", "none"][len(hooked) - 1][1], "its second value is that"


_STEP = """
import itertools, os, sys, time, torch
from torch.utils.data import DataLoader
w = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
def step():
    w(torch.randn(5, 3)).sum().backward()
    optimizer.step()
"""


_FUSED = "optimizer = torch.optim.SGD(w.parameters(), lr=0.1, fused=True)"
_OVERFLOW = """
scaler = torch.amp.GradScaler("cpu", init_scale=3e38, growth_interval=3)
while True:
    loss = 1e30 * w(torch.ones(5, 3)).sum()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


# Like tokenizers and h5py, which open files without Python.
_LIBRARIES_IN_C = """
import ctypes, types
libc = ctypes.CDLL(None)
class Tokenizer:
    def save(self, path):
        if libc.creat(path.encode(), 0o644) < 0: raise Exception("No such file or directory (os error 2)")
tokenizers, h5f = types.ModuleType("tokenizers"), types.ModuleType("h5py.h5f")
tokenizers.Tokenizer = Tokenizer
h5f.create = lambda name, flags: min(0, libc.creat(name, 0o644))
h5f.open = lambda name, flags: min(0, libc.open(name, flags))
LOADED = {"tokenizers": tokenizers, "h5py.h5f": h5f}
from importlib.machinery import ModuleSpec, PathFinder
class Loader:
    def create_module(self, spec): return LOADED[spec.name]
    def exec_module(self, module): pass
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *others: ModuleSpec(name, Loader()) if name in LOADED else find(name, *others)
sys.modules["h5py"] = types.ModuleType("h5py")
sys.modules["h5py"].__path__ = []
from tokenizers import Tokenizer
from h5py import h5f
"""
# As accelerate.commands.launch.
_LAUNCHER = """
import os, sys
def prepare_simple_launcher_cmd_env(words): return [sys.executable, *words], os.environ | {"OF_LAUNCHER": words[-1]}
def simple_launcher(words): raise AssertionError
def launch_command(words): simple_launcher(words)
"""
# A library's training loop, and its layer: only the first may have its autocast switched on.
_LIBRARY = """
import torch
def autocast(enabled): return torch.autocast("cpu", torch.bfloat16, enabled=enabled)
def train(model, x, amp):
    with autocast(amp): return model(x)
def train_off(model, x, amp):
    with autocast(enabled=False): return model(x)
class Layer(torch.nn.Linear):
    amp = False
    def forward(self, x):
        with autocast(self.amp): return super().forward(x)
"""
_OF_LIBRARY = """
sys.path.insert(0, "site-packages")
from of_library import Layer, train, train_off
seen = []
w.register_forward_hook(lambda module, args, y: seen.append(y.dtype), prepend=True)
CALL
raise ValueError(*seen)
"""
_CALLS = {
    "trainer": "train(w, torch.randn(5, 3), False)",
    "trainer-off": "train_off(w, torch.randn(5, 3), False)",
    "layer": """
w = Layer(3, 1)
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
seen.append(w(torch.randn(5, 3)).dtype)
""",
}


_EVALUATE = """
import copy
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = torch.nn.Linear(3, 1)
    def forward(self, x):
        y = self.part(x)
        self.seen = y.dtype
        return {"y": y, "exact": x.double()}
w = Model()
MARK
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
y = w(torch.randn(5, 3))["y"]
y.sum().backward()
optimizer.step()
found = [w.seen, y.dtype]
for model in (w, copy.deepcopy(w)):
    output = model.eval()(torch.randn(5, 3))
    found += [model.seen, output["y"].dtype, output["exact"].dtype, torch.is_autocast_enabled("cpu")]
seen = []
w.part.register_forward_hook(lambda module, args, output: seen.append(output.dtype), prepend=True)
found += [w.part(torch.randn(5, 3)).dtype, *seen, torch.is_autocast_enabled("cpu")]
raise ValueError(*found)
"""


# Lightning's own file of strategies takes seconds to import.
_LIGHTNING = """
import types
class Strategy:
    def validation_step(self):
        return w(torch.randn(5, 3)).dtype, torch.is_autocast_enabled("cpu")
    training_step = test_step = predict_step = validation_step
sys.modules["pytorch_lightning.strategies.strategy"] = types.SimpleNamespace(Strategy=Strategy)
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
step()
w.eval()
raise ValueError(*Strategy().training_step(), *Strategy().test_step(), torch.is_autocast_enabled("cpu"))
"""


_SECOND = """
other = torch.nn.Linear(3, 1)
second = torch.optim.SGD(other.parameters(), lr=0.1)
for number in range(99):
    step()
    if WHEN:
        other(torch.randn(5, 3)).sum().backward()
        second.step()
"""


# It looks at a batch of the validation data, without `no_grad`, as CycleGAN's scripts do.
_PREVIEWS = """
data, validation = DataLoader(torch.randn(64, 3), batch_size=4), DataLoader(torch.randn(14, 3), batch_size=7)
for number, x in enumerate(itertools.chain.from_iterable(itertools.repeat(data))):
    w.train()
    w(x).sum().backward()
    optimizer.step()
    if number % 3 == 0:
        y = next(iter(validation))
        w.eval()
        w(y)
"""


# A checkpoint of its own, as that of guided-diffusion.
_CUSTOM = "@torch.amp.custom"
_RECOMPUTES = """
class Checkpoint(torch.autograd.Function):
    @staticmethod
    FWD
    def forward(ctx, x, *weights):
        ctx.x, ctx.weights = x, weights
        with torch.no_grad(): return w.part(x)
    @staticmethod
    BWD
    def backward(ctx, grad):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad(): y = w.part(x)
        return torch.autograd.grad(y, [x, *ctx.weights], grad)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.part = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    def forward(self, x): return Checkpoint.apply(self.first(x), *self.part.parameters())
w = Model()
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
for _ in range(99): step()
"""


# Gradients are clipped once without a step, and once dropped; a step overflows and is skipped if there is a loss scale.
_MASTERS = """
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
net[0].bias.requires_grad_(False)
adam = torch.optim.AdamW(net.parameters(), lr=0.05)
found = []
def train():
    loss = net(torch.randn(6, 3)).square().mean() * (FACTOR if len(found) == 4 else 0.01)
    found.append(loss.item())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    return loss
for number in range(9):
    if CLOSURE:
        adam.step(train)
    else:
        train()
        if number == 2:
            net.eval()(torch.ones(2, 3))
            net.train()
            continue
        if number != 6:
            adam.step()
    adam.zero_grad()
output = net(torch.ones(2, 3)).dtype
raise ValueError(*found, net[0].weight.dtype, net[1].weight.dtype, output)
"""


def losses_with_masters(dtype: torch.dtype, factor: float, *, has_closure: bool) -> list[float]:
    """Return the losses of _MASTERS by hand: the masters are a model of their own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    net[0].bias.requires_grad_(False)
    adam, scaler = torch.optim.AdamW(net.parameters(), lr=0.05), torch.amp.GradScaler("cpu", enabled=factor > 1)
    low, found = net, list[float]()
    for number in range(9):
        x = torch.randn(6, 3)
        y = low(x) if low is net else low(x.to(dtype)).float()
        loss = y.square().mean() * (factor if number == 4 else 0.01)
        found.append(loss.item())
        scaler.scale(loss).backward()
        pairs = [pair for pair in zip(net.parameters(), low.parameters(), strict=True) if pair[1].grad is not None]
        for master, weight in pairs:
            master.grad = weight.grad.float()
        if number == 2 and not has_closure:
            for master, _ in pairs:
                master.grad /= scaler.get_scale()
            nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            for master, weight in pairs:
                weight.grad = (master.grad * scaler.get_scale()).to(weight.dtype)
            continue
        scaler.unscale_(adam)
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        if number != 6 or has_closure:
            scaler.step(adam)
        scaler.update()
        adam.zero_grad()
        low = copy.deepcopy(net)
        low[0].to(dtype)
        low[3].to(dtype)
    return found


# Weights in bfloat16, of which those of a norm are too large for what a step adds.
_LOW = """
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1)).bfloat16()
adam = torch.optim.AdamW(net.parameters(), lr=1e-3)
found = []
for number in range(99):
    loss = net(torch.randn(6, 3).bfloat16()).float().square().mean()
    found.append(loss.item())
    loss.backward()
    adam.step()
    adam.zero_grad()
    if number == 6 and RAISES: raise ValueError(*found, net[1].weight.dtype)
"""
# An adapter on a layer that is frozen in bfloat16, and of a package that quantises.
_QUANTISED = """
base = torch.nn.Linear(3, 3).bfloat16().requires_grad_(not FROZEN)
base.__class__ = type("Float8Linear", (torch.nn.Linear,), {"__module__": "torchao.float8"})
class Adapted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.adapter = base, torch.nn.Linear(3, 3)
    def forward(self, x): return self.base(x.bfloat16()) + self.adapter(x)
w = Adapted()
optimizer = torch.optim.SGD([each for each in w.parameters() if each.requires_grad], lr=0.1)
for _ in range(99): step()
"""


def losses_of_low(precision: str) -> list[float]:
    """Return the losses of _LOW by hand, with float32 in the places of its weights."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 1)).bfloat16().float()
    adam, found = torch.optim.AdamW(net.parameters(), lr=1e-3), list[float]()
    for _ in range(7):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = net(torch.randn(6, 3).bfloat16().float()).float().square().mean()
        found.append(loss.item())
        loss.backward()
        adam.step()
        adam.zero_grad()
    return found


# An optimizer that is none of torch.optim's, whose rate grows with its steps; one loss overflows in float16.
_OWN_OPTIMIZER = """
class Rule:
    def __init__(self, params): self.groups, self.rate = {"all": (list(params),)}, 0.01
    def step(self):
        for each in self.groups["all"][0]: each.data -= self.rate * each.grad
        self.rate *= 1.5
del optimizer
torch.manual_seed(0)
w, found = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)), []
rule = Rule(w.parameters())
for number in range(99):
    loss = w(torch.randn(6, 3)).square().mean() * (1e36 if number % 8 == 4 and OVERFLOWS else 1)
    found.append(loss.item())
    loss.backward()
    if number == 6 and RAISES: raise ValueError(*found)
    rule.step()
    w.zero_grad()
"""
# As Keras has it: its optimizers, and its layers' mixed precision.
_KERAS = {
    "optimizers/base_optimizer": """
class BaseOptimizer:
    def build(self, variables): self.variables = variables
    def apply(self, gradients):
        for each, gradient in zip(self.variables, gradients): each.value.data -= 0.1 * gradient
""",
    "optimizers/loss_scale_optimizer": """
import torch
from .base_optimizer import BaseOptimizer
class LossScaleOptimizer(BaseOptimizer):
    def __init__(self, inner): self.inner_optimizer, self.scale = inner, 2.0**120
    def apply(self, gradients):
        if all(each.isfinite().all() for each in gradients):
            self.inner_optimizer.apply([each / self.scale for each in gradients])
        else: self.scale /= 2
""",
    "dtype_policies/dtype_policy": """
import types
kept = {}
global_state = types.SimpleNamespace(get_global_attribute=kept.get)
class DTypePolicy:
    def __init__(self, name=None):
        self.name, self.compute_dtype = name, name.removeprefix("mixed_")
        self.variable_dtype = name if name == self.compute_dtype else "float32"
def set_dtype_policy(name): kept["dtype_policy"] = DTypePolicy(name)
def dtype_policy():
    if not kept: set_dtype_policy("float32")
    return kept["dtype_policy"]
""",
    "backend/torch/layer": """
import torch
from keras.src.dtype_policies.dtype_policy import dtype_policy
class Layer(torch.nn.Linear):
    compute_dtype = property(lambda self: dtype_policy().compute_dtype)
    def forward(self, x):
        assert not torch.is_autocast_enabled("cpu")
        return (x.to(getattr(torch, self.compute_dtype)) * self.weight.sum()).float()
""",
}
_OF_KERAS = """
sys.path.insert(0, "site-packages")
import types
from keras.src.backend.torch.layer import Layer
from keras.src.dtype_policies import dtype_policy
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
if OWN: dtype_policy.set_dtype_policy("mixed_float16")
del optimizer
w, inner = Layer(3, 1, bias=False), BaseOptimizer()
rule = LossScaleOptimizer(inner) if dtype_policy.dtype_policy().name == "mixed_float16" else inner
inner.build([types.SimpleNamespace(value=w.weight)])
for _ in range(99):
    (w(torch.ones(5, 3)).sum() * getattr(rule, "scale", 1)).backward()
    rule.apply([w.weight.grad])
    w.zero_grad()
    if RAISES: raise ValueError(dtype_policy.dtype_policy().name)
"""


def losses_of_own_optimizer(precision: str) -> list[float]:
    """Return the losses of _OWN_OPTIMIZER by hand."""
    torch.manual_seed(0)
    net, found, rate = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), list[float](), 0.01
    dtype = torch.float16 if precision == "fp16-mixed" else torch.bfloat16
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16-mixed")
    groups = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(7):
        with torch.autocast("cpu", dtype, enabled=precision.endswith("mixed")):
            y = net(torch.randn(6, 3))
        loss = y.float().square().mean() * (1e36 if number == 4 and precision == "fp16-mixed" else 1)
        found.append(loss.item())
        scaler.scale(loss).backward()
        scaler.unscale_(groups)
        if all(each.grad.isfinite().all() for each in net.parameters()):
            for each in net.parameters():
                each.data -= rate * each.grad
            rate *= 1.5
        if precision == "fp16-mixed":
            groups.step = lambda: None
            scaler.step(groups)
        scaler.update()
        net.zero_grad()
    return found


# A model that computes a loss, beside outputs that a loss may be computed of.
_BESIDE = """
class Both(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y.float().mean(), y
w = Both(3, 1)
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
for number in range(99):
    loss, y = w(torch.randn(5, 3))
    if number == 9: raise ValueError(y.dtype)
    (LOSS).backward()
    optimizer.step()
"""


# How scripts compute gradients without a call of Tensor.backward.
_GRADIENTS = """
from torch.utils.checkpoint import checkpoint
x = torch.ones(5, 3, requires_grad=True)
for _ in range(99):
    optimizer.zero_grad()
    HOW
    optimizer.step()
raise ValueError(w.weight.grad.tolist(), w.bias.grad.item())
"""


# Work that takes time now and then, in which the model that is trained is called without gradients.
_ROLLOUTS = """
@torch.no_grad()
def roll_out():
    for _ in range(20):
        w(torch.randn(1, 3))
        started = time.thread_time()
        while time.thread_time() < started + 0.005: pass
"""
_PPO = f"""{_ROLLOUTS}
while True:
    roll_out()
    for _ in range(320): step()
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what castwise says of scripts: of the second half when it measures them, each in a precision."""
    endings = {
        "raises": "raise ValueError('no such file')",
        "no-step": "",
        "exits": "step(); sys.exit(3)",
        "waits": """
import subprocess
subprocess.run([sys.executable, "-c", ""])
subprocess.run([sys.executable, "-u", "child.py", "--lr", "1"])
time.sleep(60)
""",
        "starts-by-a-shell": "os.system(f'cd . && {sys.executable} -m package.train')",
        "asks": "import io; sys.stdin = io.StringIO(''); step(); input()",
        "forks": """
if not os.fork():
    for _ in range(3): step()
    os._exit(0)
os.wait()
for _ in range(3): step()
""",
        "meets": """
import socket
taken = socket.create_server(("127.0.0.1", 0))
port = str(taken.getsockname()[1])
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}
torch.distributed.init_process_group("gloo")
torch.distributed.all_reduce(torch.ones(1))
for _ in range(3): step()
""",
        "swallows": """
while True:
    try: step()
    except: pass
""",
        "swallows-it-all": """
try:
    while True: step()
except BaseException: pass
time.sleep(3600)
open('model.pt', 'w').write('overwritten')
""",
        "saves": """
from safetensors.torch import save_file
for _ in range(3): step(); torch.save(w.state_dict(), f='model.pt'); save_file(w.state_dict(), 'model.safetensors')
""",
        "saves-and-loads": """
import shutil
from safetensors.torch import load_file, save_file
save_file({'one': torch.ones(1)}, 'one.safetensors')
torch.save([1], 'part.pt')
os.replace('part.pt', 'last.pt')
shutil.copy('last.pt', 'part.pt')
shutil.move('part.pt', 'best.pt')
assert torch.load('best.pt') == torch.load(f='last.pt') == [load_file(filename='one.safetensors')['one'].item()]
os.remove('last.pt')
assert torch.load('best.pt') == [1]
for _ in range(3): step()
""",
        "writes": """
import glob, pathlib, sqlite3, tempfile
from safetensors import safe_open
from safetensors.torch import save_file
run = pathlib.Path("runs", "one")
run.mkdir(parents=True)
(run / "config.json").write_text("{}")
with open("log.txt", "a") as log: log.write("+")
assert open("log.txt").read() == "kept+" and open(run / "config.json").read() == "{}"
with tempfile.NamedTemporaryFile(dir=run, delete=False) as new: new.write(b"")  # as ignite's checkpoints are written
os.replace(new.name, run / "new")
with tempfile.NamedTemporaryFile(delete=False) as new: new.write(b"")
assert tempfile.mkdtemp(b"", b"a").startswith(os.fsencode(os.path.dirname(new.name)))
os.remove(run / "new")
torch.save([1], run / "last.pt")
assert os.path.exists(run / "last.pt") and torch.load(run / "last.pt", mmap=True) == [1]
save_file({"one": torch.ones(1)}, run / "one.safetensors")
with safe_open(run / "one.safetensors", framework="pt") as file: assert list(file.keys()) == ["one"]
sqlite3.connect(run / "study.db").execute("create table trial (number int)")
assert sorted(os.listdir(run)) == ["config.json", "last.pt", "one.safetensors", "study.db"]
assert [each.name for each in run.glob("*.pt")] == ["last.pt"]
assert glob.glob("r*/*/l*") == ["runs/one/last.pt"]
with open(b"runs/one/events", "wb") as file: file.write(b"1")
assert os.path.exists(b"runs/one/events") and os.path.getsize("runs/one/events") == 1
os.remove("runs/one/events")
os.remove("old/a.txt")
assert os.listdir("old") == ["b.txt"] and not os.path.exists("old/a.txt")
os.rename("old", "older")
assert open("older/b.txt").read() == "kept" and not os.path.exists("old")
os.mkdir("old")
assert os.listdir("old") == []
os.makedirs(os.path.expanduser("~/.tool/cache"), exist_ok=True)
with open(os.path.expanduser("~/.tool/cache/kernel"), "w") as file: file.write("kept")
os.symlink("one", "runs/latest")
os.chdir("runs/latest")
assert torch.load("last.pt") == [1] and open("../../log.txt").read() == "kept+"
for _ in range(99): step()
""",
        "writes-in-c": _LIBRARIES_IN_C
        + """
os.mkdir("made")
for name in ("made/tokenizer.json", "log.txt"):
    Tokenizer().save(name)
    assert os.path.getsize(name) == 0
for name, flags in ((b"made/new.h5", 4), (b"old/a.txt", 2)):
    assert h5f.create(name, flags=flags) == 0 and os.path.getsize(name) == 0
assert h5f.open(b"made/new.h5", 0) == h5f.open(b"old/b.txt", 0) == 0 > h5f.open(b"made/other", 0)
for _ in range(99): step()
""",
        "launches-itself": """
sys.path.insert(0, "site-packages")
from accelerate.commands.launch import launch_command
launch_command(["launched.py", "7"])
""",
        "updates": """
for _ in range(99):
    w(torch.randn(5, 3)).sum().backward()
    with torch.no_grad():
        for each in w.parameters(): each -= 0.1 * each.grad
""",
        "compiles": """
teacher = torch.nn.Linear(3, 3)
@torch.compile(backend="eager")
def augment(x): return 2 * x
class Trainer:
    def __init__(self): self.parts, self.model = w, torch.nn.Sequential(w)
    @torch.compile(backend="eager")
    def update(self, x):
        (self.model(x) - teacher(x)).sum().backward()
        optimizer.step()
for _ in range(3): Trainer().update(augment(torch.randn(7, 3)))
""",
        "plain": "while True: step()",
        "allows-bf16-products": "torch.set_float32_matmul_precision('medium')\nwhile True: step()",
        "casts": "with torch.autocast('cpu', torch.bfloat16):\n    while True: step()",
        "casts-in-lightning": """
import types
class Strategy:
    def training_step(self):
        with torch.autocast("cpu", torch.bfloat16): return w(torch.randn(5, 3)).sum()
    validation_step = test_step = predict_step = training_step
sys.modules["pytorch_lightning.strategies.strategy"] = types.SimpleNamespace(Strategy=Strategy)
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
while True:
    Strategy().training_step().backward()
    optimizer.step()
""",
        "casts-where-prepared": """
net = torch.nn.Sequential(w)
net._is_accelerate_prepared, net.forward = True, torch.autocast("cpu", torch.bfloat16)(net.forward)
while True:
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
""",
        "casts-within-compiled-code": """
@torch.compile(backend="eager")
def loss(x):
    with torch.autocast("cpu", torch.bfloat16): return w(x).sum()
while True:
    loss(torch.randn(5, 3)).backward()
    optimizer.step()
""",
        "scales": _OVERFLOW,
        "converts": """
w.bfloat16()
while True:
    w(torch.randn(5, 3).bfloat16()).sum().backward()
    optimizer.step()
""",
        "calls-twice": """
def step():
    x = torch.randn(5, 3)
    (w(x) + w(x)).sum().backward()
    optimizer.step()
for _ in range(3): step()
""",
        "observes": """
int(os.environ["MASTER_PORT"])
def step():
    for _ in range(5): w(torch.randn(3)).sum().backward()
    optimizer.step()
for _ in range(3): step()
""",
        "subclasses": """
class Warm(torch.optim.Adam):
    def step(self, closure=None): return super().step(closure)
torch.optim.Adam(w.parameters())
optimizer = Warm(w.parameters())
for _ in range(3): step()
""",
    }
    asked = {
        "writes measure as-written": endings["writes"],
        "compiles-once measure as-written": """
net = torch.compile(torch.nn.Sequential(w), backend="eager")
for number in range(99):
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    if number == 9: raise ValueError(torch._dynamo.utils.counters["stats"]["unique_graphs"])
""",
        "loses own none": _LOW.replace("RAISES", "False"),
        "adapter own none": _QUANTISED.replace("FROZEN", "True"),
        "ends-early measure as-written": "for _ in range(40): step()",
        "ends-at-once measure as-written": "for _ in range(9): step()",
        "stops measure-60 as-written": """
from time import monotonic, sleep
end = monotonic() + 1.5
while monotonic() < end:
    step()
    sleep(0.002)
""",
        "short-batch count as-written": """
data = DataLoader(torch.randn(12, 3), batch_size=8)
while True:
    for x in data:
        w(x).sum().backward()
        optimizer.step()
    with torch.no_grad():
        for x in data: w(x)
""",
        **dict.fromkeys(("previews", "previews count as-written"), _PREVIEWS),
        "graphs count as-written": """
class Batch:
    def __init__(self, items): self.x = torch.cat(items)
while True:
    for batch in DataLoader([torch.randn(4, 3)] * 10, batch_size=5, collate_fn=Batch):
        w(batch.x).sum().backward()
        optimizer.step()
""",
        "counts-graphs count as-written": """
class Batch:
    def __init__(self, items): self.x, self.num_graphs = torch.cat(items), len(items)
while True:
    for batch in DataLoader([torch.randn(4, 3)] * 10, batch_size=5, collate_fn=Batch):
        w(batch.x).sum().backward()
        optimizer.step()
""",
        "grows count as-written": """
for number in itertools.count():
    w(input=torch.randn(4 + 2 * (number > 2), 3)).sum().backward()
    optimizer.step()
""",
        "acts count as-written": """
for _ in itertools.count():
    action = w(torch.randn(1, 3)).argmax()  # with gradients, as many policies act
    w(torch.randn(4, 3)).sum().backward()
    optimizer.step()
""",
        "acts-and-criticises count as-written": """
w, actor = torch.nn.Bilinear(3, 2, 1), torch.nn.Linear(3, 2)
optimizer, of_actor = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (w, actor))
for number in itertools.count():
    actor(torch.randn(1, 3))
    x = torch.randn(4, 3)
    w(x, torch.randn(4, 2)).sum().backward()
    optimizer.step()
    if number % 2:
        w(x, actor(x)).sum().backward()
        of_actor.step()
""",
        "iterates count as-written": """
class Data(torch.utils.data.IterableDataset):
    def __iter__(self): return ({"boxes": torch.ones(2 + i % 2, 4), "image": torch.ones(3)} for i in range(12))
def join(items):
    boxes, images = ([each[name] for each in items] for name in ("boxes", "image"))
    return {"boxes": torch.cat(boxes), "image": torch.stack(images)}
while True:
    for batch in DataLoader(Data(), batch_size=4, collate_fn=join):
        w(batch["image"]).sum().backward()
        optimizer.step()
""",
        "closure profile as-written": """
w = torch.nn.Linear(256, 256)
optimizer, x = torch.optim.SGD(w.parameters(), lr=1e-9), torch.randn(2048, 256)
def closure():
    loss = w(x).sum()
    loss.backward()
    return loss
while True: optimizer.step(closure)
""",
    }
    measured = {
        "hangs as-written": "for i in range(99): step(); time.sleep(3600 * (i == 10))",
        "ends as-written": "for i in range(2): step()",
        "overflows as-written": _OVERFLOW,
        "overflows fp16-mixed": _OVERFLOW,
        "overflows-fused as-written": _FUSED + _OVERFLOW,
        "overflows-fused fp16-mixed": _FUSED + _OVERFLOW,
        "evaluates bf16-mixed": _EVALUATE.replace("MARK", ""),
        "evaluates-fabric bf16-mixed": _EVALUATE.replace("MARK", "Model.__name__ = '_FabricModule'"),
        "evaluates-lightning bf16-mixed": _LIGHTNING,
        "evaluates-prepared bf16-mixed": _EVALUATE.replace("MARK", "w._is_accelerate_prepared = True"),
        "evaluates-compiled bf16-mixed": _EVALUATE.replace("MARK", "w.compile(backend='eager')"),
        "evaluates-compiled-prepared bf16-mixed": _EVALUATE.replace(
            "MARK", "w._is_accelerate_prepared = True; w.compile(backend='eager')"
        ),
        "masters bf16-master": _MASTERS.replace("FACTOR", "0.01").replace("CLOSURE", "0"),
        "masters-overflow fp16-master": _MASTERS.replace("FACTOR", "1e6").replace("CLOSURE", "0"),
        "masters-closure fp16-master": _MASTERS.replace("FACTOR", "1e6").replace("CLOSURE", "1"),
        "clamps bf16-master": """
def step():
    w(torch.randn(5, 3)).sum().backward()
    w.weight.data.clamp_(-0.01, 0.01)
    optimizer.step()
for _ in range(9): step()
""",
        "two bf16-master": "other = torch.optim.Adam(w.parameters())\nfor _ in range(9): step(); other.step()",
        "scripted as-written": "w = torch.jit.script(w)\nfor _ in range(9): step()",
        "scripted bf16-mixed": "w = torch.jit.script(w)\nfor _ in range(9): step()",
        "sparse as-written": """
w = torch.nn.Embedding(9, 3, sparse=True).bfloat16()
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
for _ in range(99):
    w(torch.arange(5)).float().sum().backward()
    optimizer.step()
""",
        "halves fp32": "w.half()\nfor _ in range(99): step()",
        "doubles fp32": "w.double()\nfor _ in range(9): step()",
        "wide bf16-true": "for _ in range(9): step()",
        "low fp32": _LOW.replace("RAISES", "True"),
        "low bf16-mixed": _LOW.replace("RAISES", "True"),
        "low bf16-true": _LOW.replace("RAISES", "True"),
        "quantised fp32": _QUANTISED.replace("FROZEN", "False"),
        "frozen fp32": _QUANTISED.replace("FROZEN", "True"),
        "frozen fp16-master": _QUANTISED.replace("FROZEN", "True"),
        "adapted fp16-master": _QUANTISED.replace("FROZEN", "True").replace("torchao.float8", "own"),
        "frozen bf16-mixed": _QUANTISED.replace("FROZEN", "True"),
        "sharded fp32": "w.mixed_precision = torch.distributed.fsdp.MixedPrecision(torch.bfloat16)\nstep()",
        "two-losses fp16-mixed": _GRADIENTS.replace("99", "9").replace(
            "HOW", "torch.autograd.backward([w(x).sum(), checkpoint(w, x, use_reentrant=True).sum()])"
        ),
        "wrapped fp16-mixed": """
class Ahead(torch.optim.Optimizer):
    def __init__(self, base): self.base = base; super().__init__(base.param_groups, {})
    def step(self): self.base.step()
optimizer = Ahead(optimizer)
"""
        + _GRADIENTS.replace("99", "9").replace("HOW", "w(x).sum().backward()"),
        "clipped fp16-mixed": _GRADIENTS.replace("99", "9").replace(
            "HOW",
            "w(x).sum().backward(); norm = torch.nn.utils.get_total_norm([w.weight.grad]); "
            "torch.nn.utils.clip_grads_with_norm_(w.weight, 1.0, norm)",
        ),
        "one-overflows fp16-mixed": """
other = torch.nn.Linear(3, 1)
others = torch.optim.SGD(other.parameters(), lr=0.1)
for _ in range(9): step()
others.zero_grad()
(1e30 * w(torch.ones(5, 3)).sum()).backward()
other(torch.ones(5, 3)).sum().backward()
optimizer.step()
others.step()
raise ValueError(other.weight.grad.tolist())
""",
        "in-evaluation bf16-mixed": """
seen = []
w.eval().register_forward_hook(lambda module, args, output: seen.append(output.dtype))
step()
with torch.no_grad():
    w(torch.randn(5, 3))
raise ValueError(*seen, w.weight.grad.abs().sum().item() > 0)
""",
        "calls-a-part bf16-mixed": """
part, seen = torch.nn.Linear(3, 3), []
part.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
w = torch.nn.Sequential(part, torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
for _ in range(2):
    (w(torch.randn(5, 3)).sum() + part(torch.randn(5, 3)).sum()).backward()
    optimizer.step()
part.requires_grad_(False)  # as a discriminator's is while the generator is trained
part(torch.randn(5, 3))
raise ValueError(*seen)
""",
        "calls-by-checkpoints bf16-mixed": """
from torch.utils.checkpoint import checkpoint
seen, x = [], torch.randn(5, 3, requires_grad=True)
w.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
for is_reentrant in (False, False, True, True):
    checkpoint(w, x, use_reentrant=is_reentrant).sum().backward()
    optimizer.step()
raise ValueError({*seen}, len(seen))
""",
        "calls-by-functions bf16-mixed": """
from torch.func import functional_call, grad
seen, weights = [], dict(w.named_parameters())
w.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
torch.vmap(lambda x: functional_call(w, weights, (x,)))(torch.zeros(4, 2, 3))
seen.clear()
def loss(weights): return functional_call(w, weights, (torch.ones(5, 3),)).float().sum()
changes = grad(loss)(weights)
loss({name: weight - changes[name] for name, weight in weights.items()}).backward()
optimizer.step()
raise ValueError(*seen)
""",
        "steps-twice-in-lightning bf16-mixed": _LIGHTNING.replace(
            "    def validation_step(self):", "    def validation_step(self):\n        step()"
        ),
        "early-second bf16-mixed": _SECOND.replace("WHEN", "number % 5 == 4"),
        "late-second bf16-mixed": _SECOND.replace("WHEN", "number == 36"),
        "in-phases as-written": """
for _ in range(2): step()
optimizer = torch.optim.Adam(w.parameters())
for _ in range(9): step()
""",
        "runs-on as-written": """
for _ in range(3): step()
optimizer = torch.optim.Adam(w.parameters())
while True: step()
""",
        "pairs count as-written": """
other = torch.optim.SGD(w.parameters(), lr=0.1)
for _ in range(20):
    step()
    other.step()
""",
        "anew as-written": """
for _ in range(3): step()
saved = optimizer.state_dict()
optimizer = torch.optim.SGD(w.parameters(), 0.1)
optimizer.load_state_dict(saved)
for _ in range(20): step()
""",
        "compiles-its-step as-written": """
@torch.compile(backend="eager")
def update(): optimizer.step()
for _ in range(9):
    w(torch.randn(5, 3)).sum().backward()
    update()
raise ValueError(torch._dynamo.utils.counters["stats"]["unique_graphs"])
""",
        "averages bf16-master": """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
averaged = None
for _ in range(9):
    step()
    averaged = averaged or AveragedModel(w, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    w(torch.ones(5, 3)).sum().backward()
    torch.nn.utils.clip_grad_norm_(w.parameters(), 1.0)
    averaged.update_parameters(w)
found = averaged.module.weight
raise ValueError(found.dtype, w.weight.dtype, w.weight.grad.dtype, bool((found != found.bfloat16()).any()))
""",
        "compiles-its-loss bf16-mixed": """
seen, criterion = [], torch.nn.L1Loss()
class Config(dict): __getattr__ = dict.__getitem__
config = Config(zeros=(5, 3))
def out_of(x): return w(x)
@torch.compile(backend="eager")
def loss_of(x):
    y = (lambda y: out_of(y))(x)
    return criterion(y, x.new_zeros(config.zeros)), y
def rounds(y): return bool((y == y.bfloat16()).all())
for _ in range(3):
    loss, y = loss_of(torch.randn(5, 3))
    seen.append(rounds(y))
    loss.backward()
    optimizer.step()
with torch.no_grad():
    seen.append(rounds(loss_of(torch.randn(5, 3))[1]))
raise ValueError(*seen, torch.is_autocast_enabled("cpu"), torch._dynamo.utils.counters["stats"]["unique_graphs"])
""",
        "rounds-once fp32": "w.half().float()\nfor _ in range(99): step()",
        "narrows fp32": """
class Half(torch.nn.Linear):
    def forward(self, x): return super().forward(x).bfloat16().float()
w = Half(3, 1)
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
for _ in range(99): step()
""",
        "beside bf16-mixed": _BESIDE.replace("LOSS", "loss"),
        "beside-used bf16-mixed": _BESIDE.replace("LOSS", "loss + y.mean()"),
        "holds-prepared bf16-mixed": """
class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = w
    def forward(self, x):
        y = self.model(x)
        seen.append((w.seen, y.dtype, torch.is_autocast_enabled("cpu")))
        return y.sum()
seen, w._is_accelerate_prepared, criterion = [], True, Loss()
w.register_forward_hook(lambda module, args, y: setattr(w, "seen", y.dtype))
for _ in range(2):
    criterion(torch.randn(5, 3)).backward()
    optimizer.step()
raise ValueError(seen[0] == seen[1], *seen[1])
""",
        "own-call bf16-mixed": """
class Called(torch.nn.Linear):  # as gpytorch's modules are
    def __call__(self, x): return self.forward(x)
    def forward(self, x):
        seen.append(torch.is_autocast_enabled("cpu"))
        return super().forward(x)
w, seen = Called(3, 1), []
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
raise ValueError(w(torch.randn(5, 3)).dtype, *seen, torch.is_autocast_enabled("cpu"))
""",
        **{
            f"recomputes{'-in-amp' * bool(custom[0])} bf16-mixed": _RECOMPUTES.replace("FWD", custom[0]).replace(
                "BWD", custom[1]
            )
            for custom in (("", ""), (f"{_CUSTOM}_fwd(device_type='cpu')", f"{_CUSTOM}_bwd(device_type='cpu')"))
        },
        "own-forward bf16-mixed": """
class Layer(torch.nn.Module):  # as in the forward-forward algorithm: nothing calls it
    def __init__(self):
        super().__init__()
        self.inner, self.weight = torch.nn.Linear(3, 3), torch.nn.Parameter(torch.ones(3, 1))
    def forward(self, x): return self.inner(x) @ self.weight
    def loss(self, x):
        y = self.forward(x)
        seen.append((y.dtype, y.grad_fn.name(), torch.is_autocast_enabled("cpu")))
        return y.sum()
w, seen = Layer(), []
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
for _ in range(2):
    w.loss(torch.randn(5, 3)).backward()
    optimizer.step()
raise ValueError(seen[0] == seen[1], *seen[1])
""",
        "late-optimizer bf16-mixed": """
w(torch.randn(5, 3)).sum().backward()
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
optimizer.step()
for _ in range(99): step()
""".replace("w(", "w = torch.nn.Linear(3, 1); w(", 1),
        "deepspeed bf16-mixed": """
import types
sys.modules["deepspeed"] = types.ModuleType("deepspeed")
own = torch.nn.utils.parameters_to_vector(w.parameters()).detach().requires_grad_()  # as ZeRO has it
optimizer = torch.optim.SGD([own], lr=0.1)
for _ in range(99):
    w(torch.randn(5, 3)).sum().backward()
    own.grad = torch.nn.utils.parameters_to_vector(each.grad for each in w.parameters())
    optimizer.step()
    torch.nn.utils.vector_to_parameters(own.detach(), w.parameters())
""",
        "deepspeed-engine bf16-mixed": """
import types
exec('''import torch
class Engine(torch.nn.Sequential):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False): y = super().forward(x)
        self.seen = y.dtype
        return y
''', vars(engine := types.ModuleType("deepspeed.engine")))
net = engine.Engine(w)
for index in range(99):
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    if index == 1: raise ValueError(net.seen)
""",
        "late-optimizer-in-amp bf16-mixed": """
w = torch.nn.Linear(3, 1)
for index in range(99):
    with torch.autocast("cpu", torch.bfloat16): y = w(torch.randn(5, 3))
    y.sum().backward()
    if not index: optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
    optimizer.step()
    if index == 1: raise ValueError(y.dtype)
""",
        **{f"{name} bf16-mixed": _OF_LIBRARY.replace("CALL", call) for name, call in _CALLS.items()},
        "teacher bf16-mixed": """
teacher, seen = torch.nn.Linear(3, 3).eval(), []
teacher.register_forward_hook(lambda module, args, output: seen.append(output.dtype), prepend=True)
with torch.no_grad():
    y = teacher(torch.randn(5, 3))
raise ValueError(*seen, y.dtype, torch.is_autocast_enabled("cpu"))
""",
        "assigned as-written": _GRADIENTS.replace(
            "HOW", "w.weight.grad, w.bias.grad = torch.autograd.grad(w(x).sum(), [w.weight, w.bias])"
        ),
        "functional as-written": _GRADIENTS.replace(
            "HOW", "w(x); w.weight.grad = torch.func.grad(lambda weight: (x @ weight.T).sum())(w.weight.detach())"
        ),
        **{
            f"own-optimizer{'-overflows' * (precision == 'fp16-mixed')} {precision}": _OWN_OPTIMIZER.replace(
                "OVERFLOWS", str(precision == "fp16-mixed")
            ).replace("RAISES", "True")
            for precision in ("as-written", "fp32", "bf16-mixed", "fp16-mixed")
        },
        "own-optimizer-overflow measure fp16-mixed": _OWN_OPTIMIZER.replace("OVERFLOWS", "True").replace("RAISES", "0"),
        "kerass bf16-mixed": _OF_KERAS.replace("OWN", "False").replace("RAISES", "True"),
        "kerass-own fp32": _OF_KERAS.replace("OWN", "True").replace("RAISES", "True"),
        "kerass-steps measure fp16-mixed": _OF_KERAS.replace("OWN", "False").replace("RAISES", "False"),
        "kerass-amp own none": _OF_KERAS.replace("OWN", "True").replace("RAISES", "False"),
        "subclass bf16-mixed": """
class Meta(torch.Tensor):
    pass
class Loss(torch.nn.Module):
    def forward(self, y): return (y.sigmoid() - y[:, 0].sigmoid().mean()).square().mean()
y = w(torch.randn(5, 3).as_subclass(Meta))
class Note(torch.nn.Module):
    def forward(self, y): return y.dtype, y[:, 0].sigmoid().dtype
raise ValueError(y.dtype, *Note()(y))
""",
        "lbfgs fp16-mixed": """
optimizer = torch.optim.LBFGS(w.parameters())
optimizer.step(lambda: w(torch.randn(5, 3)).sum())
""",
    }
    timed = {
        "ppo timed- as-written": _PPO,
        "ppo timed-100 as-written": _PPO,
        "ppo timed-320 as-written": _PPO,
        "ppo timed-480 as-written": _PPO,
        "evaluates-now-and-then timed- as-written": f"""{_ROLLOUTS}
for number in itertools.count(1):
    step()
    if number % 500 == 0: roll_out()
""",
        "steps timed-100 as-written": "while True: step()",
        "pads timed-8 as-written": """
data = [{"x": torch.randn(4, 3), "attention_mask": torch.tensor([1, 1, 1, number % 2])} for number in range(64)]
for batch in DataLoader(data, batch_size=2):
    w(batch["x"]).sum().backward()
    optimizer.step()
""",
        "pads-by-mask timed-8 as-written": """
masks = torch.arange(8) < torch.tensor([8, 2, 1, 5])[:, None]
class Masked(torch.nn.Linear):
    def forward(self, x, mask): return super().forward(x) * mask.any()
w = Masked(3, 1)
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
for _ in range(99):
    w(torch.randn(4, 3), ~masks[:, None, None]).sum().backward()
    optimizer.step()
""",
        "pads-numbers timed-8 as-written": """
rows = [[5, 6, 7, 8], [5, 6, 0, 0], [5, 0, 0, 0], [7, 8, 9, 5]]
for batch in DataLoader(torch.tensor(16 * rows), batch_size=4):
    w(batch[:, :3].float()).sum().backward()
    optimizer.step()
""",
        "pads-frames timed-8 as-written": """
frames = torch.randn(4, 8, 3).masked_fill(torch.arange(8)[:, None] >= torch.tensor([8, 2, 1, 5])[:, None, None], -1)
for _ in range(99):
    w(frames).sum().backward()
    optimizer.step()
""",
        "pads-no-frames timed-8 as-written": """
for number in range(99):
    w(torch.ones(4, 8, 3) if number % 2 else torch.randn(4, 8, 3)).sum().backward()
    optimizer.step()
""",
        "flags timed-8 as-written": """
rows = [[1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]
for batch in DataLoader(torch.tensor(16 * rows), batch_size=4):
    w(batch[:, :3].float()).sum().backward()
    optimizer.step()
""",
        "compiles-anew timed-8 as-written": """
loss = torch.compile(lambda x: w(x).sum(), backend="eager", dynamic=False)
for number in range(18):
    loss(torch.randn(5 + number // 3, 3)).backward()
    optimizer.step()
""",
    }
    folder = tmp_path_factory.mktemp("scripts")
    jobs = []
    for name in ("model.pt", "model.safetensors", "last.pt", "log.txt", "old/a.txt", "old/b.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("kept")
    check = "assert sys.argv == ['launched.py', os.environ['OF_LAUNCHER']]\n"
    (folder / "launched.py").write_text(_STEP + check + "for _ in range(99): step()")
    for part in ("__init__", "commands/__init__", "commands/launch"):
        file = folder / "site-packages" / "accelerate" / f"{part}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_LAUNCHER * part.endswith("launch"))
    (folder / "site-packages" / "of_library.py").write_text(_LIBRARY)
    for name, text in _KERAS.items():
        for each in (file := folder / "site-packages" / "keras" / "src" / f"{name}.py").parents:
            if each == folder / "site-packages":
                break
            each.mkdir(parents=True, exist_ok=True)
            (each / "__init__.py").touch()
        file.write_text(text)
    for name in ("child.py", "package/train.py"):  # which a script starts
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    for name, ending in {**endings, **measured, **asked, **timed}.items():
        script, *how, precision = name.split() if " " in name else (name, "")
        file = folder / f"{script}.py"
        file.write_text(_STEP + ending)
        jobs.append((str(file), how[0] if how else "measure" if precision else "inspect", precision))
    command = [sys.executable, str(TESTS / "hooked_scripts.py"), json.dumps(jobs)]
    (folder / "t").mkdir()  # where no temporary file is to stay
    (folder / "home").mkdir()
    place = os.environ | {"TMPDIR": str(folder / "t"), "HOME": str(folder / "home")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=place)
    assert done.returncode == 0, done.stderr
    found = dict(zip([*endings, *measured, *asked, *timed], json.loads(done.stdout), strict=True))
    return found | {
        "files": {
            str(each.relative_to(folder)): each.read_text()
            for each in sorted(folder.rglob("*"))
            if each.is_file() and each.suffix not in (".py", ".pyc")
        },
    }


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("raises", "crashed: ValueError: no such file"),
        ("no-step", "unsupported: no-step.py ended before an optimizer took a step"),
        ("updates", "unsupported: The script's weights change, but no optimizer takes a step, which is what castwise"),
        ("exits", "unsupported: exits.py ended with sys.exit(3) after optimizer step 1"),
        (
            "waits",
            "unsupported: waiting for step 1 of waits.py, 10 s so far; it has started 'python -u child.py --lr 1' / "
            "waits.py took no optimizer step within 20 s. It started 'python -u child.py --lr 1'. If that trains, name",
        ),
        (
            "starts-by-a-shell",
            "unsupported: starts-by-a-shell.py ended before an optimizer took a step. It started "
            "'python -m package.train'. If that trains, name it",
        ),
        ("asks", "unsupported: asks.py asks for input"),
        ("ends as-written", "unsupported: ends.py took 2 steps: too few"),
        (
            "in-phases as-written",
            "unsupported: in-phases.py took 2 steps of its first optimizer, and then 9 of others, which do not count",
        ),
        ("runs-on as-written", "unsupported: runs-on.py took 3 steps of its first optimizer, and then 2001 of others"),
        ("doubles fp32", "unsupported: doubles.py:9 trains weights in float64, which castwise does not change"),
        ("frozen fp16-master", "unsupported: a model with torchao's Float8Linear cannot be given masters"),
        ("adapted fp16-master", "unsupported: the script's frozen weights are in bfloat16, and would be in float16"),
        ("wide bf16-true", "unsupported: the script trains weights in float32. Give it model.to(torch.bfloat16)"),
        ("clamps bf16-master", "unsupported: the script changes its weights during a step, which masters do not see"),
        ("two bf16-master", "unsupported: masters are for one optimizer; the script steps Adam, too"),
        ("scripted bf16-mixed", "unsupported: the script's model is compiled by torch.jit"),
        ("quantised fp32", "unsupported: the script trains torchao's Float8Linear"),
        (
            "sharded fp32",
            "unsupported: Linear has a mixed precision, which castwise cannot replace (sharded.py:7, in step",
        ),
        ("lbfgs fp16-mixed", "unsupported: loss scaling does not work with LBFGS"),
        (
            "deepspeed bf16-mixed",
            "unsupported: DeepSpeed trains copies of the weights, which castwise cannot change. In its configuration "
            'bf16-mixed is "torch_autocast": {"enabled": true, "dtype": "bfloat16"}: measure that as-written',
        ),
        (
            "recomputes bf16-mixed",
            "unsupported: backward computes anew in recomputes.py:20 what forward computed in autocast, but without "
            "autocast: mat1 and mat2 must have the same dtype, but got BFloat16 and Float. Decorate the two by "
            "torch.amp.custom_bwd and torch.amp.custom_fwd",
        ),
        ("recomputes-in-amp bf16-mixed", "8 steps, 0 skipped; "),
        (
            "late-optimizer bf16-mixed",
            "unsupported: late-optimizer.py has no call of a torch.nn.Module in which castwise saw weights of an",
        ),
    ],
)
def test_a_script_that_cannot_be_measured_is_told_why(answers, script, words):
    assert answers[script].startswith(words)


@pytest.mark.parametrize(
    ("script", "same"),
    [
        ("plain", "default fp32"),
        ("allows-bf16-products", ""),
        ("casts", "bf16-mixed"),
        ("casts-in-lightning", "bf16-mixed"),
        ("casts-where-prepared", "bf16-mixed"),
        ("casts-within-compiled-code", ""),
        ("scales", ""),
        ("converts", "bf16-true"),
    ],
)
def test_precisions_that_are_a_script_as_written_follow_from_its_settings(answers, script, same):
    assert answers[script] == f"batch 5, same: {same}"


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_weights_in_16_bits_are_trained_in_float32_as_by_hand(answers, precision):
    seen = (*losses_of_low(precision), "torch.float32")
    assert answers[f"low {precision}"] == f"crashed: ValueError: ({', '.join(map(str, seen))}) (low.py:20, in <module>)"
    assert "torch.bfloat16)" in answers["low bf16-true"]
    said = "8 steps, 0 skipped; its weights, in float16 by halves.py:9, are trained in float32"
    assert answers["halves fp32"] == said
    assert answers["rounds-once fp32"] == "8 steps, 0 skipped; ", "as yolov5's does, once, before it trains"


@pytest.mark.parametrize("precision", ["as-written", "fp32", "bf16-mixed", "fp16-mixed"])
def test_an_optimizer_of_the_scripts_own_trains_as_by_hand(answers, precision):
    name = "own-optimizer" + "-overflows" * (precision == "fp16-mixed")
    seen = ", ".join(map(str, losses_of_own_optimizer(precision)))
    assert answers[f"{name} {precision}"].startswith(f"crashed: ValueError: ({seen})")


def test_a_step_that_is_skipped_of_an_optimizer_of_the_scripts_own_is_counted(answers):
    assert answers["own-optimizer-overflow measure fp16-mixed"].startswith("8 steps, 1 skipped")


def test_keras_trains_in_its_own_mixed_precision(answers):
    assert answers["kerass bf16-mixed"].startswith("crashed: ValueError: mixed_bfloat16")
    assert answers["kerass-own fp32"].startswith("crashed: ValueError: float32")
    assert re.match("8 steps, [1-8] skipped", answers["kerass-steps measure fp16-mixed"])
    assert json.loads(answers["kerass-amp own none"])[0] == {"autocast float16": ["kerass-amp.py:16"]}


def test_a_loss_of_a_subclass_of_tensors_is_computed_in_autocast(answers):
    assert answers["subclass bf16-mixed"].startswith(
        "crashed: ValueError: (torch.float32, torch.bfloat16, torch.bfloat16)"
    )


def test_what_a_script_with_weights_in_16_bits_loses_is_measured(answers):
    own, _, lost = json.loads(answers["loses own none"])
    assert own == {"weights bfloat16": ["loses.py:11"]}
    assert (lost["weight"], lost["weight_share"], lost["learning_rate"]) == ("1.weight", 1.0, 1e-3)
    assert 0 < lost["share"] < 1
    assert answers["sparse as-written"] == "8 steps, 0 skipped; "
    assert answers["anew as-written"] == "8 steps, 0 skipped; ", "an optimizer that the script makes anew counts on"


def test_what_is_frozen_stays_in_its_type(answers):
    assert answers["frozen fp32"] == answers["frozen bf16-mixed"] == "8 steps, 0 skipped; "
    own, _, lost = json.loads(answers["adapter own none"])
    assert own == {"frozen bfloat16": ["adapter.py:10"], "layers torchao's Float8Linear": []}
    assert lost is None


def test_scripts_that_fork_save_and_catch_all_are_measured_and_harm_nothing(answers):
    for script in (
        "forks",
        "meets",
        "saves",
        "saves-and-loads",
        "writes",
        "writes-in-c",
        "launches-itself",
        "observes",
        "calls-twice",
        "subclasses",
        "swallows",
        "swallows-it-all",
    ):
        assert answers[script].startswith("batch 5,")
    assert answers["compiles"].startswith("batch 7,")
    assert "steps, 0 skipped" in answers["scripted as-written"]
    said = "8 steps, 0 skipped; 'log.txt' and 5 more of its files are gone"
    assert answers["writes measure as-written"].startswith(said)
    names = ["last.pt", "log.txt", "model.pt", "model.safetensors", "old/a.txt", "old/b.txt"]
    assert answers["files"] == dict.fromkeys(["home/.tool/cache/kernel", *names], "kept")


def test_samples_are_those_that_the_timed_steps_trained_on(answers):
    early = re.fullmatch(
        r"(\d+) steps, 0 skipped; it ends after 40 steps: \1 of them .*", answers["ends-early measure as-written"]
    )
    assert early
    assert 20 <= int(early[1]) <= 37
    assert (
        "ends-at-once.py took 9 steps: too few to time any after warm-up. Let it train for longer, or give it --steps "
        "3, which" in answers["ends-at-once measure as-written"]
    )
    assert answers["stops measure-60 as-written"] == "8 steps, 0 skipped; ", (
        "the last ones of those that were to lead in"
    )
    assert answers["short-batch count as-written"] == "6 a step; "
    assert answers["pairs count as-written"] == "5 a step; ", "they step together, neither takes the other's place"
    assert answers["iterates count as-written"] == "4 a step; "
    assert answers["previews count as-written"] == "4 a step; ", "not those of its evaluations"
    assert answers["previews"].startswith("batch 4,")
    assert answers["counts-graphs count as-written"] == "5 a step; "
    assert answers["acts count as-written"] == answers["acts-and-criticises count as-written"] == "4 a step; "
    assert answers["grows count as-written"] == "6 a step; ", "as in the timed steps, not in the first"
    said = (
        "5 a step; a step's samples are the DataLoader's: 5. That is not the first dimension of the model's input, 20"
    )
    assert answers["graphs count as-written"].startswith(said)


@pytest.mark.parametrize(
    ("script", "block", "period"),
    [
        ("ppo timed-", 320, None),
        ("ppo timed-320", 320, None),
        ("ppo timed-480", 480, 320),
        ("ppo timed-100", 50, 0),  # another rollout may come
        ("evaluates-now-and-then timed-", 500, None),
        ("steps timed-100", 50, None),
    ],
)
def test_work_between_steps_is_timed_in_whole_periods_or_said(answers, script, block, period):
    """The shares of time are known, too."""
    found, work, *_ = json.loads(answers[f"{script} as-written"])
    assert set(found) == {block}
    assert (work and work["period_steps"]) == period
    assert work is None or work["times_seen"] == (2 if period else 1)
    assert work is None or 0 <= work["timed_share"] < work["share"] < 1


def test_padding_and_compilation_in_the_midst_of_training_are_counted(answers):
    assert json.loads(answers["pads timed-8 as-written"])[2:] == [0.125, 0]
    assert json.loads(answers["pads-by-mask timed-8 as-written"])[2:] == [0.5, 0]
    assert json.loads(answers["pads-numbers timed-8 as-written"])[2:] == [5 / 16, 0]
    assert json.loads(answers["pads-frames timed-8 as-written"])[2:] == [0.5, 0]
    assert json.loads(answers["pads-no-frames timed-8 as-written"])[2:] == [0, 0]
    assert json.loads(answers["flags timed-8 as-written"])[2:] == [0, 0]
    *_, padding, compiled = json.loads(answers["compiles-anew timed-8 as-written"])
    assert padding is None
    assert 2 <= compiled <= 3, "each third step has another size"


def test_a_compiled_model_is_not_compiled_anew_after_warm_up(answers):
    assert answers["compiles-once measure as-written"].startswith("crashed: ValueError: 1 (")


def test_what_a_closure_computes_is_not_profiled_as_the_optimizer_s(answers):
    assert answers["closure profile as-written"] == "plain_product"


@pytest.mark.parametrize(
    ("seconds", "period", "num_extra"),
    [
        ([1, 1, 9, 1, 1, 1] * 4, 6, 4),
        ([1, 1, 9, 1, 1, 1] * 3 + [9, 1, 9, 1, 1, 1], 6, 5),  # one by another program
        ([1] * 5 + [9] + [1] * 6 + [9, 1, 9] + [1] * 15, 0, 3),  # not at regular distances
        ([1] * 20 + [9] + [1] * 9, 21, 1),  # the same may have been before the first step
        ([1] * 20 + [9] + [1] * 30, 0, 1),  # it has not come again
        ([1] * 320 + [400] + [1] * 319 + [400] + [1] * 9, 320, 2),
        # Others, by chance at regular distances with one of these, have little of the time.
        (
            ([1] * 159 + [5]) + [1] * 159 + [400] + [1] * 159 + [5] + [1] * 159 + [400] + [1] * 79 + [5] + [1] * 79,
            320,
            2,
        ),
        (([1] * 320 + [4] + [400] + [4, 1] * 3) * 4, 328, 4),  # which is far longer than others
        ([1, 1, 1, 4] * 2 + [1, 4] * 2 + [1] * 900, 0, 0),
        ([1, 1.02, 1, 1, 1.01, 1] * 4, 0, 0),
        ([1, 9] * 12, 0, 0),  # each second step: any block has as many
        ([1, 1, 9], 0, 0),
    ],
)
def test_work_at_regular_distances_is_found(seconds, period, num_extra):
    found, indices = extra_work(seconds)
    assert (found, len(indices)) == (period, num_extra)
    assert {seconds[index] for index in indices} <= {9, 400}


_EVALUATED = (
    "(torch.bfloat16, torch.float32, torch.{0}, torch.float32, torch.float64, False, "
    "torch.bfloat16, torch.float32, torch.float64, False, torch.float32, torch.{0}, False)"
)


@pytest.mark.parametrize(
    ("script", "seen"),
    [
        # Models of Accelerate and Fabric have the precision in all forward passes, others in training alone.
        ("evaluates bf16-mixed", _EVALUATED.format("float32")),
        ("evaluates-compiled bf16-mixed", _EVALUATED.format("float32")),
        ("evaluates-fabric bf16-mixed", _EVALUATED.format("bfloat16")),
        ("evaluates-prepared bf16-mixed", _EVALUATED.format("bfloat16")),
        ("evaluates-compiled-prepared bf16-mixed", _EVALUATED.format("bfloat16")),
        # Lightning's steps have it to their end.
        ("evaluates-lightning bf16-mixed", "(torch.bfloat16, True, torch.bfloat16, True, False)"),
        # Nor does backward end it within a step.
        ("steps-twice-in-lightning bf16-mixed", "(torch.bfloat16, True, torch.bfloat16, True, False)"),
        # A part that is called by itself has it, and so has a model that torch.func calls.
        ("calls-a-part bf16-mixed", f"({', '.join(['torch.bfloat16'] * 5)})"),
        ("calls-by-checkpoints bf16-mixed", "({torch.bfloat16}, 6)"),
        ("calls-by-functions bf16-mixed", "(torch.bfloat16, torch.bfloat16)"),
        # A module that is not trained has it in its forward pass.
        ("teacher bf16-mixed", "(torch.bfloat16, torch.float32, False)"),
        # So has one whose class has a call of its own, and one in a library's loop, if that may have autocast on.
        ("own-call bf16-mixed", "(torch.float32, True, False)"),
        ("own-forward bf16-mixed", "(True, torch.float32, 'ToCopyBackward0', False)"),
        ("trainer bf16-mixed", "torch.bfloat16"),
        ("trainer-off bf16-mixed", "torch.float32"),
        ("layer bf16-mixed", "torch.float32"),
        # So has a model that is trained in evaluation mode.
        ("in-evaluation bf16-mixed", "(torch.bfloat16, torch.float32, True)"),
        # A module that computes the loss of a prepared model is not in autocast.
        ("holds-prepared bf16-mixed", "(True, torch.bfloat16, torch.float32, False)"),
        # A script that makes its optimizer after its first forward pass is measured with autocast of its own.
        ("late-optimizer-in-amp bf16-mixed", "torch.bfloat16"),
        ("deepspeed-engine bf16-mixed", "torch.bfloat16"),
        # Outputs beside a loss of the model's own stay as they are if no other loss comes of them.
        ("beside bf16-mixed", "torch.bfloat16"),
        ("beside-used bf16-mixed", "torch.float32"),
        # Two graphs with gradients and two without: the loss, after what cannot be compiled, is a graph of its own.
        ("compiles-its-loss bf16-mixed", "(True, True, True, False, False, 4)"),
        # A compiled optimizer is compiled once.
        ("compiles-its-step as-written", "1 "),
        # Masters are what is averaged.
        ("averages bf16-master", "(torch.float32, torch.float32, torch.float32, True)"),
        # Gradients lose the loss scale once, whatever computes them.
        ("wrapped fp16-mixed", "([[5.0, 5.0, 5.0]], 5.0"),
        ("clipped fp16-mixed", "([[0.577"),
        ("one-overflows fp16-mixed", "[[5.0, 5.0, 5.0]]"),
        ("two-losses fp16-mixed", "([[10.0, 10.0, 10.0]], 10.0)"),
    ],
)
def test_what_a_script_sees_of_its_models_and_gradients(answers, script, seen):
    assert answers[script].startswith(f"crashed: ValueError: {seen}")


@pytest.mark.parametrize(
    ("script", "dtype", "factor"),
    [
        ("masters bf16-master", torch.bfloat16, 0.01),
        ("masters-overflow fp16-master", torch.float16, 1e6),
        ("masters-closure fp16-master", torch.float16, 1e6),
    ],
)
def test_masters_from_outside_are_those_by_hand_after_the_first_step(answers, script, dtype, factor):
    words = re.match(r"crashed: ValueError: \((.*)\) \(", answers[script])
    assert words, answers[script]
    *found, weight, norm, output = words[1].split(", ")
    by_hand = losses_with_masters(dtype, factor, has_closure="closure" in script)
    assert list(map(float, found)) == by_hand
    assert (weight, norm, output) == (str(dtype), "torch.float32", "torch.float32")


def test_warm_up_waits_for_the_first_step_of_each_optimizer(answers):
    assert answers["early-second bf16-mixed"] == "8 steps, 0 skipped; "
    note = "the first step of its SGD came after warm-up: what that trains stayed as written. Raise --warm-up"
    assert answers["late-second bf16-mixed"] == f"8 steps, 0 skipped; {note}"


def test_a_script_that_casts_to_16_bits_itself_is_noted_with_its_line(answers):
    assert "narrows.py:11 casts to bfloat16 itself" in answers["narrows fp32"]


def test_samples_of_detection_are_images() -> None:
    assert _num_samples(((torch.ones(3, 8, 8),) * 6, ({"labels": torch.ones(2)},) * 6)) == 6
    assert _num_samples([[torch.ones(4, 2), torch.ones(4)], [torch.ones(4), torch.ones(4)]]) == 4
    assert _num_samples({"x": torch.ones(7, 2), "y": torch.ones(7)}) == 7


def test_gradients_that_functions_of_autograd_compute_are_stepped(answers):
    assert answers["assigned as-written"] == "8 steps, 0 skipped; "
    said = "7 steps, 0 skipped; no loss is known, nor whether it diverges: the script never calls backward"
    assert answers["functional as-written"] == said


def test_the_time_limit_ends_a_script_with_what_was_measured(answers):
    said = "4 steps, 0 skipped; the script ended, or its time was up, after 1 of 2 blocks"
    assert answers["hangs as-written"] == said


@pytest.mark.parametrize("precision", ["as-written", "fp16-mixed"])
@pytest.mark.parametrize("script", ["overflows", "overflows-fused"])
def test_steps_that_loss_scaling_skips_are_counted(answers, script, precision):
    assert answers[f"{script} {precision}"] == "8 steps, 8 skipped; "
