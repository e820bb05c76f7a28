# Every target sets up what it needs: `make sweep` and `make test` work in a fresh clone.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install sweep test test-all test-lab test-ray test-fake test-rest aws-lab lint format size bench bench-full gpu gpu-fake docs site dist dashboard audit clean faults ray-contract

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 12)))' \
	  || { echo "Paceline needs Python 3.11 or 3.12, $(PYTHON) is `$(PYTHON) --version`: make PYTHON=python3.12 ..."; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv \
	  || { rm -rf .venv; echo "no virtual environment could be made: apt-get install python3-venv"; exit 2; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[examples,test]'
	@touch $@

sweep: install
	$(BIN)/python -m tune examples/digits/sweep.yaml

# Files of which `test` runs nothing, and whose imports take seconds.
SLOW := tests/unit/test_tracking_clients.py tests/unit/test_recipes_transformers.py tests/unit/test_recipes_tuning.py
# With these pytest's processes keep to files, and Ray's cluster to one process.
BY_FILE := --dist loadfile --no-loadscope-reorder

# What a change is likely to break, in about five minutes on two cores; `test-all` is all there is.
test: install
	$(BIN)/python -m pytest -m "not full and not campaign" -n 3 $(BY_FILE) \
	  tests/on_ray tests/distributed tests/commands tests/contract tests/unit $(SLOW:%=--ignore=%)

# The lab (skipped without root) and what shares one Ray cluster mostly wait: each runs beside all else, one test after the
# other, and after the lab what needs a GPU, on a CUDA that needs none. What they say comes at their ends.
test-all: install
	+$(MAKE) --no-print-directory --jobs 3 test-lab test-ray test-rest test-fake

beside = mkdir -p build; $(BIN)/python $(1) >build/$@.log 2>&1; ended=$$?; cat build/$@.log; exit $$ended

test-lab: install
	$(call beside,-m pytest -m "not campaign" tests/lab)

test-ray: install
	$(call beside,-m pytest -m "not campaign" tests/on_ray)

test-fake: install
	$(if $(shell command -v g++),$(call beside,-m tests.fake_cuda -m pytest -m "gpu and not campaign" tests/gpu),\
	  @echo "skipped: the fake CUDA needs g++ (apt-get install g++)")

# The longest first.
test-rest: install
	$(BIN)/python -m pytest -m "not campaign" -n 2 $(BY_FILE) tests/distributed tests/commands tests/faults tests/contract benchmarks/tests tests/gpu tests/unit

# What the code uses of Ray, a sweep, a training and a drop-in sweep with another Ray, in an environment of its own (6 GB,
# minutes): `make ray-contract RAY=2.55.0`. The range is in pyproject.toml.
RAY ?= $(shell sed -n 's/^ray==//p' constraints.txt)
CONTRACT := build/ray-contract-$(RAY)
ray-contract: $(CONTRACT)/installed
	$(CONTRACT)/bin/python -m pytest tests/contract

build/ray-contract-%/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	sed 's/^ray==.*/ray==$*/' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet --constraint $(@D)/constraints.txt --editable '.[examples]' \
	  pytest pytest-timeout psutil
	@touch $@

# What needs a GPU, on a CUDA that needs none, and what is compiled, with another torch in an environment of its own
# (6 GB, minutes): `make gpu-fake TORCH=2.11.0`. The range is in pyproject.toml; tests/fake_cuda has what is not seen.
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
FAKE := build/gpu-fake-$(TORCH)
gpu-fake: $(FAKE)/installed
	$(FAKE)/bin/python -m tests.fake_cuda -m pytest -m gpu -n 2 tests/gpu
	$(FAKE)/bin/python -m pytest -m "not full" tests/unit/test_profiling.py

# All that comes with a torch goes by that torch.
build/gpu-fake-%/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	sed -E '/^(torch|torchvision|triton|cuda-.*|nvidia-.*)==/d' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet --constraint $(@D)/constraints.txt --editable '.[examples,bert]' \
	  torch==$* 'nvidia-cuda-cccl<14' pytest pytest-timeout pytest-xdist hypothesis psutil
	@touch $@

