"""Every case in every precision: the losses of a script under castwise are those of the same script by hand.

Each case is run as it is with its own precision by --amp, and hooked with that or another; all must log the same, bit
for bit. The cases are of public bug reports: gradients that a script reads, parts that it keeps in float32, what it
computes outside the model that it trains.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("script contract")]  # one process runs them
TESTS = Path(__file__).parents[1]
WAYS = {
    "clips": ("", "late", "none"),
    "sam": ("", "clip"),
    "islands": ("dtype", "switch", "helper", "generator", "function", "other"),
    "ends": ("", "decorated", "global", "entered"),
    "critic": ("",),
    "losses": ("", "own"),
    "without": ("checkpoint", "copies"),
    "fabric": ("",),
    "plain": ("", "hook", "function", "replaced"),
}
# The precisions, each with --amp by hand and those that the script is hooked with.
PRECISIONS = {
    "default": ("none", "fp16"),
    "fp32": ("none", "bf16"),
    "tf32": ("tf32", "bf16"),
    "bf16-mixed": ("bf16", "none fp16"),
    "fp16-mixed": ("fp16", "none bf16 fp16"),
}
CASES = [
    (case, way, precision, amp)
    for case, ways in WAYS.items()
    for way in ways
    for precision, (_, own) in PRECISIONS.items()
    for amp in own.split()
    # A loop without AMP does not say that it would be on for the whole process, nor a loop without float16 that a part
    # is in another type than the rest.
    if not (amp == "none" and way in ("global", "entered"))
    if not (amp != "fp16" and way == "other")
    # It has autocast of its own, and no GradScaler.
    if not (amp in ("none", "fp16") and case == "without")
    # On a CPU Fabric has no float16.
    if not (case == "fabric" and "fp16" in (amp, precision[:4]))
]
REFUSED = {
    ("scaler", "fp16-mixed"): "makes a GradScaler of its own kind, OwnScaler",
    ("scaler", "fp32"): "makes a GradScaler of its own kind, OwnScaler",
    ("switch", "bf16-mixed"): "has autocast of its own, which a variable switches off",
    ("extension", "fp32"): "runs in autocast that was switched on without torch.autocast",
    ("ranks", "fp32"): "starts processes that train",
    ("grad", "fp16-mixed"): "trains by gradients that it takes without `backward`",
}


def job(case: str, how: str, amp: str, way: str, device: str = "cpu") -> tuple[str, str, str]:
    path = TESTS / "training_scripts" / "contract" / f"{case}.py"
    return str(path), how, f"{amp} --way={way} --device={device}"


def jobs_of(case: str, way: str, precision: str, amp: str, device: str = "cpu") -> list[tuple[str, str, str]]:
    """Return the job of a case under castwise, and that of the same by hand."""
    return [job(case, precision, amp, way, device), job(case, "alone", PRECISIONS[precision][0], way, device)]


def low_jobs(way: str, precision: str) -> list[tuple[str, str, str]]:
    """Return how a script with weights in 16 bits runs under castwise, and by hand with float32 in their places."""
    return [(precision, "none", way), ("alone", PRECISIONS[precision][0], f"'{way} wide'")]


def logs_of(jobs: list[tuple[str, str, str]]) -> dict[tuple[str, str, str], list[str]]:
    """Return what each job logged, with how it was refused."""
    jobs = list(dict.fromkeys(jobs))
    command = [sys.executable, str(TESTS / "hooked_scripts.py"), json.dumps(jobs), "in words"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(jobs, json.loads(done.stdout.splitlines()[-1]), strict=True))


LOW = [(way, precision) for way in ("", "half", "default", "late", "state") for precision in PRECISIONS]


@pytest.fixture(scope="module")
def logs() -> dict[tuple[str, str, str], list[str]]:
    jobs = [each for case in CASES for each in jobs_of(*case)]
    jobs += [job("ahead", *how, way) for how in (("alone", "bf16"), ("bf16-master", "none")) for way in ("", "data")]
    jobs += [job("sam", "fp16-mixed", "none", "overflow")]
    jobs += [job("low", *how) for way, precision in LOW for how in low_jobs(way, precision)]
    jobs += [job("low", "fp32", "none", way) for way in ("kept", "mixes")]
    jobs += [job("refused", precision, "none", way) for way, precision in REFUSED]
    return logs_of(jobs)


@pytest.mark.parametrize(("case", "way", "precision", "amp"), CASES)
def test_a_hooked_script_trains_as_by_hand(logs, case, way, precision, amp):
    hooked, by_hand = (logs[each] for each in jobs_of(case, way, precision, amp))
    assert hooked == by_hand


@pytest.mark.parametrize(("way", "precision"), LOW)
def test_weights_in_16_bits_are_trained_as_if_the_script_had_made_them_in_float32(logs, way, precision):
    hooked, by_hand = (logs[job("low", *how)] for how in low_jobs(way, precision))
    assert hooked == by_hand
    assert len(hooked) == 6


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("kept", "the script begins to train weights in bfloat16, by low.py:51, after its optimizer has them"),
        ("mixes", "the script's weights are in bfloat16 by low.py:51, and with float32 in their places it fails"),
    ],
)
def test_a_script_that_mixes_types_is_told_where_its_weights_got_theirs(logs, way, words):
    assert words in logs[job("low", "fp32", "none", way)][-1]


@pytest.mark.parametrize("way", ["", "data"])
def test_what_a_script_does_to_its_weights_between_steps_it_does_to_the_masters(logs, way):
    found = logs[job("ahead", "bf16-master", "none", way)]  # it is stopped in its eighth step
    assert found == logs[job("ahead", "alone", "bf16", way)][:7]


def test_a_step_that_overflows_is_skipped_where_two_optimizers_hold_the_weights(logs):
    found = [float(loss) for loss in logs[job("sam", "fp16-mixed", "none", "overflow")]]
    assert len(found) == 6
    assert max(found) == found[3] < float("inf")


@pytest.mark.parametrize(("way", "precision"), REFUSED)
def test_a_script_that_cannot_be_given_the_precision_is_told_the_line(logs, way, precision):
    said = logs[job("refused", precision, "none", way)][-1]
    assert said.startswith("refused.py:")
    assert REFUSED[way, precision] in said
