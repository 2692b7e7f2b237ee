"""A loader that sets the pace of two models alike, where no record tells waiting."""

from typing import Any

import pytest
from fake_engine import fake_environment, fake_epoch, fake_run, fake_training, fake_trial

from castwise.records.schema import Trial
from castwise.registry.suites import find_suite
from castwise.suites.compare_published import compare_with_published
from castwise.suites.same_loader import Fellow, fellow_of

SUITE = find_suite("fastai-cifar100")  # its RTX 2080 Ti took 3.9 times as long for a ResNet-152 as for a ResNet-18
BATCHES = {"fastai-resnet18": 720, "fastai-resnet34": 496, "fastai-resnet50": 164, "fastai-resnet152": 88}
OLDER = {"placing_seconds": None}
H200 = fake_environment(gpu="NVIDIA H200", capability=(9, 0))


def run(model: int, rate: float, *, waits: bool = False, loader: dict[str, Any] | None = None, **changes: Any) -> Trial:
    """Return a run that trains so many images a second, in a record that does not tell waiting unless said so."""
    workload = f"fastai-resnet{model}"
    recipe = {"loader": {"num_workers": 4} | (loader or {}), "epochs": 30, "stop_after": 1}
    precision = changes.pop("precision", "fp16-master")
    scale = "none" if precision == "fp32" else "512"
    changes = {"workload": workload, "batch_size": BATCHES[workload], "loss_scale": scale} | changes
    spec = fake_training(precision, recipe, **changes)
    measured = {"counted_seconds": 1.0, "counted_samples": int(rate)}
    epoch = fake_epoch(spec).model_copy(update=measured | ({} if waits else OLDER))
    return fake_run(spec, epoch, environment=H200)


def test_a_heavier_model_that_trains_as_fast_shows_the_loader() -> None:
    own, same, heavy = run(18, 950), run(34, 950), run(152, 970)
    found = fellow_of(own, SUITE, [own, same, heavy])
    assert found == Fellow(heavy, "RTX 2080 Ti", pytest.approx(6681 / 1708))
    assert fellow_of(own, SUITE, [own, same]) is None, "a ResNet-34 is not twice as heavy"
    assert fellow_of(own, SUITE, [own, run(152, 850)]) is None, "it trains more slowly, as arithmetic would have it"
    assert fellow_of(own, SUITE, [own, run(152, 1050)]) is None, "its loader fed it more than a tenth faster"


def test_a_lighter_model_that_trains_as_fast_shows_the_loader() -> None:
    own = run(152, 970)
    found = fellow_of(own, SUITE, [own, run(18, 950), run(50, 970)])
    assert found is not None
    assert (found.trial.spec.workload, found.times_as_long) == ("fastai-resnet18", pytest.approx(1708 / 6681))
    assert fellow_of(own, SUITE, [own, run(18, 1100)]) is None, "the loader has more to give"
    assert fellow_of(own, SUITE, [own, run(18, 850)]) is None, "so it has where the lighter model is slower"


@pytest.mark.parametrize(("light", "heavy"), [(950, 970), (1000, 1099), (1000, 910), (1000, 905), (1100, 990)])
def test_two_models_show_the_loader_for_each_other_or_not_at_all(light: float, heavy: float) -> None:
    pair = [run(18, light), run(152, heavy)]
    first, second = (fellow_of(own, SUITE, pair) for own in pair)
    assert (first is None) == (second is None)


@pytest.mark.parametrize(
    "other",
    [
        run(152, 970, loader={"num_workers": 8}),
        run(152, 970, precision="fp32"),
        run(152, 970, techniques=("channels-last",)),
        run(152, 970, data_set="synthetic:cifar100"),
        run(152, 970).model_copy(update={"status": "oom"}),
        fake_trial(fake_training(), status="crashed", step_seconds=()),
    ],
    ids=["workers", "precision", "techniques", "data", "failed", "another suite's"],
)
def test_what_is_behind_another_loader_shows_nothing(other: Trial) -> None:
    own = run(18, 950)
    assert fellow_of(own, SUITE, [own, other]) is None


def test_batches_that_lie_on_the_device_wait_for_no_loader() -> None:
    for changes in ({"loader": {"resident": True}}, {"techniques": ("resident-data",)}):
        pair = [run(model, 950, **changes) for model in (18, 152)]
        assert fellow_of(pair[0], SUITE, pair) is None
    steady = fake_trial()
    assert fellow_of(steady, SUITE, [steady, run(152, 950)]) is None


RESNET_152 = ("fastai-resnet152", "fp16-master")


BY_THE_LOADER = (
    "here the loader sets the pace in fp16-master: 971 images/s, and behind the same one 956 of fastai-resnet18, "
    "for which the source's RTX 2080 Ti took 1/3.9 of the time"
)


def reason(waits: bool, gain: float, light: float, heavy: float) -> str:
    """Return why a ResNet-152's speed-up is another one than its source's, which is 1.6."""
    trials = [run(18, light, waits=waits), run(152, heavy, waits=waits)]
    trials.append(run(152, heavy / gain, precision="fp32", batch_size=48, waits=waits))
    rows = compare_with_published(SUITE, trials)
    (row,) = [r for r in rows if r.trials and (r.published.workload, r.published.precision) == RESNET_152]
    return row.reason


def test_the_loader_is_named_before_any_datasheet() -> None:
    assert reason(False, 1.2, 956, 971).startswith(BY_THE_LOADER)
    assert "loader" not in reason(False, 1.2, 3000, 971), "nothing shows it"
    assert "behind the same" not in reason(True, 1.2, 956, 971), "the record tells waiting itself"


def test_the_loader_ends_a_larger_gain_and_is_not_why_it_is_larger() -> None:
    words = reason(False, 3.0, 956, 971)
    assert words.startswith("fp16's peak over fp32's is 4.0 on the RTX 2080 Ti and 14.8 on the NVIDIA H200; the gain")
    assert f"; the gain goes no further, for {BY_THE_LOADER}" in words
    assert "the gain" not in reason(False, 3.0, 3000, 971), "nothing ends it"
