"""Why speed-ups differ: every sentence where its facts are there, and none where they are not."""

from typing import Any

import pytest
from fake_engine import FAKE_GPU, fake_environment, fake_epoch, fake_run, fake_training, fake_trial

from castwise.analysis import training_metrics
from castwise.records.schema import Environment, Trial
from castwise.registry.gpus import find_gpu_model
from castwise.registry.workloads import find_workload
from castwise.suites.explain import Pair, explain

H200 = fake_environment(gpu="NVIDIA H200", capability=(9, 0))
P100_HERE = fake_environment(gpu="Tesla P100-PCIE-16GB", capability=(6, 0))
MI300X = fake_environment(gpu="AMD Instinct MI300X", capability=None).model_copy(update={"gpu": "AMD Instinct MI300X"})


def run(
    precision: str = "fp16-mixed",
    waits: float = 0.0,
    seconds: float = 10.0,
    samples: int = 100,
    environment: Environment = H200,
    recipe: dict[str, Any] | None = None,
    **changes: Any,
) -> Trial:
    """Return a whole run of two epochs of so many seconds, of which it waits for data a share."""
    status = changes.pop("status", "ok")
    reserved = changes.pop("reserved", None)
    spec = fake_training(precision, recipe, workload="wrn-28-10", **changes)
    epochs = [
        fake_epoch(spec, number).model_copy(
            update={
                "seconds": seconds,
                "first_step_seconds": None,
                "data_seconds": waits * seconds,
                "counted_seconds": seconds,
                "counted_samples": samples,
                "shortened": False,
            }
        )
        for number in range(2)
    ]
    return fake_run(spec, *epochs, status=status, environment=environment, peak_reserved_bytes=reserved)


def pair(trial: Trial | None = None, baseline: Trial | None = None, **changes: Any) -> Pair:
    fields: dict[str, Any] = {
        "published_gpu": "Tesla T4",
        "published_device": "Tesla T4",
        "published_outcome": "ok",
        "published_speedup": 2.0,
        "speedup": 3.0,
        "equal_batch_speedup": 3.0,
        "trial": trial or run(),
        "baseline": baseline or run("fp32"),
    }
    return Pair(**(fields | changes))


# Enough samples a second to be near no limit of the H200's, and then almost none.
BUSY = 5_000_000


def test_without_a_run_there_is_nothing_to_say() -> None:
    assert explain(Pair("g", "g", "oom", 2.0, None, None, trial=None, baseline=None)) == ""


@pytest.mark.parametrize("missing", ["speedup", "published_speedup", "baseline"])
def test_without_both_speed_ups_there_is_nothing_to_say(missing: str) -> None:
    values = pair().__dict__ | {missing: None}
    assert explain(Pair(**values)) == ""


@pytest.mark.parametrize(("speedup", "agrees"), [(2.19, True), (1.81, True), (2.21, False), (1.79, False)])
def test_speed_ups_that_agree(speedup: float, agrees: bool) -> None:
    sentence = explain(pair(speedup=speedup))
    assert (sentence == "the two speed-ups agree within 10 %") == agrees


def words_of(source: str) -> str:
    return (
        f"here the loop waits for {source} 60 % of the time in fp16-mixed and 30 % in fp32: "
        "data, not arithmetic, sets the pace"
    )


@pytest.mark.parametrize(
    ("workers", "words"),
    [(2, "its 2 loader workers"), (1, "its loader worker"), (0, "data")],
)
def test_a_loader_that_sets_the_pace(workers: int, words: str) -> None:
    recipe = {"loader": {"num_workers": workers}}
    slow, fast = run("fp32", waits=0.3, recipe=recipe), run(waits=0.6, recipe=recipe)
    assert explain(pair(fast, slow, speedup=1.1)) == words_of(words)
    assert "data, not arithmetic" not in explain(pair(run(waits=0.24), slow, speedup=1.1))
    some = run(waits=0.4, recipe=recipe)
    assert "data, not arithmetic" not in explain(pair(some, slow, speedup=3.0)), "it explains no larger gain"
    assert explain(pair(fast, slow, speedup=3.0)).endswith("; the gain goes no further, for " + words_of(words))
    slower = run("fp32", waits=0.55, recipe=recipe)
    alone = explain(pair(fast, slower, speedup=3.0))
    assert alone.startswith("here the loop waits for"), "no datasheet does where float32 mostly waits, too"
    unknown = {"published_gpu": "MI50", "published_device": "MI50"}
    nothing = explain(pair(fast, slow, speedup=3.0, **unknown))
    assert nothing == "not explained by what was measured: " + words_of(words), "waiting makes no gain larger"


