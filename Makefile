# Everything a fresh machine needs: these targets make the environment themselves.
UV ?= $(shell command -v uv || echo $(HOME)/.local/bin/uv)
PYTHON ?= $(shell ls -d $(HOME)/.pyenv/versions/3.12.*/bin/python3.12 2>/dev/null | tail -1 || true)
RUN := .venv/bin
SYNC := .venv/.synced

.PHONY: smoke test lint env clean
.DEFAULT_GOAL := smoke

smoke: env            ## the main job: RL end to end on this machine
	$(RUN)/deskrl smoke $(ARGS)

test: env             ## lint, types and all tests, the end-to-end run included
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy src/deskrl
	$(RUN)/pytest $(ARGS)

lint: env             ## style and types only
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy src/deskrl

env: $(SYNC)

# uv installs the locked environment; it finds Python 3.12 itself, or fetches it, or takes pyenv's.
$(SYNC): pyproject.toml uv.lock
	@command -v uv >/dev/null 2>&1 || test -x $(HOME)/.local/bin/uv || python3 -m pip install --user --quiet uv \
		|| python3 -m pip install --user --quiet --break-system-packages uv
	$$(command -v uv || echo $(HOME)/.local/bin/uv) sync --frozen --extra train \
		--python $(if $(PYTHON),$(PYTHON),3.12)
	@touch $@

clean:                ## remove the environment (not runs, not the model cache)
	rm -rf .venv
