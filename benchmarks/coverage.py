"""How often castwise's 95 % intervals hold the true value, and its verdicts and answers are right, on simulated times.

    python benchmarks/coverage.py [--draws N] [--only NAME] [--case NAME] [--out FILE]

Needs no GPU. Each draw is a whole `castwise run`, or one with `--within 1%`, of nine precisions: castwise's own rounds,
stop rule, intervals, verdicts and decision, on step times that are drawn. A scenario says how these vary: an effect of
the process, drift that all share, autocorrelated noise of each turn, heavy tails, outliers, processes in a slow mode.
"""

import argparse
import itertools
import json
import math
import random
import statistics as stdlib_statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from stored import markdown, write

from castwise.analysis import decide as decisions
from castwise.analysis import speedup, statistics, steady_metrics
from castwise.analysis.decide import decide, strays_in_words
from castwise.analysis.result_table import rows_of_steps
from castwise.orchestrator import rounds
from castwise.orchestrator.block_schedule import BlockSchedule
from castwise.orchestrator.rounds import Rounds, StopRule, prior_stats_of
from castwise.orchestrator.runner import NullListener, TrialRunner
from castwise.records.schema import Block, Environment, Facts, RankSamples, Trial
from castwise.registry.precisions import precision_row
from castwise.spec.options import DurationOptions
from castwise.spec.trial import CUDA_ROUND, TrialSpec

_BLOCKS = 3 * CUDA_ROUND.num_blocks  # more than any process takes
_NOISES = 2**18  # drawn at once
_RUN, _WITHIN = StopRule.of(DurationOptions()), StopRule.of(DurationOptions(within=0.01))
# How many times as fast as PyTorch's default each precision is in truth, if there is anything to gain. Source: chosen
# here, with several that are nearly as fast as another, and two within the margin around 1 or just beyond it.
GAINS = {
    "default": 1.0,
    "fp32": 0.989,
    "tf32": 1.009,
    "bf16-mixed": 1.25,
    "fp16-mixed": 1.23,
    "bf16-master": 1.27,
    "fp16-master": 1.28,
    "bf16-true": 1.32,
    "fp16-true": 1.3,
}
EQUAL = dict.fromkeys(GAINS, 1.0)
# What is drawn: a command, and what is true.
CASES = {
    "run, equal": (_RUN, EQUAL),
    "run, gains": (_RUN, GAINS),
    "within, equal": (_WITHIN, EQUAL),
}


@dataclass(frozen=True)
class Scenario:
    """How block times vary; standard deviations as shares of the step time."""

    name: str
    process: float  # of a process's own effect
    turn: float  # of the noise of a turn of usual length
    drift: float = 0.0003  # of a turn's step of the random walk that all share
    trend: float = 0.0  # shared slowing-down from the first turn to the last
    autocorrelation: float = 0.0  # of the noise, from turn to turn
    outliers: float = 0.0  # share of turns that something hits, lengthened by a fifth on average
    modes: float = 0.0  # how far apart two speeds are that all but the baseline flip between, within a process
    heavy: bool = False  # noise and process effects have heavy tails (Student's with 3 degrees of freedom)
    slow: float = 0.0  # the share of processes of 16-bit precisions that are in a slow mode
    slower_by: float = 0.0  # by which they are slower


def _process(percent: float) -> Scenario:
    return Scenario(f"processes differ by {percent:g} %", process=percent / 100, turn=percent / 200)