def test_a_gpu_that_idles_and_gains_little() -> None:
    trial = run(samples=10_000, waits=0.07)
    rate, macs, device = (
        training_metrics.throughput(trial),
        find_workload("wrn-28-10").macs_per_sample,
        find_gpu_model("NVIDIA H200"),
    )
    assert rate == pytest.approx(1000.0)
    assert macs is not None
    assert device is not None
    assert device.fp16 is not None
    share = 6 * macs * rate / device.fp16
    assert share < 0.1
    assert explain(pair(trial, speedup=1.2)) == (
        f"here fp16-mixed runs at {100 * share:.2g} % of the NVIDIA H200's peak and waits for data 7 % of the time: "
        "launching and synchronising the steps sets the pace"
    )
    assert "launching" not in explain(pair(trial, speedup=1.4)), "precision matters to this loop"
    assert "launching" not in explain(pair(run(samples=BUSY), speedup=1.2)), "it is at its limit"
    elsewhere = run(samples=10_000, environment=fake_environment())
    assert "launching" not in explain(pair(elsewhere, speedup=1.2)), f"of {FAKE_GPU} no limit is known"


def test_the_share_of_the_peak_is_that_of_all_gpus() -> None:
    two = {"world_size": 2, "parallelism": "ddp"}
    one, both = explain(pair(run(samples=10_000), speedup=1.2)), explain(pair(run(samples=10_000, **two), speedup=1.2))
    assert " at 3.6 % of" in one
    assert " at 1.8 % of" in both


def test_what_the_datasheets_promise() -> None:
    there, here = find_gpu_model("Tesla T4"), find_gpu_model("NVIDIA H200")
    assert there is not None
    assert here is not None
    gains = [(device.fp16 or 0) / (device.fp32 or 1) for device in (there, here)]
    assert explain(pair(run(samples=BUSY, waits=0.05))) == (
        f"fp16's peak over fp32's is {gains[0]:.1f} on the Tesla T4 and {gains[1]:.1f} on the NVIDIA H200, "
        "and here the loop waits for data 5 % of the time"
    )


@pytest.mark.parametrize(
    ("gpu", "device", "environment", "words"),
    [
        (
            "Tesla P100",
            "Tesla P100-PCIE-16GB",
            H200,
            "fp16 at 2.0 times its fp32 peak; the NVIDIA H200 has them, at 14.",
        ),
        ("GTX 1080 Ti", "NVIDIA GeForce GTX 1080 Ti", H200, "no fp16 rate in its datasheet; the NVIDIA H200 has them"),
        ("Tesla P100", "Tesla P100-PCIE-16GB", P100_HERE, "fp16 at 2.0 times its fp32 peak"),
        ("Tesla P100", "Tesla P100-PCIE-16GB", MI300X, "fp16 at 2.0 times its fp32 peak"),
        ("Tesla P100", "Tesla P100-PCIE-16GB", fake_environment(), "fp16 at 2.0 times its fp32 peak"),
    ],
)
def test_a_source_without_tensor_cores(gpu: str, device: str, environment: Environment, words: str) -> None:
    sentence = explain(pair(run(samples=BUSY, environment=environment), published_gpu=gpu, published_device=device))
    assert sentence.startswith(f"the {gpu} has no Tensor Cores, and {words}")
    # That the machine here has them is said of those only whose datasheet says so.
    assert ("has them" in sentence) == (environment is H200)


def test_tensor_cores_explain_no_smaller_gain_than_a_gpu_s_without_them() -> None:
    arguments: dict[str, Any] = {"published_gpu": "Tesla P100", "published_device": "Tesla P100-PCIE-16GB"}
    smaller = explain(pair(run(samples=BUSY), speedup=1.4, **arguments))
    assert smaller.startswith("not explained by what was measured: the Tesla P100 has no Tensor Cores")
    assert "not explained" not in explain(pair(run(samples=BUSY), speedup=3.0, **arguments))


def test_the_format_named_is_the_precision_s() -> None:
    arguments = {"published_gpu": "GTX 1080 Ti", "published_device": "NVIDIA GeForce GTX 1080 Ti"}
    assert "no bf16 rate in its datasheet" in explain(pair(run("bf16-mixed", samples=BUSY), **arguments))


def test_of_an_unknown_gpu_nothing_is_said_but_what_was_measured_here() -> None:
    sentence = explain(pair(run(samples=BUSY, waits=0.11), published_gpu="MI50", published_device="MI50"))
    assert sentence == "here the loop waits for data 11 % of the time"
    one_step = run(samples=BUSY, seconds=1e-9)
    none = one_step.ranks[0].epochs[0].model_copy(update={"first_step_seconds": 1e-9, "data_seconds": 0.0})
    spec = fake_training("fp16-mixed", {"epochs": 1}, workload="wrn-28-10")
    silent = pair(fake_run(spec, none), published_gpu="MI50", published_device="MI50")
    assert explain(silent) == "", "nothing was measured of it"


