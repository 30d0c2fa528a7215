# hooklab: `make lab` opens the course, `make test` runs the tests. Both set up what they need; with CPU=1, without CUDA.
# Without make (Windows): `uv run hooklab lab` and `uv run pytest`.
SHELL := /bin/sh
PYTHON ?= python3
# uv from the PATH when it is recent enough, else a private copy under .tools/.
UV := $(shell uv --version 2>/dev/null | awk '{split($$2, v, "."); if (v[1] > 0 || v[2] >= 8) print "uv"}')
ifeq ($(UV),)
UV := .tools/bin/uv
UV_NEEDED := $(UV)
endif
# Kernels start twice as fast from compiled bytecode, also where the environment forbids writing it.
unexport PYTHONDONTWRITEBYTECODE
VENV := $(or $(UV_PROJECT_ENVIRONMENT),.venv)
READY := $(VENV)/.hooklab-ready
READY_CPU := $(VENV)/.hooklab-cpu
RUN := $(UV) run --quiet
# What only the site or only homework needs is added to the environment of the course.
with = $(RUN) $(1:%=--group %)
# CPU=1 takes PyTorch's CPU wheels, which uv's lock cannot; an environment stays as it was made, also without CPU=1.
ifneq ($(or $(wildcard $(READY_CPU)),$(if $(wildcard $(READY)),,$(CPU))),)
READY := $(READY_CPU)
INSTALL_CPU := $(UV) pip install --python $(VENV) --torch-backend=cpu
RUN := $(UV) run --quiet --no-sync
with = $(INSTALL_CPU) --quiet $(1:%=--group %) && $(RUN)
endif
# One process per core, four at the most: each holds a kernel with PyTorch loaded.
PARALLEL := -n auto --maxprocesses 4
PYTEST := $(RUN) pytest $(PARALLEL)
# The address of the first notebook stands in what JupyterLab prints, also where no browser opens.

.PHONY: help lab site site-serve slides assignments bundle release-check test test-long test-portable refresh lint format bench screenshots clean
help:
	@echo "make lab            open the course in JupyterLab, in a working copy of your own: my-notebooks/"
	@echo "make lab CPU=1      the same with PyTorch's CPU wheels, for Linux without an NVIDIA GPU (once; make clean begins again)"
	@echo "make test           run the tests: the package, the notebooks, the rules, one look in a browser"
	@echo "make test-long      run the rest, with coverage, then the notebooks with other threads and instructions"
	@echo "make test-portable  run the notebooks in other settings: SETTINGS='default-1 native-2 as-is fresh'"
	@echo "make refresh        run every notebook again and store its outputs in normal form"
	@echo "make lint           check style and types (make format fixes the style)"
	@echo "make screenshots    run every notebook in a browser and keep pictures of it in tests/screenshots/"
	@echo "make site           build the course as a website, in both languages (make site-serve shows it)"
	@echo "make slides         make slides of every notebook, in both languages, for a room without a network: slides/"
	@echo "make assignments    make nbgrader assignments of the exercises, in homework/"
	@echo "make bundle         pack the course for a room without a network: FOR='windows-x86_64 3.12', or this machine"
	@echo "make bench          measure speed against the budgets"
	@echo "make release-check  see whether version, changelog and pins agree (TAG=v0.2.0: and the tag, too)"

.tools/bin/uv:
	@echo "hooklab: 正在把 uv 装进 .tools/（只装一次，几秒钟）…… installing uv into .tools/ (once, a few seconds) ..."
	@{ $(PYTHON) -m venv .tools && .tools/bin/python -m pip install -q uv; } >/dev/null 2>&1 \
	  || { $(PYTHON) -m pip install -q --target .tools/lib uv && mkdir -p .tools/bin && ln -sf ../lib/bin/uv .tools/bin/uv; } >/dev/null 2>&1 \
	  || { rm -rf .tools; \
	       echo "hooklab: $(PYTHON) 既建不了环境（venv），也装不了包（pip），或者没有网络。请自己安装 uv（不需要 root），再运行 make。"; \
	       echo "hooklab: $(PYTHON) can neither make an environment (venv) nor install (pip), or there is no network."; \
	       echo "         Install uv by hand, no root needed: https://docs.astral.sh/uv/ , then run make again."; exit 1; }

# What both ways of installing say when one stops.
STOPPED = { \
  echo "hooklab: 安装中断，原因见上面几行。再运行一次 make 即可，下载过的不会重来；下载慢，就先在 UV_DEFAULT_INDEX 里设镜像。"; \
  echo "hooklab: the installation stopped, for the reason above. Run make again: what has been downloaded is kept;"; \
  echo "         where downloads are slow, set a mirror in UV_DEFAULT_INDEX first."; exit 1; }
