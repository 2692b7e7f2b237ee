"""Scripts as they are, hooked: the losses as alone, and in another precision those of a script changed by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SCRIPTS = ("mnist", "imagenet", "word_language_model", "nano_gpt", "gan")
NUM_STEPS = 8
# Losses of a few steps on the same weights in 16 bits. The hooked run takes no other products, so they differ by what
# rounding in another order does. Source: chosen here.
_ROUNDING = 0.02


def job(name: str, how: str, amp: str) -> tuple[str, str, str]:
    return str(TESTS / "training_scripts" / f"{name}.py"), how, amp


@pytest.fixture(scope="module")
def losses() -> dict[tuple[str, str, str], list[list[float]]]:
    """Return the losses of the first steps by script, precision ("alone": not hooked) and own precision."""
    ways = [("alone", "none"), ("alone", "bf16"), ("alone", "fp16"), ("fp32", "none"), ("as-written", "none")]
    ways += [("bf16-mixed", "none"), ("fp16-mixed", "none"), ("as-written", "fp16"), ("fp32", "fp16")]
    ways += [("bf16-mixed", "fp16"), ("fp16-mixed", "bf16")]
    jobs = [(name, how, amp) for name in SCRIPTS for how, amp in ways]
    command = [sys.executable, str(TESTS / "hooked_scripts.py"), json.dumps([job(*each) for each in jobs])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {each: found[:NUM_STEPS] for each, found in zip(jobs, json.loads(done.stdout), strict=True)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_hooked_losses_are_bit_identical_to_those_of_the_script_alone(losses, name):
    assert len(losses[name, "alone", "none"]) == NUM_STEPS
    # The script logs a step's loss after the step, in which it is stopped.
    assert losses[name, "fp32", "none"] == losses[name, "alone", "none"][: len(losses[name, "fp32", "none"])]
    assert len(losses[name, "fp32", "none"]) >= NUM_STEPS - 1
    assert losses[name, "as-written", "none"] == losses[name, "fp32", "none"]
    # A script with loss scaling of its own.
    assert (
        losses[name, "as-written", "fp16"] == losses[name, "alone", "fp16"][: len(losses[name, "as-written", "fp16"])]
    )


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(("precision", "amp"), [("bf16-mixed", "bf16"), ("fp16-mixed", "fp16")])
def test_mixed_precision_from_outside_agrees_with_the_script_changed_by_hand(losses, name, precision, amp):
    by_hand = losses[name, "alone", amp]
    hooked = losses[name, precision, "none"]
    for ours, theirs in zip(hooked, by_hand, strict=False):
        assert ours == pytest.approx(theirs, rel=_ROUNDING)
    assert hooked != losses[name, "fp32", "none"], "it is another precision"


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(("precision", "amp"), [("fp32", "fp16"), ("bf16-mixed", "fp16"), ("fp16-mixed", "bf16")])
def test_the_scripts_own_precision_is_replaced(losses, name, precision, amp):
    assert losses[name, precision, amp] == losses[name, precision, "none"]


_STEP = """
import os, sys, torch
w = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
def step():
    w(torch.randn(5, 3)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def inspections(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what castwise says of scripts that cannot be measured, and of one that can in spite of all."""
    endings = {
        "raises": "raise ValueError('no such file')",
        "no-step": "",
        "exits": "step(); sys.exit(3)",
        "asks": "import io; sys.stdin = io.StringIO(''); step(); input()",
        "forks": """
if not os.fork():
    for _ in range(3): step()
    os._exit(0)
os.wait()
for _ in range(3): step()
""",
        "swallows": """
while True:
    try: step()
    except: pass
""",
        "saves": """
open('model.pt', 'w').write('kept')
for _ in range(3): step(); torch.save(w.state_dict(), 'model.pt')
""",
    }
    folder = tmp_path_factory.mktemp("scripts")
    jobs = []
    for name, ending in endings.items():
        file = folder / f"{name}.py"
        file.write_text(_STEP + ending)
        jobs.append((str(file), "inspect", "none"))
    command = [sys.executable, str(TESTS / "hooked_scripts.py"), json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = dict(zip(endings, json.loads(done.stdout), strict=True))
    return found | {
        "file": (folder / "model.pt").read_text(),
        "files": " ".join(each.name for each in folder.iterdir()),
    }


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("raises", "crashed: ValueError: no such file"),
        ("no-step", "unsupported: no-step.py ended after 0 optimizer steps"),
        ("exits", "unsupported: exits.py ended with sys.exit(3) after 1 optimizer steps"),
        ("asks", "unsupported: asks.py asks for input"),
    ],
)
def test_a_script_that_cannot_be_measured_is_told_why(inspections, script, words):
    assert inspections[script].startswith(words)


def test_scripts_that_fork_and_save_are_measured_and_harm_nothing(inspections):
    assert inspections["forks"] == inspections["saves"] == "batch 5"
    assert inspections["file"] == "kept"
    assert inspections["files"].count("model.pt") == 1