@pytest.mark.parametrize("speedup", [3.0, 2.0])
def test_the_part_of_the_larger_batch(speedup: float) -> None:
    larger = pair(run(batch_size=512), run("fp32"), speedup=speedup, equal_batch_speedup=1.25)
    assert explain(larger).endswith("; at equal batch the measured one is 1.25×")
    assert "equal batch" not in explain(pair(speedup=speedup, equal_batch_speedup=1.25)), "they are equal"
    unknown = pair(run(batch_size=512), run("fp32"), speedup=speedup, equal_batch_speedup=None)
    assert "equal batch" not in explain(unknown)


@pytest.mark.parametrize(
    ("outcome", "status", "words"),
    [
        ("ok", "oom", "ended well on the source's Tesla T4, runs out of memory here: it went wrong (fake)"),
        ("ok", "diverged", "ended well on the source's Tesla T4, diverges here: it went wrong (fake)"),
        ("ok", "crashed", "ended well on the source's Tesla T4, crashed here: it went wrong (fake)"),
        ("diverged", "diverged", "diverged on the source's Tesla T4, diverges here: it went wrong (fake)"),
        ("diverged", "ok", "diverged on the source's Tesla T4, ends well here"),
        ("oom", "ok", "ran out of memory on the source's Tesla T4, ends well here"),
    ],
)
def test_runs_that_end_otherwise(outcome: str, status: str, words: str) -> None:
    assert explain(pair(run(status=status), published_outcome=outcome, published_speedup=None)) == words


def test_a_failure_without_a_message_has_no_colon() -> None:
    silent = run(status="crashed").model_copy(update={"message": ""})
    assert explain(pair(silent)) == "ended well on the source's Tesla T4, crashed here"


def test_a_run_cut_short_cannot_say_that_it_ends_well_where_the_source_diverged() -> None:
    cut = fake_run(fake_training("fp16-true", {"epochs": 10, "stop_after": 1}))
    assert explain(pair(cut, published_outcome="diverged")) == (
        "diverged on the source's Tesla T4, had not here by the end of a run cut short"
    )


def test_what_fits_here_and_did_not_there() -> None:
    fits = run(reserved=30 * 2**30)
    titan = {"published_gpu": "Titan RTX", "published_device": "TITAN RTX", "published_outcome": "oom"}
    assert explain(pair(fits, **titan)) == (
        "ran out of memory on the source's Titan RTX, ends well here: "
        "it takes 30.0 of 16 GiB, and the Titan RTX has 24 GB"
    )
    for unknown in (run(), run(reserved=2**30, environment=fake_environment(None))):
        assert explain(pair(unknown, **titan)).endswith("ends well here")
    nobody_s = {**titan, "published_device": "Titan 9000"}
    assert explain(pair(fits, **nobody_s)).endswith("ends well here")


def test_of_the_source_s_machine_only_its_datasheet_is_known() -> None:
    waits = [0.0, 0.1, 0.5]
    sentences = [
        explain(pair(run(waits=share, samples=n), speedup=s)) for share in waits for n in (1, BUSY) for s in (1.1, 5.0)
    ]
    assert all(sentences)
    for sentence in sentences:
        for clause in sentence.split(", and "):
            assert not ("Tesla T4" in clause and ("waits" in clause or "pace" in clause or "launching" in clause))
    assert explain(pair(fake_trial(fake_training(), status="timeout", message="m", step_seconds=()))).endswith(": m")


def test_what_nothing_explains_is_said_to_be_so() -> None:
    # The H200's datasheet promises more than the T4's, and the loop waits for nothing.
    sentence = explain(pair(run(samples=BUSY), speedup=1.4))
    assert sentence.startswith("not explained by what was measured: fp16's peak over fp32's is 8.0")
    assert "not explained" not in explain(pair(run(samples=BUSY), speedup=5.0))


def test_a_run_so_short_that_its_first_step_weighs() -> None:
    def short(precision: str, seconds: float, start: float) -> Trial:
        trial = run(precision, seconds=seconds)
        epochs = trial.ranks[0].epochs
        first = epochs[0].model_copy(update={"first_step_seconds": start})
        rank = trial.ranks[0].model_copy(update={"epochs": (first, *epochs[1:])})
        return trial.model_copy(update={"ranks": (rank,)})

    slow, fast = short("fp32", 10.0, 2.0), short("fp16-mixed", 5.0, 4.0)
    assert explain(pair(fast, slow, speedup=1.5)).startswith(
        "here the first step, in which libraries are loaded, is 40 % of the run in fp16-mixed and 10 % in fp32; "
        "without it the speed-up is 3.00×"
    )
    assert "first step" not in explain(pair(short("fp16-mixed", 5.0, 0.1), slow, speedup=1.5))