SCENARIOS = (
    Scenario("GPU-bound", process=0.001, turn=0.0005),
    Scenario("GPU-bound, warming up", process=0.001, turn=0.0005, drift=0.003, trend=0.02),
    # A GradScaler's wait for the device, once a step, seen on an H200: ResNet-50 in fp16-mixed.
    Scenario("two speeds", process=0.001, turn=0.0005, modes=0.023),
    *map(_process, (0.2, 0.4, 0.7, 1.0, 1.5, 2.4, 4.0, 7.0)),
    Scenario("heavy tails", process=0.004, turn=0.01, drift=0.001, heavy=True),
    Scenario("heavy tails, 3 %", process=0.03, turn=0.01, drift=0.001, heavy=True),
    Scenario("host-bound", process=0.01, turn=0.03, drift=0.001, autocorrelation=0.6, outliers=0.05),
    Scenario("host-bound, heavy tails", process=0.01, turn=0.05, autocorrelation=0.5, outliers=0.1, heavy=True),
    Scenario("one process in five +14 %", process=0.002, turn=0.001, slow=0.2, slower_by=0.14),
    Scenario("one process in ten +25 %", process=0.002, turn=0.001, slow=0.1, slower_by=0.25),
)


def _machine() -> Environment:
    return Environment(
        castwise="0",
        python="3",
        torch="2",
        host="simulated",
        system="Linux",
        cpu="simulated",
        num_threads=1,
        gpu="NVIDIA H200",
        capability=(9, 0),
        num_gpus=1,
    )


_FACTS = Facts(num_parameters=1, units_per_sample=1, param_dtypes={}, optimizer="SGD", fp32_precision={})
_SPECS = [
    TrialSpec(
        workload="resnet50",
        precision=name,
        loss_scale=precision_row(name).loss_scale,
        batch_size=256,
        device="cuda:0",
        protocol=CUDA_ROUND,
    )
    for name in GAINS
]
_TRIAL = Trial(
    spec=_SPECS[0],
    status="ok",
    facts=_FACTS,
    ranks=(RankSamples(blocks=(), peak_allocated_bytes=2**30),),
    environment=_machine(),
    started_at="2000-01-01T00:00:00.000+00:00",
    duration_seconds=1.0,
)
_BLOCK = Block(seconds=1.0, num_steps=1, loss=None)


_MEANS: dict[int, list[float]] = {}  # of the trials of a draw, by id


def _block_means(trial: Trial) -> list[float]:
    if id(trial) not in _MEANS:
        _MEANS[id(trial)] = steady_metrics.step_times(trial)
    return _MEANS[id(trial)]


def _one_process_shows(baselines: Sequence[Trial], trials: Sequence[Trial]) -> str | None:
    """Return what castwise's function does, at once if no two processes differ by the factor that it asks for."""
    middles = [speedup.pseudomedian(_block_means(each)) for each in (*baselines, *trials)]
    return (
        None
        if max(middles, default=0.0) < decisions.CLEAR * min(middles, default=1.0)
        else _REAL_LOOK(baselines, trials)
    )


_REAL_LOOK = decisions.one_process_shows


def hasten() -> None:
    """Leave out what is always the same for simulated trials, and compute in floats what is exact: most of the time."""

    def stdev(values: Iterable[float]) -> float:
        known = list(values)
        middle = sum(known) / len(known)
        return math.sqrt(sum((each - middle) ** 2 for each in known) / (len(known) - 1))

    stdlib_statistics.stdev = stdev
    statistics.student_quantile = cache(statistics.student_quantile)
    speedup._is_in_stretch = lambda _: False
    speedup._power_limit_bias = lambda _: 0.0
    speedup.block_means = rounds.block_means = _block_means
    decisions.one_process_shows = rounds.one_process_shows = _one_process_shows


