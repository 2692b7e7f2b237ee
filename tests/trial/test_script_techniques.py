"""Techniques that a script is given from outside: what it makes is changed, and nothing to change is said."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.xdist_group("script techniques")  # one process runs the scripts

_SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 2)) if {conv} else nn.Linear(192, 2)
optimizer = torch.optim.AdamW(model.parameters(), foreach=True, fused=False)
loader = DataLoader([torch.randn({shape}) for _ in range(40)], 4, num_workers=0)
for batch in loader:
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

_WRAPPED = """
import sys, tempfile, torch
from torch import nn
torch.distributed.init_process_group("gloo", f"file://{tempfile.mkdtemp()}/door", rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1), bucket_cap_mb=100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
"""

_CHANGES_ITS_DATA = """
import torch
class Data(torch.utils.data.Dataset):
    value = 0.0
    def __len__(self): return 8
    def __getitem__(self, index): return torch.full((3,), self.value)
model, data = torch.nn.Linear(3, 1), Data()
optimizer = torch.optim.SGD(model.parameters())
loader = torch.utils.data.DataLoader(data, batch_size=8)
for epoch in range(99):
    data.value = float(epoch)
    for batch in loader:
        assert batch.unique().item() == epoch
        model(batch).sum().backward()
        optimizer.step()
"""

_HOST = """
import gc, json, os, sys, threading, torch, torch._dynamo
from torch.utils.data import DataLoader
from castwise.spec.user_model import UserModel
from castwise.trial.script.run import Order, ScriptRun

def facts(file, techniques):
    script = ScriptRun(UserModel(kind="script", path=file, name=""), "fp32", "cpu", techniques)
    found = {}
    def order():
        try:
            script.carry_out(Order(lambda moments: 1 if len(moments) < 3 else None), 30)
            hooks = script.hooks
            hooks.techniques.check_found()
            weight, optimizer = next(hooks.models[0].parameters()), hooks.stepped[0]
            found.update(
                channels_last=weight.is_contiguous(memory_format=torch.channels_last) if weight.dim() == 4 else None,
                fused=optimizer.defaults.get("fused"), foreach=optimizer.defaults.get("foreach"),
                workers=hooks.num_prefetched, compiled=len(compiled), searches=torch.backends.cudnn.benchmark,
                wrapper={each: value
                    for each, value in getattr(hooks.models[0], "_get_ddp_logging_data", dict)().items()
                    if each in ("gradient_as_bucket_view", "static_graph", "comm_hook")},
                **({"notes": hooks.techniques.notes} if hooks.techniques.notes else {}),
                pinned=any(each.pin_memory for each in gc.get_objects() if isinstance(each, DataLoader)),
            )
        except Exception as error:
            found.update(error=f"{type(error).__name__}: {error}")
        script.stop()
    compiled = []
    torch.compile = lambda function, **_: compiled.append(function) or function
    thread = threading.Thread(target=order, daemon=True)
    thread.start()
    script.run()
    thread.join()
    return found

read, write = os.pipe()
for file, techniques in json.loads(sys.argv[1]):
    if not os.fork():
        os.write(write, (json.dumps(facts(file, techniques)) + chr(10)).encode())
        os._exit(0)
    os.wait()
os.close(write)
print(os.fdopen(read).read())
"""

# The two for GPUs alone change nothing on a CPU, and can be seen there.
_ALL = ["loader-workers", "pinned-transfer", "channels-last", "cudnn-search", "fused-optimizer", "compile"]
_AS_IT_IS = {"channels_last": False, "fused": False, "foreach": True, "workers": 0, "compiled": 0, "wrapper": {}}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("scripts")
    images, vectors = folder / "images.py", folder / "vectors.py"
    images.write_text(_SCRIPT.format(conv=True, shape="3, 8, 8"))
    vectors.write_text(_SCRIPT.format(conv=False, shape="192"))
    fused = folder / "fused.py"  # and without a loader
    text = images.read_text().replace("foreach=True, fused=False", "fused=True")
    fused.write_text(
        text.replace("DataLoader([torch.randn(3, 8, 8)", "([torch.randn(4, 3, 8, 8)").replace(", 4, num_workers=0", "")
    )
    jobs = [(images, []), (images, _ALL), (vectors, ["channels-last"]), (fused, ["fused-optimizer"])]
    changes = folder / "changes.py"
    changes.write_text(_CHANGES_ITS_DATA)
    jobs += [(fused, ["loader-workers"]), (changes, ["loader-workers"])]
    wrapped = folder / "wrapped.py"
    wrapped.write_text(_WRAPPED)
    jobs += [(wrapped, ["ddp-bucket-view", "ddp-static-graph", "bf16-all-reduce"]), (wrapped, ["ddp-buckets-100"])]
    jobs += [(vectors, ["bf16-all-reduce"])]
    narrow = folder / "narrow.py"
    made = "type('AdamW8bit', (torch.optim.AdamW,), {'__module__': 'bitsandbytes.optim.adamw'})"
    narrow.write_text(vectors.read_text().replace("torch.optim.AdamW", made))
    several = folder / "several.py"
    small = "small = torch.optim.Adam([torch.zeros(8)])\noptimizer ="
    several.write_text(vectors.read_text().replace("optimizer =", small, 1).replace("192, 2", "192, 64"))
    jobs += [(file, ["adam-state-8-bit"]) for file in (narrow, vectors, several)]
    command = [sys.executable, "-c", _HOST, json.dumps([(str(file), names) for file, names in jobs])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line]


def test_without_techniques_a_script_is_as_it_is(found):
    assert found[0] == {**_AS_IT_IS, "searches": False, "pinned": False}


def test_techniques_change_what_a_script_makes(found):
    assert found[1].pop("workers") >= 2 * 4
    changed = {"channels_last": True, "fused": True, "foreach": None, "compiled": 1, "wrapper": {}}
    assert found[1] == {**changed, "searches": True, "pinned": True}


def test_techniques_change_a_scripts_wrapper(found):
    wanted = {"gradient_as_bucket_view": 1, "static_graph": 1, "comm_hook": "bf16_compress_hook"}
    assert found[6]["wrapper"] == wanted


def test_workers_see_how_a_script_changes_its_data_set_between_epochs(found):
    assert "error" not in found[5]
    assert found[5]["workers"] > 0


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (2, "channels-last finds nothing to do: the script's model has no convolution in another layout"),
        (3, "fused-optimizer finds nothing to do: the script has it, or there is no such AdamW in torch.optim"),
        (4, "loader-workers finds nothing to do: the script makes no DataLoader that lacks it"),
        (7, "ddp-buckets-100 finds nothing to do: the script makes no DistributedDataParallel that lacks it"),
        (8, "bf16-all-reduce finds nothing to do: the script makes no DistributedDataParallel that lacks it"),
        (9, "adam-state-8-bit finds nothing to do: the script steps AdamW8bit, which keeps its state in 8-bit already"),
        (
            10,
            "adam-state-8-bit cannot change this AdamW: none of its weights has 4,096 values or more, and a multiple "
            "of 256",
        ),
    ],
)
def test_what_cannot_be_changed_is_refused(found, job, words):
    assert found[job] == {"error": f"TechniqueError: {words}"}


@pytest.mark.skipif(not find_spec("torchao"), reason="pip install 'castwise[fp8]'")
def test_of_several_optimizers_one_may_keep_a_plain_state(found):
    (note,) = found[11]["notes"]
    assert note == (
        "adam-state-8-bit cannot change this Adam: none of its weights has 4,096 values or more, and a "
        "multiple of 256. It keeps a plain state"
    )
