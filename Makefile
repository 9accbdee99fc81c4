# The checks of a change, by name. `.ci/run` calls `lint` and `docs` too.
.PHONY: test lint docs ci
SITE ?= site

test:
	pytest

lint:
	ruff check .
	ruff format --check .
	lint-imports
	mypy
	codespell

docs:
	NO_MKDOCS_2_WARNING=1 mkdocs build --quiet --strict --site-dir "$(SITE)"

ci:
	.ci/run
