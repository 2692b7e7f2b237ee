"""One suite from request to records: its data, its trials, its searches for the largest batch."""

from dataclasses import dataclass
from pathlib import Path

from castwise.errors import MissingDataError, StoreError, UsageError
from castwise.max_batch.search import BatchGrid, find_limit
from castwise.orchestrator.job import Job, build_job
from castwise.orchestrator.machine import Machine, check_device_name, provide
from castwise.orchestrator.runner import CachedMeasure, Listener
from castwise.orchestrator.session import TrialFailedError
from castwise.records.store import ResumePolicy, Store, try_to_write
from castwise.registry.datasets import find_data_set, is_real
from castwise.registry.precisions import find_precision
from castwise.registry.suites import Suite, limit_specs, specs_of
from castwise.registry.workloads import find_workload
from castwise.spec.trial import TrialSpec
from castwise.suites.options import SuiteOptions
from castwise.suites.result import SuiteResult

_FIND_TIMEOUT_SECONDS = 3600.0  # five downloads, the largest of 242 MB


@dataclass(frozen=True)
class SuiteJob:
    suite: Suite
    job: Job
    searches: tuple[tuple[TrialSpec, int], ...]  # what each starts from, and what its batch size is a multiple of

    def run(self) -> SuiteResult:
        trials = tuple(self.job.run())
        found = []
        for template, multiple in self.searches:
            measure = CachedMeasure(self.job.runner)
            found.append(tuple(find_limit(measure, template, BatchGrid(multiple, multiple, multiple))))
        return SuiteResult(self.suite, trials, tuple(found))


def prepare_suite(suite: Suite, options: SuiteOptions, machine: Machine, listener: Listener | None = None) -> SuiteJob:
    """Check a suite against the machine, and return the job that runs it.

    Raises:
        UsageError: The suite has no such cells, or its data is missing or damaged.
        StoreError: The results folder, or that of weights, cannot be written.
    """

    def limited(spec: TrialSpec) -> TrialSpec:
        limit = options.timeout_seconds
        return spec if limit is None else spec.with_protocol(timeout_seconds=limit)

    specs = [limited(spec) for spec in specs_of(suite, device=machine.device, choice=options)]
    searches = [
        (limited(spec), multiple)
        for spec, multiple in limit_specs(suite, device=machine.device, choice=options)
        if machine.environment.gpu_memory_bytes
    ]
    store = Store(options.results) if options.results is not None else None
    kept = options.keep_weights
    if kept is not None:
        try:  # before a run of hours, and not after it
            try_to_write(kept)
        except OSError as error:
            reason = error.strerror or error
            raise StoreError(
                f"Weights cannot be kept in '{kept}': {reason}. Name a folder under --keep-weights."
            ) from None
    data_sets = [spec.data_set for spec in (*specs, *(spec for spec, _ in searches)) if is_real(spec.data_set)]
    for name in dict.fromkeys(data_sets):
        try:
            provide(machine.engine, find_data_set(name), machine.data_dir)
        except MissingDataError as missing:
            raise MissingDataError(
                f"{missing} Or measure time and memory alone, on random samples of its shape, with --synthetic."
            ) from None
    specs = _with_weights(specs, options.weights, machine)
    job = build_job(machine, store, specs, ResumePolicy(options.retry, options.again), listener, kept)
    return SuiteJob(suite, job, tuple(searches))


def _with_weights(specs: list[TrialSpec], where: Path | None, machine: Machine) -> list[TrialSpec]:
    """Return the specs with the pretrained weights that their sources start from, if these can be found."""
    models = list(dict.fromkeys(model for spec in specs if (model := find_workload(spec.workload).pretrained)))
    if not models:
        return specs
    session = machine.engine.start(_FIND_TIMEOUT_SECONDS)
    try:
        files = session.find_weights(models, where)
    except TrialFailedError as failure:
        raise UsageError(failure.message) from None
    finally:
        session.close()
    found = ((spec, files.get(find_workload(spec.workload).pretrained or "")) for spec in specs)
    return [spec.model_copy(update={"weights": path}) if path else spec for spec, path in found]


def check(options: SuiteOptions) -> None:
    """Check the options before anything starts.

    Raises:
        UsageError: There is no such device, workload or precision.
    """
    check_device_name(options.device)
    for workload in options.workloads or ():
        find_workload(workload)
    for precision in options.precisions or ():
        find_precision(precision)