class Draws:
    """Random numbers of a scenario, drawn many at once."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self._rng = scenario, np.random.default_rng(seed)
        self.choose = random.Random(seed)

    def noise(self, count: int) -> np.ndarray:
        """Return noise of a standard deviation of 1."""
        if self.scenario.heavy:
            return self._rng.standard_t(3, count) / math.sqrt(3)
        return self._rng.normal(0, 1, count)

    def blocks(self, *, is_baseline: bool, is_slow: bool) -> np.ndarray:
        """Return how many times as long as usual each block of a process takes, without drift."""
        scenario, own = self.scenario, self.noise(_BLOCKS)
        if rho := scenario.autocorrelation:
            for block in range(1, _BLOCKS):
                own[block] = rho * own[block - 1] + math.sqrt(1 - rho**2) * own[block]
        own *= scenario.turn
        if scenario.modes and not is_baseline:
            own += scenario.modes * (self._rng.integers(0, 2, _BLOCKS) - 0.5)
        if scenario.outliers:
            own += (self._rng.random(_BLOCKS) < scenario.outliers) * self._rng.exponential(0.2, _BLOCKS)
        return np.exp(own + self.noise(1)[0] * scenario.process) * (1 + is_slow * scenario.slower_by)

    def drift(self) -> np.ndarray:
        """Return the drift of a session's turns, as factors."""
        turns, scenario = CUDA_ROUND.num_blocks, self.scenario
        walk = np.cumsum(self._rng.normal(0, scenario.drift, turns)) + np.linspace(0, scenario.trend, turns)
        return np.exp(walk)


class Simulated(Rounds):
    """castwise's rounds, whose sessions draw their step times."""

    def __init__(self, rule: StopRule, draws: Draws, gains: dict[str, float]) -> None:
        runner = TrialRunner(None, None, _TRIAL.environment, NullListener())  # type: ignore[arg-type]
        super().__init__(runner, _SPECS, rule)
        self._draws, self._gains = draws, gains
        self.slow = Counter[str]()  # processes in the slow mode, by precision

    def _run_group(self, group: list[TrialSpec], number: int, *, one_by_one: bool) -> list[list[TrialSpec]]:
        del one_by_one
        fresh = [spec.model_copy(update={"repeat": self._free_repeat(spec)}) for spec in group]
        processes = [self._start(spec, is_baseline=index == 0) for index, spec in enumerate(fresh)]
        baseline, drift = processes[0], self._draws.drift()
        live = list(processes)
        for turn in itertools.count():
            # As InterleavedSession does it: while the baseline needs blocks, all take them.
            if not baseline.turns.goes_on:
                live = [each for each in live if each is baseline or each.turns.goes_on]
            if live == [baseline] or not any(each.turns.goes_on for each in live):
                break
            may_be_long = baseline.turns.is_quiet
            for each in live:
                each.take(float(drift[turn]), may_be_long=may_be_long)
        for each in processes:
            ranks = (_TRIAL.ranks[0].model_copy(update={"blocks": tuple(each.taken)}),)
            update = {"spec": each.spec, "ranks": ranks, "session_id": f"s{number}"}
            self._keep(_TRIAL.model_copy(update=update))
        return []

    def _start(self, spec: TrialSpec, *, is_baseline: bool) -> "Process":
        is_slow = precision_row(spec.precision).is_16_bit and self._draws.choose.random() < self._draws.scenario.slow
        self.slow[spec.precision] += is_slow
        blocks = self._draws.blocks(is_baseline=is_baseline, is_slow=is_slow) / self._gains[spec.precision]
        return Process(spec, blocks, BlockSchedule(CUDA_ROUND, prior_stats_of(self._of(spec))))


@dataclass
class Process:
    """A process of a session: blocks of the usual length in a row, of which each turn takes one or several."""

    spec: TrialSpec
    blocks: np.ndarray
    turns: BlockSchedule
    taken: list[Block] = field(default_factory=list)
    begun: int = 0

    def take(self, drift: float, *, may_be_long: bool) -> None:
        """Take a turn, while drift makes the machine slower."""
        length = self.turns.length if may_be_long else 1
        seconds = float(self.blocks[self.begun : self.begun + length].mean()) * drift
        self.turns.add(length * seconds, length, length)
        self.taken.append(_BLOCK.model_copy(update={"seconds": length * seconds, "num_steps": length}))
        self.begun += length


