# Shared by the scripts of this folder: messages, steps with their time, paths.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target="$root/target/x86_64-unknown-linux-gnu/release"
cd "$root" || exit 1

say() { echo "==> $*"; }

# Runs a command as a named step, says how long it took, and keeps its exit code.
step() { # NAME COMMAND...
    local name=$1 started=$SECONDS code=0
    shift
    say "$name"
    "$@" || code=$?
    if [ "$code" = 0 ]; then
        say "$name: done in $((SECONDS - started)) s"
    else
        say "$name: FAILED after $((SECONDS - started)) s (exit code $code)"
    fi
    return "$code"
}

need_cargo() {
    command -v cargo >/dev/null || export PATH="$HOME/.cargo/bin:$PATH"
    command -v cargo >/dev/null || {
        echo "cargo is not installed; install Rust by rustup, then run this again" >&2
        exit 1
    }
}

# A virtual environment with the pinned client packages; made anew only when
# the requirements change.
python_environment() {
    local venv="$root/tests/.venv" requirements="$root/tests/client/requirements.txt"
    if ! cmp -s "$requirements" "$venv/requirements.txt"; then
        say "installing the client packages into tests/.venv"
        rm -rf "$venv"
        /usr/bin/python3 -m venv "$venv" &&
            "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$requirements" &&
            cp "$requirements" "$venv/requirements.txt"
    fi
}

# Builds kernel and root images where they are missing, and tells the tests where they are.
export_artifacts() {
    WARREN_KERNEL=$(guest-kernel/build --print-path | tail -n 1) &&
        WARREN_ROOTFS=$(image/build base --print-path | tail -n 1) &&
        WARREN_CODE_INTERPRETER_ROOTFS=$(image/build code-interpreter --print-path | tail -n 1) &&
        export WARREN_KERNEL WARREN_ROOTFS WARREN_CODE_INTERPRETER_ROOTFS WARREN_BIN="$target"
}
