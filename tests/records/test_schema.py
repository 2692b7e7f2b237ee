import json

import pytest
from fake_engine import fake_environment, fake_spec, fake_trial
from fake_gpu import fake_reading
from hypothesis import given
from hypothesis import strategies as st

from castwise.records.schema import Block, EnergyMeasurement, Facts, RankSamples, Trial

# What must be equal for figures to be set side by side, each with another value.
FINGERPRINTED: dict[str, object] = {
    "castwise": "9.9",
    "torch": "9.9",
    "torchvision": "9.9",
    "host": "another-host",
    "gpu": "Another Fake GPU",
    "driver": "9.9",
    "cuda": "9.9",
    "cudnn": "9",
    "num_threads": 99,
}

amounts = st.none() | st.integers(0, 2**63)
blocks = st.builds(
    Block,
    seconds=st.floats(min_value=1e-9, max_value=1e9),
    num_steps=st.integers(1, 10**6),
    loss=st.floats(),  # not-a-number and the infinities are what a diverged trial has
    loss_scale=st.none() | st.floats(),
    skipped_steps=st.integers(0, 100),
)
ranks = st.builds(
    RankSamples,
    blocks=st.lists(blocks, max_size=3).map(tuple),
    peak_allocated_bytes=amounts,
    peak_reserved_bytes=amounts,
    warm_up_peak_allocated_bytes=amounts,
)
facts = st.builds(
    Facts,
    num_parameters=st.integers(0, 2**40),
    units_per_sample=st.integers(1, 10_000),
    param_dtypes=st.dictionaries(st.text(), st.integers(0, 2**40), max_size=3),
    optimizer=st.text(),
    fp32_precision=st.dictionaries(st.text(), st.text(), max_size=3),
    data_note=st.none() | st.text(),
    warm_up_seconds=st.floats(min_value=0),
    settled=st.booleans(),
)
trials = st.builds(
    Trial,
    spec=st.builds(fake_spec, st.sampled_from(["fp32", "bf16-true"]), workload=st.text(), repeat=st.integers(0, 9)),
    status=st.sampled_from(["ok", "oom", "timeout", "crashed", "diverged", "unsupported"]),
    message=st.text(),
    facts=st.none() | facts,
    ranks=st.lists(ranks, max_size=2).map(tuple),
    environment=st.builds(fake_environment, st.none() | st.tuples(st.integers(1, 12), st.integers(0, 9))),
    started_at=st.text(),
    duration_seconds=st.floats(min_value=0),
    log=st.text(),
)


def strictly(text: str) -> object:
    """Parse JSON as the standard has it: no NaN, no Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@given(trials)
def test_a_trial_survives_json(trial: Trial) -> None:
    text = trial.model_dump_json(indent=1)
    strictly(text)
    again = Trial.model_validate_json(text)
    assert again.model_dump_json(indent=1) == text
    assert repr(again) == repr(trial)  # == would find no not-a-number equal to itself
    assert again.spec.key == trial.spec.key
    assert again.environment.fingerprint == trial.environment.fingerprint


@pytest.mark.parametrize("name", list(FINGERPRINTED))
def test_the_fingerprint_tells_machines_apart(name: str) -> None:
    assert fake_environment(**{name: FINGERPRINTED[name]}).fingerprint != fake_environment().fingerprint


def test_the_fingerprint_leaves_out_what_does_not_move_figures() -> None:
    same = fake_environment(commit=None, python="9.9", system="Linux 9.9", gpu_uuids=("GPU-0", "GPU-1"))
    assert same.fingerprint == fake_environment().fingerprint


def test_the_gpus_of_a_trial_are_as_many_from_its_device_on() -> None:
    machine = fake_environment(gpu_uuid="GPU-1", gpu_uuids=("GPU-0", "GPU-1", "GPU-2"), num_gpus=3)
    assert machine.gpus_of(fake_spec(device="cuda:1")) == {"cuda:1": "GPU-1"}
    two = fake_spec(device="cuda:1", world_size=2, parallelism="ddp")
    assert machine.gpus_of(two) == {"cuda:1": "GPU-1", "cuda:2": "GPU-2"}
    assert machine.gpus_of(fake_spec(device="cuda:2", world_size=2, parallelism="dp"))["cuda:3"] == ""
    assert fake_environment(None).gpus_of(fake_spec(device="cpu", world_size=2, parallelism="ddp")) == {}


def test_a_record_from_before_all_gpus_were_watched_has_the_first() -> None:
    readings = (fake_reading(),)
    metered = EnergyMeasurement(joules=500.0, seconds=1.0, num_ticks=10)
    trial = fake_trial(fake_spec(world_size=2, parallelism="ddp"), environment=fake_environment(gpu_uuid="GPU-0"))
    trial = trial.model_copy(update={"readings": readings, "energy_measurement": metered})
    old = json.loads(trial.model_dump_json())
    del old["environment"]["gpu_uuids"], old["metered"]["num_gpus"]
    del old["readings"][0]["num_gpus"], old["readings"][0]["whose"]
    read = Trial.model_validate_json(json.dumps(old))
    assert read == trial
    assert (read.readings[0].num_gpus, read.energy_measurement and read.energy_measurement.num_gpus) == (1, 1)
    assert read.environment.gpus_of(read.spec) == {"cuda:0": "GPU-0", "cuda:1": ""}


def test_a_renamed_field_keeps_its_first_name_in_json() -> None:
    reading = fake_reading(affected_gpus={"hw_slowdown": ("cuda:1",)})
    measured = EnergyMeasurement(joules=1.0, seconds=1.0)
    trial = fake_trial(fake_spec(), readings=(reading,))
    trial = trial.model_copy(update={"session_id": "s", "energy_measurement": measured})
    document = json.loads(trial.model_dump_json())
    assert {"sitting", "metered"} <= document.keys()
    assert "lead_steps" in document["ranks"][0]["blocks"][0]
    assert {"own"} <= document["spec"].keys()
    assert "lead_seconds" in document["spec"]["protocol"]
    assert "whose" in document["readings"][0]
    assert Trial.model_validate_json(trial.model_dump_json()) == trial