def one_draw(draws: Draws, rule: StopRule, gains: dict[str, float], found: Counter[str]) -> None:
    """Add what one command says to the counts."""
    _MEANS.clear()
    simulated = Simulated(rule, draws, gains)
    trials, scenario, margin = simulated.run(), draws.scenario, rule.margin
    rows = rows_of_steps(trials, margin)
    mode = scenario.slow * math.log1p(scenario.slower_by)
    truth = {name: gain * math.exp(-mode * precision_row(name).is_16_bit) for name, gain in gains.items()}
    for row in rows:
        ratio, true = row.default_estimate, truth[row.precision]
        if row.precision == "default" or ratio is None or row.verdict is None:
            continue
        found["processes"] += len(row.trials)
        found["comparisons"] += 1
        right = {"faster": true > 1, "slower": true < 1, "same": 1 - margin <= true <= 1 + margin}
        found["wrong"] += not right.get(row.verdict.kind, True)
        if ratio.n > 1:
            found["intervals"] += 1
            found["covered"] += ratio.low <= true <= ratio.high
        is_said = bool(strays_in_words(row.trials))
        found["said"] += is_said
        if simulated.slow[row.precision]:
            found["with a slow process"] += 1
            found["slow and said"] += is_said
    (advice,) = decide(rows)
    found[advice.decision] += 1
    found["rounds"] += max(len(row.trials) for row in rows)
    if advice.decision == "take":
        assert advice.precision is not None
        assert advice.over_default is not None
        stated, true = advice.over_default, truth[advice.precision]
        found["false takes"] += true <= 1
        found["taken above"] += stated.low > true
        for name, value in (("stated", stated.value), ("expected", min(stated.value, advice.expected or math.inf))):
            found[f"{name} above the truth, 0.01 %"] += round(1e4 * math.log(value / true))


