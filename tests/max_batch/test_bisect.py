"""The search for the largest batch, against made-up memories."""

from collections.abc import Callable

import pytest
from fake_engine import fake_environment, fake_spec, fake_trial

from castwise.max_batch.search import MOST_TRIALS, BatchGrid, Traced, find_limit
from castwise.records.schema import MemoryParts, RankSamples, Trial
from castwise.spec.memory_line import needed_bytes
from castwise.spec.trial import TrialSpec

GIB = 2**30
MEMORY = 80 * GIB


def limit_of(trials: list[Trial]) -> tuple[int | None, int | None]:
    """Return the largest batch that trained and the smallest that did not fit."""
    fits = [trial.spec.batch_size for trial in trials if trial.status in ("ok", "diverged")]
    fails = [trial.spec.batch_size for trial in trials if trial.status == "oom"]
    return max(fits, default=None), min(fails, default=None)


def made_up(peak_of: Callable[[int], float], usable: float = 0.94) -> Callable[[TrialSpec], Trial]:
    """Return what runs trials on a made-up device, of whose memory tensors can have a share."""

    def measure(spec: TrialSpec) -> Trial:
        peak = peak_of(spec.batch_size)
        if peak > usable * MEMORY:
            return fake_trial(spec, step_seconds=(), status="oom", message="no memory (fake)")
        trial = fake_trial(spec, environment=fake_environment(gpu_memory_bytes=MEMORY))
        ranks = (RankSamples(peak_allocated_bytes=int(peak), memory_parts=MemoryParts(outside_bytes=0)),)
        return trial.model_copy(update={"ranks": ranks})

    return measure


def search(fixed: float, per_sample: float, *, multiple: int = 8, usable: float = 0.94) -> list[Trial]:
    measure = made_up(lambda batch: fixed + per_sample * batch, usable)
    return find_limit(measure, fake_spec(), BatchGrid(multiple, start=max(8, multiple)))


@pytest.mark.parametrize("multiple", [1, 8, 24, 128])
@pytest.mark.parametrize("per_sample", [1e7, 45.78e6, 23e6, 4e8])
@pytest.mark.parametrize(("usable", "most"), [(0.99, 10), (0.97, 13), (0.95, 16), (0.9, 19), (0.7, 19)])
def test_it_ends_with_neighbours_and_few_trials(multiple: int, per_sample: float, usable: float, most: int) -> None:
    trials = search(1.5 * GIB, per_sample, multiple=multiple, usable=usable)
    fits, fails = limit_of(trials)
    room = usable * MEMORY - 1.5 * GIB
    expected = int(room / per_sample) // multiple * multiple
    if expected >= multiple:
        assert (fits, fails) == (expected, expected + multiple)
    sizes = [trial.spec.batch_size for trial in trials]
    assert len(set(sizes)) == len(sizes), "no size is tried twice"
    assert len(trials) <= most + 6 * (multiple == 1)


def test_it_goes_on_from_the_trials_of_an_earlier_search() -> None:
    measure = made_up(lambda batch: 1.5 * GIB + 45.78e6 * batch)
    whole = find_limit(measure, fake_spec(), BatchGrid(8))
    answer = [trial for trial in whole if trial.spec.batch_size in limit_of(whole)]
    assert find_limit(measure, fake_spec(), BatchGrid(8), earlier=answer) == answer, "nothing is tried again"
    began = whole[:3]
    found = find_limit(measure, fake_spec(), BatchGrid(8), earlier=began)
    assert limit_of(found) == limit_of(whole)
    assert len({trial.spec.batch_size for trial in found}) == len(found) <= len(whole)
    (largest,) = (trial for trial in answer if trial.status == "ok")
    sizes = [trial.spec.batch_size for trial in find_limit(measure, fake_spec(), BatchGrid(8), earlier=[largest])]
    assert min(sizes) == largest.spec.batch_size, "no small one is tried"


def test_a_traced_step_whose_small_batches_are_bound_by_the_optimizer() -> None:
    """ViT-B/16 in bf16-sr on an H200: small batches have the update's peak. 2336 trained, 2344 did not."""
    line = {8: int(1.81 * GIB), 32: int(2.75 * GIB), 3473: int(202.95 * GIB)}
    measure = made_up(lambda batch: needed_bytes(line, batch) * MEMORY / (139.05 * GIB), 0.987)
    traced = Traced(line, int(139.05 * GIB))
    trials = find_limit(measure, fake_spec(), BatchGrid(8), traced=traced)
    assert limit_of(trials)[0] == pytest.approx(2336, abs=16)
    assert len(trials) <= 4
    between_gaps = Traced(line, int(139.05 * GIB), 2338)
    assert find_limit(measure, fake_spec(), BatchGrid(8), usable=0.5, traced=between_gaps)[0].spec.batch_size == 2336
    trials = find_limit(measure, fake_spec(), BatchGrid(8), usable=0.9, traced=traced)
    assert trials[0].spec.batch_size == pytest.approx(0.9 / 0.99 * 2350, abs=16), (
        "gaps that an earlier search has found"
    )


