# castwise: `make demo` shows it, `make test` checks it; both install what they need into .venv.
# `make test-long` runs the tests that `make test` leaves out. CI runs both.
PYTHON ?= python3
BIN := .venv/bin
# Real data sets lie here, or are downloaded to here.
export CASTWISE_DATA ?= data

.PHONY: demo test test-long docs browser faults format lint types tests slow-tests test-oldest tables pictures gpu-tests clean

demo: .venv/installed-all
	$(BIN)/castwise run

test:
	$(MAKE) --jobs 2 tests lint types

# Of test-oldest what depends on torch's version most: castwise's own loop, and scripts in a precision from outside.
test-long: OLDEST = tests/apply tests/registry tests/trial/test_loop.py
test-long: slow-tests test-oldest

lint: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tests/source_size.py

types: .venv/installed-dev
	$(BIN)/mypy

# Tests of one group share what one process has set up. uv installs no bytecode; written at the first import, it halves the
# time of all later ones.
tests slow-tests test-oldest: export PYTHONDONTWRITEBYTECODE =
PYTEST := bin/python -m pytest -n 2 --dist loadgroup

tests: .venv/installed-dev
	.venv/$(PYTEST) -m "not gpu and not slow"

slow-tests: .venv/installed-dev
	.venv/$(PYTEST) -m "slow and not gpu"

# What runs with torch, on a CPU, with the oldest versions that pyproject.toml permits. Needs 6 GB of disk.
OLDEST := tests/apply tests/trial tests/orchestrator tests/registry tests/analysis
test-oldest: .venv-oldest/installed
	.venv-oldest/$(PYTEST) -m "not gpu and not slow" $(OLDEST)
	.venv-oldest/$(PYTEST) tests/trial/test_script_contract.py

# The documentation site, as site/index.html; it opens without a server. A broken link or anchor is an error, here and in
# `make tests`, which builds it too.
docs: .venv/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The browser that the tests of reports drive; without one they are skipped. Needs the right to install packages.
browser:
	@command -v chromium || command -v google-chrome || \
	{ command -v apt-get >/dev/null || { echo "Install Chromium or Chrome with your system's package manager."; exit 1; }; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; }

# The long form of tests/faults, of one to two hours on a core: 1,000 faults and 100,000 hostile inputs. It goes on from where it
# was stopped, and writes the table of docs/reliability.md.
faults: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/run_faults.py

# The same checks on a machine with a GPU, where CI has none.
gpu-tests: .venv/installed-dev
	$(BIN)/python -m pytest -m gpu

format: .venv/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Writes the tables of README and docs from the records under benchmarks/records/ and from the program.
tables: .venv/installed-dev
	$(BIN)/python benchmarks/tables.py

# Takes the pictures of the docs anew, of the same records; needs a browser.
pictures: .venv/installed-dev browser
	$(BIN)/python benchmarks/hero.py
	$(BIN)/python benchmarks/own_script/picture.py draw
	$(BIN)/python benchmarks/predict_study.py --draw
	$(BIN)/python benchmarks/screenshots.py

.venv/installed-%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "castwise needs Python 3.11 or newer; name one with make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[$*]'
	@touch $@

# uv resolves what pyproject.toml names to its oldest versions, and what that needs in turn to its newest.
.venv-oldest/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	.venv-oldest/bin/uv pip install --quiet --python .venv-oldest/bin/python --resolution lowest-direct \
	  --editable '.[measure,report,timm,test]'
	@touch $@

clean:
	rm -rf .venv .venv-oldest .pytest_cache .ruff_cache .mypy_cache castwise-results site