# Not folders, nor bytecode: these change whenever something runs.
NEEDS := pyproject.toml $(filter %.json %.js %.css %.py,$(wildcard labextension/* labextension/*/* labextension/*/*/*))

$(VENV)/.hooklab-ready: $(NEEDS) | $(UV_NEEDED)
	@echo "hooklab: 正在把 PyTorch、JupyterLab 等装进 $(VENV)（第一次要几分钟，Linux 上约 6 GB）……"
	@echo "hooklab: installing PyTorch, JupyterLab and the rest into $(VENV) (some minutes the first time, about 6 GB on Linux) ..."
	@test -e $@ || test "$$(uname -sm)" != "Linux x86_64" || command -v nvidia-smi >/dev/null || test -e /proc/driver/nvidia \
	  || echo "hooklab: 没有找到 NVIDIA 驱动：make lab CPU=1 不下载 CUDA（先按 Ctrl+C）。 No NVIDIA driver: make lab CPU=1 leaves CUDA out (Ctrl+C first)."
	@$(UV) sync || $(STOPPED)
	@touch $@

$(READY_CPU): $(NEEDS) | $(UV_NEEDED)
	@echo "hooklab: 正在把 PyTorch 的 CPU 版、JupyterLab 等装进 $(VENV)（第一次要几分钟）……"
	@echo "hooklab: installing PyTorch for the CPU, JupyterLab and the rest into $(VENV) (some minutes the first time) ..."
	@{ $(UV) venv --quiet --allow-existing $(VENV) && $(INSTALL_CPU) -e ".[lab]" --group dev; } || $(STOPPED)
	@touch $@

# In a working copy, my-notebooks/, which an update of the course leaves alone where it has been written in.
lab: $(READY)
	@exec $(RUN) hooklab lab

test test-long: export HOOKLAB_SCREENSHOTS ?= 0
test: $(READY)
	@$(PYTEST)

screenshots: $(READY)
	@HOOKLAB_SCREENSHOTS=1 HOOKLAB_FORK=0 $(RUN) pytest -q -rs -m long tests/browser/test_browser.py

test-long: $(READY)
	@$(call with,site homework) pytest $(PARALLEL) -m long --cov=hooklab --cov-report=term
	@$(MAKE) --no-print-directory test-portable

# Each setting runs the notebooks once from top to bottom: INSTRUCTIONS-THREADS, or `as-is`, or `fresh`, in which every
# kernel starts afresh. The instructions `default` are those without vectors; HOOKLAB_THREADS is what lesson.start() uses.
SETTINGS ?= default-1 native-2
test-portable: export HOOKLAB_AGAIN = 0
test-portable: $(READY)
	@for setting in $(SETTINGS); do echo "hooklab: the notebooks, $$setting"; \
	  instructions=$${setting%-*}; threads=$${setting#*-}; \
	  case $$setting in \
	    as-is) set -- ;; \
	    fresh) set -- HOOKLAB_FORK=0 ;; \
	    native-*) set -- -u ATEN_CPU_CAPABILITY HOOKLAB_THREADS=$$threads OMP_NUM_THREADS=$$threads ;; \
	    *) set -- ATEN_CPU_CAPABILITY=$$instructions HOOKLAB_THREADS=$$threads OMP_NUM_THREADS=$$threads ;; \
	  esac; env "$$@" $(PYTEST) -q notebooks || exit 1; done

refresh: $(READY)
	@$(RUN) python tools/refresh.py

lint: $(READY)
	@$(RUN) ruff check && $(RUN) ruff format --check && $(RUN) mypy

format: $(READY)
	@$(RUN) ruff check --fix; $(RUN) ruff format

# In an environment of its own: the peers that it compares with bring many packages. Every file runs, also after a miss.
bench: $(READY)
	@status=0; for file in tests/benchmarks/bench_*.py; do \
	  UV_PROJECT_ENVIRONMENT=.venv-bench $(UV) run --quiet --group bench python $$file || status=1; echo; done; exit $$status

site: $(READY)
	@$(call with,site) hooklab site

site-serve: site
	@echo "hooklab: http://127.0.0.1:8001/ (Ctrl+C ends it)"; $(RUN) python -m http.server -b 127.0.0.1 -d docs/site/_build/html 8001

slides: $(READY)
	@$(RUN) hooklab slides

# For one language: uv run --group homework hooklab assignments --language en
assignments: $(READY)
	@$(call with,homework) hooklab assignments

release-check: export TAG := $(TAG)
release-check: $(READY)
	@$(RUN) python tools/release_check.py $${TAG:+"$$TAG"}

# For another platform or Python: make bundle FOR='windows-x86_64 3.12'. A site and slides that lie there come along.
bundle: $(READY)
	@UV=$(UV) $(RUN) python tools/bundle.py $(FOR)

clean:
	rm -rf .venv .venv-bench .tools .pytest_cache .ruff_cache tests/screenshots