def test_dpn_92_on_an_h200_is_found_in_four_trials() -> None:
    """DPN-92 in float32 on an H200: 5.84 GiB at 128 and 22.38 GiB at 512; 2944 trained, 3072 did not."""
    per_sample = (22.38 - 5.84) / (512 - 128)
    measure = made_up(lambda batch: (0.33 + per_sample * batch) * GIB * MEMORY / (139.05 * GIB), 128.5 / 139.05)
    assert limit_of(trials := find_limit(measure, fake_spec(), BatchGrid(128, 128, 128))) == (2944, 3072)
    assert len(trials) <= 4


def test_the_limit_is_found_if_memory_is_not_linear_in_the_batch() -> None:
    trials = find_limit(made_up(lambda batch: GIB * (1 + batch**0.8 / 4)), fake_spec(), BatchGrid(8))
    fits, fails = limit_of(trials)
    assert fits is not None
    assert fails == fits + 8
    assert len(trials) <= 14


def test_on_a_cpu_few_batches_are_too_large_if_memory_grows_faster_than_foretold() -> None:
    """There a batch that does not fit has taken a whole step."""

    def measure(spec: TrialSpec) -> Trial:
        size = spec.batch_size
        peak = 50e6 + 150e3 * size + 100e3 * max(0, size - 512)
        assert spec.memory_limit_bytes is not None
        if peak > spec.memory_limit_bytes:
            return fake_trial(spec, step_seconds=(), status="oom", message="no memory (fake)")
        return fake_trial(spec, peak_bytes=int(peak))

    trials = find_limit(measure, fake_spec(device="cpu", memory_limit_bytes=300 * 2**20), BatchGrid(8))
    fits, fails = limit_of(trials)
    assert fits is not None
    assert fails == fits + 8
    assert sum(trial.status == "oom" for trial in trials) <= 3
    assert len(trials) <= 8


def test_if_the_smallest_multiple_does_not_fit_smaller_ones_are_tried() -> None:
    assert limit_of(search(GIB, 14 * GIB)) == (5, 6)
    assert limit_of(search(GIB, 70 * GIB)) == (1, 2)


def test_if_not_even_one_sample_fits_there_is_no_limit() -> None:
    assert limit_of(search(100 * GIB, 1e6)) == (None, 1)


def test_an_accumulated_batch_is_never_split() -> None:
    measure = made_up(lambda batch: GIB + 14 * GIB * batch)
    trials = find_limit(measure, fake_spec(), BatchGrid(24, finest=3, start=24))
    assert limit_of(trials) == (3, 6)
    assert all(trial.spec.batch_size % 3 == 0 for trial in trials)


def test_a_diverged_trial_counts_as_trained() -> None:
    measure = made_up(lambda batch: GIB + 1e8 * batch)

    def diverging(spec: TrialSpec) -> Trial:
        trial = measure(spec)
        return trial if trial.status == "oom" else trial.model_copy(update={"status": "diverged"})

    assert limit_of(find_limit(diverging, fake_spec(), BatchGrid(8))) == limit_of(
        find_limit(measure, fake_spec(), BatchGrid(8))
    )


def test_a_crash_ends_the_search() -> None:
    trials = find_limit(lambda spec: fake_trial(spec, status="crashed"), fake_spec(), BatchGrid(8))
    assert [trial.status for trial in trials] == ["crashed"]


def test_a_crash_above_what_trains_bounds_it_as_well() -> None:
    """cuDNN has errors of its own for workspace that is not there, and kernels have limits of their own on sizes."""
    measure = made_up(lambda batch: GIB + 1e7 * batch)

    def with_a_bound(spec: TrialSpec) -> Trial:
        return fake_trial(spec, status="crashed", step_seconds=()) if spec.batch_size > 1000 else measure(spec)

    trials = find_limit(with_a_bound, fake_spec(), BatchGrid(8))
    assert max(trial.spec.batch_size for trial in trials if trial.status == "ok") == 1000
    assert min(trial.spec.batch_size for trial in trials if trial.status == "crashed") == 1008


def test_the_number_of_trials_is_limited() -> None:
    assert len(find_limit(fake_trial, fake_spec(), BatchGrid(8))) <= MOST_TRIALS
