# `make demo` and `make test` are all the set-up there is: each makes .venv first, once, and again when the
# requirements change. PYTHON chooses the interpreter, 3.10 to 3.13: make test PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
# Many tests start programs, which would compile memopt to bytecode each time.
export PYTHONDONTWRITEBYTECODE :=
# glibc would give large tensors back to the system when they are freed, which then clears their memory for the next ones.
KEEPING_MEMORY := MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483648 MALLOC_TOP_PAD_=67108864

CARD := .venv-card
CARD_INSTALLED := $(CARD)/installed
# The CUDA build whose private behaviour tests/card/stand_in was written for, and that the card's figures are from.
CARD_TORCH ?= 2.11.0

.PHONY: demo test test-all test-card pages check docs browser sweep opinfo matrix

demo: $(INSTALLED)
	$(BIN)/python examples/train_gpt2_within_budget.py

test: $(INSTALLED)
	$(KEEPING_MEMORY) $(BIN)/python -m pytest -n 2 --dist worksteal

# The slow tests too: minutes each. This -m takes back the "not slow" of pyproject.toml.
test-all: $(INSTALLED)
	$(KEEPING_MEMORY) $(BIN)/python -m pytest -n 2 --dist worksteal -m "not card"

# The programs of README and docs that `make test` leaves out: they train, or plan whole models.
pages: $(INSTALLED)
	$(KEEPING_MEMORY) $(BIN)/python -m pytest -n 2 -m slow tests/integrations/test_pages.py tests/docs/test_page_examples.py tests/test_readme.py

# On this machine's CUDA card, or where there is none on the stand-in of tests/card/stand_in (docs/card.md). The first
# time it downloads the CUDA build of torch, 5 GB with its libraries.
test-card: $(CARD_INSTALLED)
	$(CARD)/bin/python tests/card/stand_in/run.py -m pytest -m card tests/card

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

$(CARD_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(CARD)
	grep -v '^torch==' constraints.txt > $(CARD)/constraints.txt
	$(CARD)/bin/python -m pip install --quiet --disable-pip-version-check -c $(CARD)/constraints.txt torch==$(CARD_TORCH) -e ".[dev]"
	touch $@

# Goes on where it stopped; SWEEP="--stages smallest default --limit-minutes 60" takes its options.
sweep: $(INSTALLED)
	$(BIN)/python -m benchmarks.sweep $(SWEEP)

# Torch's own operators and modules; goes on where it stopped.
opinfo: $(INSTALLED)
	$(BIN)/python -m benchmarks.opinfo $(OPINFO)

# The tests under each supported Python and torch; goes on where it stopped.
matrix: $(INSTALLED)
	$(KEEPING_MEMORY) $(BIN)/python -m benchmarks.matrix $(MATRIX)
