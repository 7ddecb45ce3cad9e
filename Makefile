# Each target says what it does and is quick when nothing has changed; the work
# is in ci/, guest-kernel/ and image/. `make` alone lists the targets.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup build guest-kernel image lint test demo clean perf-create perf-exec perf-idle

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z -]+:.*## / {printf "%-36s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install the Debian packages that building and testing need
	@ci/setup

build: setup ## build every program
	@ci/build

guest-kernel: setup ## build the guest kernel
	@guest-kernel/build

image: build ## build the root images of the sandboxes
	@image/build base
	@image/build code-interpreter

lint: setup ## check formatting and run clippy with warnings as errors
	@ci/lint

test: ## run every test: unit, integration with microVMs, the E2B client suite
	@ci/test

demo: ## start warrend, build a template, use sandboxes through the e2b SDK
	@ci/demo

perf-create perf-exec perf-idle: build ## measure against the peers, in one run
	@tests/perf/$@

clean: ## remove what cargo built and the tests' virtual environment
	cargo clean
	rm -rf tests/.venv
