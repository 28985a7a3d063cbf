# make train   train a model on two Horovod ranks (about five minutes on two cores)
# make demo-speech   speech recognition on two ranks, with sentences that espeak-ng speaks
# make check   formatting, lint, types, and the tests that start no other program: about a minute
# make test    the tests that prove each claim once, on one rank and on two
# make test-all   all tests, before a release: make test, then make test-rest, then new random cases
# make test-rest   what make test leaves out: launchers, stops, restarts, other numbers of ranks, and, as root, several hosts with Slurm
# make test-launchers   of these, the tests of launchers, stops, faults and restarts
# make test-times  make test and make test-rest, with what they take in the table of CONTRIBUTING.md
# make test-gpu   the tests that need a CUDA device; skipped with a line where there is none
# make fuzz    random files, configs, logs, datagrams: many times what make test draws (TIMES=20), with a new seed, which it prints
# make soak-faults  the table of faults and launchers in docs/resuming.md: each fault has to be named, or training continues
# make docs    the site of the documents in site/, which needs no network, and the pages of docs/ that are generated
# make test-soak   tests of rare failures, repeated many times, and what make test proves on fewer ranks or with fewer launchers
# Every target first sets up the environment if it is missing: tools/setup.sh for training, tools/setup_tests.sh for what tests use.

PYTHON_OF_VENV = .venv/bin/python
RANKS = 2
MPIRUN = mpirun -np $(RANKS) --bind-to none --oversubscribe

# Open MPI refuses to run as root, as in a container, without these variables.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
endif

G2P_PARTS = data/g2p/train.hdf data/g2p/dev.hdf data/g2p/test.hdf
RETURNN_DEMOS = data/returnn/demo-torch.config data/returnn/demo-rf.config data/returnn/demo-rf-pt-benchmark.py \
	data/returnn/demo-tf-attention.config data/returnn/tests/test_torch_engine.py

# Each of the many processes that tests start would compile the package anew where nothing may be written.
export PYTHONDONTWRITEBYTECODE =

# Three workers: tests that wait for processes leave a core idle. With two threads each, they would get in each other's way.
PYTEST = OMP_NUM_THREADS=1 tools/run_tests.sh $(PYTHON_OF_VENV) -m pytest -n 3 --dist loadscope --durations 10

# What the tests took: exp/tests/*.json, which tests/times.py reads. (With a blank before the file, pytest takes one that exists for tests.)
TIMES_OF = mkdir -p exp/tests && $(PYTEST) --times=exp/tests

.PHONY: setup setup-dev setup-tests data train demo-speech test test-all test-rest test-launchers test-times test-gpu test-soak soak-faults fuzz check format \
	docs help-time benchmark benchmark-data clean

setup:
	@bash tools/setup.sh

# Python's packages for the tests, formatting, types and documents.
setup-dev: setup
	@bash tools/setup_tests.sh python

# And Debian's.
setup-tests: setup
	@bash tools/setup_tests.sh

data: setup $(G2P_PARTS)

data/g2p/%.hdf: demos/g2p/words.py
	@mkdir -p data/g2p
	@$(PYTHON_OF_VENV) -m hvdtrain dump '{"class": "demos/g2p/words.py:Words", "part": "$*"}' $@ --overwrite

# RETURNN's demos and its tests, which our tests run. They are in the source distribution of the installed version, but
# not in its wheel. A pattern (% stands for the dot) makes all of them in one go.
data/returnn/demo-torch%config data/returnn/demo-rf%config data/returnn/demo-rf-pt-benchmark%py \
		data/returnn/demo-tf-attention%config data/returnn/tests/test_torch_engine%py: | setup-dev
	@mkdir -p data/returnn/tests
	@version=$$($(PYTHON_OF_VENV) -c "import importlib.metadata; print(importlib.metadata.version('returnn'))") && \
		$(PYTHON_OF_VENV) -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation --dest data/returnn returnn==$$version
	@tar --extract --gzip --file data/returnn/returnn-*.tar.gz --directory data/returnn --wildcards --strip-components 2 \
		'*/demos/demo-torch.config' '*/demos/demo-rf.config' '*/demos/demo-rf-pt-benchmark.py' '*/demos/demo-tf-*.config'
	@tar --extract --gzip --file data/returnn/returnn-*.tar.gz --directory data/returnn/tests --wildcards --strip-components 2 \
		'*/tests/*.py'
	@rm data/returnn/returnn-*.tar.gz