def measure(
    scenario: Scenario, num_draws: int, seed: int, cases: Sequence[str], known: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what was right of one scenario, by case, with what an earlier run found of it."""
    results = dict(known)
    for name in cases:
        found = Counter[str](known.get(name, {}))
        draws = Draws(scenario, seed + 1000 * found["draws"])  # other ones than the earlier run's
        for _ in range(num_draws):
            one_draw(draws, *CASES[name], found)
        found["draws"] += num_draws
        results[name] = dict(found)
    return {**asdict(scenario), "found": results}


class Rates:
    """What was found of a scenario, as shares."""

    def __init__(self, recorded: Mapping[str, Any]) -> None:
        self.name, self._found = recorded["name"], recorded["found"]
        self.has_modes = bool(recorded["slow"])
        self.num_draws = int(self._found["run, equal"]["draws"])

    def of(self, case: str, what: str, among: str = "draws") -> float:
        """Return how often something was found in a case, of all draws or among something else."""
        found = self._found[case]
        return float(found.get(what, 0) / max(1, found.get(among, 0)))

    def covered(self, *cases: str) -> float:
        """Return the share of intervals of these cases that hold the truth."""
        counts = [sum(self._found[case][what] for case in cases) for what in ("covered", "intervals")]
        return float(counts[0] / counts[1])

    @property
    def promised(self) -> dict[str, tuple[float, float]]:
        """Return what castwise promises a rate of, of `run` and with `--within`."""
        within = "within, equal"
        return {
            "covered": (self.covered("run, equal", "run, gains"), self.covered(within)),
            "wrong verdicts": (
                max(self.of(case, "wrong", "comparisons") for case in ("run, equal", "run, gains")),
                self.of(within, "wrong", "comparisons"),
            ),
            "taken without a gain": (self.of("run, equal", "false takes"), self.of(within, "false takes")),
        }

    def excess(self, figure: str) -> float:
        """Return by how much a figure of what is taken is above the truth in the mean, as a share."""
        return self.of("run, gains", f"{figure} above the truth, 0.01 %", "take") / 1e4


def _read(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["scenarios"]
    return found


def promises(path: Path) -> str:
    """Return what is promised, and the worst rate of all scenarios without slow modes."""
    found = [each for each in map(Rates, _read(path)) if not each.has_modes]
    cells = []
    for promise, name, worst in (
        ("a 95 % interval holds the true value in at least 94 %", "covered", min),
        ("at most 5 % of verdicts are wrong", "wrong verdicts", max),
        ("at most 5 % of answers take a precision that gains nothing", "taken without a gain", max),
    ):
        run, within = (worst(each.promised[name][place] for each in found) for place in (0, 1))
        cells.append((promise, f"{run:.1%}", f"{within:.1%}"))
    return "\n".join(markdown("promise | worst, `run` | worst, `--within 1%`", "lrr", cells)) + "\n"


def table(path: Path) -> str:
    """Return the rates of all scenarios without slow modes."""
    cells = []
    for each in map(Rates, _read(path)):
        if not each.has_modes:
            rates = [rate for pair in zip(*each.promised.values(), strict=True) for rate in pair]
            processes = [each.of(case, "processes", "comparisons") for case in ("run, equal", "within, equal")]
            run, within = ([f"{rate:.1%}" for rate in rates[start : start + 3]] for start in (0, 3))
            figures = [f"{each.excess(figure):+z.1%}" for figure in ("stated", "expected")]
            cells.append(
                (each.name, each.num_draws, *run, f"{processes[0]:.1f}", *figures, *within, f"{processes[1]:.1f}")
            )
    rates_of = "covered | wrong verdicts | taken without a gain | processes"
    heading = (
        f"scenario | draws | `run`: {rates_of} | taken: stated above the truth | expected | `--within 1%`: {rates_of}"
    )
    return "\n".join(markdown(heading, "l" + "r" * 11, cells)) + "\n"


def modes(path: Path) -> str:
    """Return what is seen and said of slow modes."""
    cells = []
    for each in map(Rates, _read(path)):
        if each.has_modes:
            for name, case in (("`run`", "run, equal"), ("`--within 1%`", "within, equal")):
                shares = [
                    each.covered(case),
                    each.of(case, "with a slow process", "comparisons"),
                    each.of(case, "slow and said", "with a slow process"),
                ]
                cells.append((f"{each.name}, {name}", *(f"{share:.0%}" for share in shares)))
    heading = "scenario | covered | a slow process was among them | and was said"
    return "\n".join(markdown(heading, "lrrr", cells)) + "\n"


def main() -> None:
    """Simulate every scenario and print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--only", default="", help="scenarios with this in their names")
    parser.add_argument("--case", choices=CASES, help="this case alone")
    parser.add_argument("--out", type=Path, help="a record; what it has already counts, too")
    arguments = parser.parse_args()
    hasten()
    has_record = arguments.out is not None and arguments.out.exists()
    results = {each["name"]: each for each in _read(arguments.out)} if has_record else {}
    cases = [arguments.case] if arguments.case else list(CASES)
    for seed, scenario in enumerate(SCENARIOS):
        if arguments.only not in scenario.name:
            continue
        known = results.get(scenario.name, {"found": {}})["found"]
        results[scenario.name] = measure(scenario, arguments.draws, seed, cases, known)
        for name in cases:
            each = results[scenario.name]["found"][name]
            count, takes = each["draws"], each.get("take", 0)
            print(
                f"{scenario.name:26} {name:13} covers {each['covered'] / each['intervals']:6.1%}, "
                f"wrong {each['wrong'] / each['comparisons']:5.1%}, "
                f"false takes {each.get('false takes', 0) / count:5.1%} of {takes / count:4.0%}, above the truth "
                f"{each.get('taken above', 0) / max(1, takes):5.1%}, by "
                f"{each.get('stated above the truth, 0.01 %', 0) / 100 / max(1, takes):+5.2f} %, expected by "
                f"{each.get('expected above the truth, 0.01 %', 0) / 100 / max(1, takes):+5.2f} %, "
                f"modes said {each['said'] / each['comparisons']:5.1%}, "
                f"of slow ones {each.get('slow and said', 0) / max(1, each.get('with a slow process', 0)):4.0%}, "
                f"rounds {each['rounds'] / count:4.1f}, processes {each['processes'] / each['comparisons']:4.1f}",
                flush=True,
            )
        write(arguments.out, {"scenarios": list(results.values())})


if __name__ == "__main__":
    main()
