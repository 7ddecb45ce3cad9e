# Shared by the image scripts: messages, the cache's place, hashes of inputs.
# shellcheck shell=bash

say() { echo "image: $*" >&2; }

fail() { # MESSAGE ADVICE
    echo "image: $1" >&2
    echo "  -> $2" >&2
    exit 1
}

cache_directory() { echo "${WARREN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/warren}"; }

hash_of() { sha256sum | cut -c1-16; }

need_root() {
    [ "$(id -u)" = 0 ] || fail "building a root image needs root" "run it as root or by sudo"
}

# Each argument is COMMAND:PACKAGE.
need_commands() {
    local pair missing=()
    for pair in "$@"; do
        command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
    done
    [ ${#missing[@]} = 0 ] && return
    say "installing ${missing[*]}"
    apt-get install -y -q "${missing[@]}" >&2 ||
        fail "could not install ${missing[*]}" "run apt-get update, then apt-get install ${missing[*]}"
}

# The recipe and those it extends, the innermost first.
recipe_chain() { # NAME
    local extends="$here/recipes/$1/extends"
    if [ -f "$extends" ]; then recipe_chain "$(cat "$extends")"; fi
    echo "$1"
}

packages_of() { # RECIPE...
    local recipe
    for recipe in "$@"; do
        sed 's/#.*//' "$here/recipes/$recipe/packages"
    done | tr -s ' \t' '\n' | grep . | sort -u
}

# What decides the unpacked tree.
tree_inputs() { # RECIPE...
    local recipe
    (. /etc/os-release && echo "$VERSION_CODENAME")
    cat "$here/bootstrap" "$here/install-python-packages"
    packages_of "$@"
    for recipe in "$@"; do
        cat "$here/recipes/$recipe/setup" "$here/recipes/$recipe/python-packages" 2>/dev/null || true
    done
}

# What decides the image besides the tree and the agent.
image_inputs() { # RECIPE...
    local recipe
    cat "$here/pack"
    for recipe in "$@"; do
        (
            cd "$here/recipes/$recipe/overlay" 2>/dev/null || exit 0
            find . -printf '%p %y %l\n' | sort
            find . -type f -print0 | sort -z | xargs -0 -r sha256sum
        )
    done
}