# The full config trains 24 epochs; two epochs take about five minutes.
train: data
	$(MPIRUN) $(PYTHON_OF_VENV) -m hvdtrain configs/g2p.py ++use_horovod 1 ++max_seqs 128 ++num_epochs 2 \
		++model exp/g2p-short/model ++log exp/g2p-short/train.log

# Debian's espeak-ng speaks the sentences, in about a minute; the config trains on them on two ranks.
data/speech/test/text: demos/speech/speak.py | setup
	@$(PYTHON_OF_VENV) demos/speech/speak.py data/speech

demo-speech: data/speech/test/text
	$(MPIRUN) $(PYTHON_OF_VENV) -m hvdtrain configs/speech.py ++use_horovod 1 ++max_seqs 16

test: setup-dev data
	$(TIMES_OF)/fast.json -m "not slow and not cluster"

# Also on three hosts with Slurm, all simulated on this machine; these are skipped with a reason if they cannot be set up. Most
# tests wait for processes, hence more workers.
test-rest: setup-tests data $(RETURNN_DEMOS)
	$(TIMES_OF)/slow.json -n 5 -m slow -rs

# Of these, the tests of launchers, stops, faults and restarts.
test-launchers: setup-tests
	$(PYTEST) -n 5 tests/launchers tests/cluster -m "" -rs

test-all: test test-rest
	HVDTRAIN_FUZZ_SEED=new $(PYTEST) -m "fuzz and not slow"

test-times: test test-rest
	$(PYTHON_OF_VENV) tests/times.py exp/tests/fast.json exp/tests/slow.json

test-gpu: setup-dev
	$(PYTHON_OF_VENV) -m pytest -m gpu -rs tests/learner/test_gpu.py

test-soak: setup-dev data $(RETURNN_DEMOS)
	$(PYTHON_OF_VENV) -m pytest -m "soak or again" --soak --durations 10

soak-faults: setup-dev
	$(PYTHON_OF_VENV) benchmarks/faults.py

TIMES = 20
fuzz: setup-dev data
	HVDTRAIN_FUZZ_SEED=$(or $(HVDTRAIN_FUZZ_SEED),new) HVDTRAIN_FUZZ_TIMES=$(TIMES) $(PYTEST) -m fuzz

check: setup-dev data $(RETURNN_DEMOS)
	$(PYTHON_OF_VENV) -m ruff format --check .
	$(PYTHON_OF_VENV) -m ruff check .
	$(PYTHON_OF_VENV) -m mypy
	$(PYTEST) -m "not slow and not cluster and not launches"

format: setup-dev
	$(PYTHON_OF_VENV) -m ruff format .
	$(PYTHON_OF_VENV) -m ruff check --fix .

# The pages that are generated, and the site of all pages: open site/index.html.
docs: setup-dev
	$(PYTHON_OF_VENV) tools/keys_page.py > docs/keys.md
	$(PYTHON_OF_VENV) tests/config/test_messages.py
	NO_MKDOCS_2_WARNING=1 $(PYTHON_OF_VENV) -m mkdocs build --quiet --clean --config-file tools/site/mkdocs.yml
	$(PYTHON_OF_VENV) tools/site/check.py site

# How long --help takes, as a multiple of "import numpy". Above 2.2, something that --help does not need is imported.
help-time: setup
	@PYTHONDONTWRITEBYTECODE= $(PYTHON_OF_VENV) tools/help_time.py

benchmark: data
	$(PYTHON_OF_VENV) benchmarks/training_loops.py

# Reading speed: all benchmarks in turn, some minutes in total on a quiet machine. Each has --help with options for its size.
DATA_BENCHMARKS = opening long_sequences short_sequences two_readers caching hdf_layouts hdf_alignment join_by_tag planning \
	balance computing_time checks speech shards

benchmark-data: setup-dev data
	@for name in $(DATA_BENCHMARKS); do \
		echo; echo "== benchmarks/$$name.py"; $(PYTHON_OF_VENV) benchmarks/$$name.py || exit 1; \
	done

clean:
	rm -rf exp data build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