# `ray up cluster/aws.yaml` against AWS's API on this machine, without a network, with namespaces for hosts (some minutes;
# skipped without root). It is in `test-all`, too.
aws-lab: install
	$(BIN)/python -m pytest tests/lab/test_aws.py

# Thousands of fuzzed inputs a door, the tests that are too long for `test-all`, then a campaign of faults over real processes, hours long, which goes on where it stopped.
# `make faults n=500 seed=1`; `only=spawn` for a scenario or a kind of fault, without the inputs. docs/reliability.md says what it found.
n ?= 500
seed ?= 1
faults: install
	$(if $(only),,$(BIN)/python -m pytest --hypothesis-profile faults --hypothesis-seed $(seed) tests/unit/test_fuzz.py tests/distributed/test_plain_loop.py)
	$(if $(only),,$(BIN)/python -m pytest -m campaign tests benchmarks/tests)
	$(BIN)/python -m tests.faults --runs $(n) --seed $(seed) $(if $(only),--only "$(only)")

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# What a reader has to read: tokens, files, keys, commands.
size: install
	$(BIN)/python -m tests.size

# A short form of each on a CPU; the long one takes hours, goes on where it stopped today, and its figures are kept.
bench bench-full: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[peers]'
	$(BIN)/python -m benchmarks $(if $(filter bench-full,$@),--full)

# All that a GPU can show, in parts that go on where they stopped: `make gpu minutes=30`. docs/gpu.md has what it needs.
minutes ?= 7.5
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu --minutes $(minutes) --keep

# The pages that come from the code and from benchmarks/results/.
docs: install
	for page in config commands api benchmarks; do $(BIN)/python docs/make.py $$page > docs/$$page.md || exit 1; done
	$(BIN)/python docs/make.py train > trainers/schema.json
	$(BIN)/python docs/make.py sweep > tune/schema.json

# build/site, for any web server: `python3 -m http.server -d build/site`.
site: install
	$(BIN)/python docs/pages.py

# What a release is: sdist and wheel in dist/, the wheel installed where nothing else is. TAG=vX.Y.Z must be the version.
dist:
	@test -z "$(TAG)" || grep -qx 'version = "$(TAG:v%=%)"' pyproject.toml || { echo "$(TAG) is not pyproject's version"; exit 2; }
	@test -z "$(TAG)" || grep -q '^## $(TAG:v%=%) - ' CHANGELOG.md || { echo "CHANGELOG.md has no dated $(TAG)"; exit 2; }
	rm -rf dist build/dist
	$(PYTHON) -m venv build/dist
	build/dist/bin/python -m pip install --quiet --constraint constraints.txt build
	build/dist/bin/python -m build --quiet
	build/dist/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd build/dist && for door in train sweep cluster; do bin/paceline-$$door --help > /dev/null || exit 1; done

# Debian's prometheus on the loopback, with Ray's metrics and Paceline's; the address shows all of them at once.
dashboard:
	@command -v prometheus >/dev/null || { echo "prometheus is not installed: apt-get install prometheus (then import" \
	  "cluster/monitoring/grafana.json where you have Grafana)"; exit 2; }
	@echo "http://127.0.0.1:9090/graph?$$(awk -F, 'NR > 1 {printf "%sg%d.tab=0&g%d.expr=%s", (NR > 2 ? "&" : ""), \
	  NR - 2, NR - 2, $$1}' cluster/monitoring/metrics.csv)"
	prometheus --config.file=cluster/monitoring/prometheus.yml --web.listen-address=127.0.0.1:9090 \
	  --storage.tsdb.path=build/prometheus --log.level=warn

# The packages of constraints.txt against PyPI's list of known weaknesses. It needs that service: without it, or for a
# package that the service does not know, it fails and says so. No other target runs it.
audit: build/audit/bin/pip-audit
	build/audit/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off --requirement constraints.txt

build/audit/bin/pip-audit:
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet pip-audit==2.10.0

clean:
	rm -rf .venv build dist *.egg-info
