# `make demo` and `make test` are all the set-up there is: each makes .venv first, once, and again when the
# requirements change. PYTHON chooses the interpreter, 3.10 to 3.13: make test PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test test-all check docs browser sweep opinfo

demo: $(INSTALLED)
	$(BIN)/python examples/train_gpt2_within_budget.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The slow tests too: minutes each. An empty -m takes back the "not slow" of pyproject.toml.
test-all: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m ""

check: $(INSTALLED)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/compat/private_names.py

# The documentation site in site/, with warnings as errors.
docs: $(BIN)/mkdocs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

$(BIN)/mkdocs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

# --clear: a .venv that an interrupted run or another Python left behind is made anew.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, 13) or \
	sys.exit("memopt needs Python 3.10 to 3.13, $(PYTHON) is %d.%d; choose another: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# For the tests and the benchmark of the HTML page; on Debian, as root.
browser:
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends chromium chromium-driver

# Goes on where it stopped; SWEEP="--stages smallest default --limit-minutes 60" takes its options.
sweep: $(INSTALLED)
	$(BIN)/python -m benchmarks.sweep $(SWEEP)

# Torch's own operators and modules; goes on where it stopped.
opinfo: $(INSTALLED)
	$(BIN)/python -m benchmarks.opinfo $(OPINFO)
