#!/usr/bin/env bash
# Makes or completes a virtual environment; what goes wrong ends in one line that says what is missing.
#
#   infra/install.sh make  VENV PYTHON GIGABYTES     a virtual environment, after a look at Python and the disk
#   infra/install.sh pip   VENV ARGUMENTS...         pip install with these arguments; its log in VENV/install.log
set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 1
}

# "3.11", "3.12" or "3.13"; fails for any other version, and where there is no such Python.
supported_version() {
    "$1" -c 'import sys; v = sys.version_info[:2]; print("%d.%d" % v); sys.exit(not (3, 11) <= v <= (3, 13))' 2>/dev/null
}

make_environment() {
    local venv=$1 python=$2 needed=$3 version free
    # An environment that works is completed, whatever PYTHON says; to change its Python, remove it first.
    if supported_version "$venv/bin/python" >/dev/null && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    command -v "$python" >/dev/null ||
        fail "there is no $python; install Python 3.11, 3.12 or 3.13, or name one: make install PYTHON=/path/to/python3.12"
    version=$(supported_version "$python") ||
        fail "$python is ${version:+Python }${version:-no Python}, needed is 3.11, 3.12 or 3.13; name one: make install PYTHON=/path/to/python3.12"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments; on Debian or Ubuntu: apt-get install python$version-venv"
    free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1e6) }')
    [ "$free" -ge "$needed" ] ||
        fail "$free GB of disk free here, about $needed GB are needed; free some, or clone onto another disk"
    "$python" -m venv --clear "$venv" || fail "$python -m venv $venv failed; the lines above say why"
}

pip_install() {
    local venv=$1 log=$1/install.log
    shift
    echo "pip install $*"
    if ! "$venv/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off "$@" >"$log" 2>&1; then
        tail -n 15 "$log" >&2
        if grep -qiE 'no space left' "$log"; then
            fail "the disk is full (also look at TMPDIR); see $log"
        elif grep -qiE 'name resolution|max retries|connection (refused|reset|error)|timed out|network is unreachable|from versions: none' "$log"; then
            fail "pip reaches no package index that has it; check the network, or set PIP_INDEX_URL or PIP_PROXY; see $log"
        elif grep -qiE 'no matching distribution|could not find a version' "$log"; then
            fail "the package index lacks a version that constraints.txt pins, for this Python or machine; see $log"
        elif grep -qiE 'permission denied' "$log"; then
            fail "no permission to write to $venv; who made it? see $log"
        elif grep -qiE 'gcc|g\+\+|compiler' "$log"; then
            fail "a package had to be compiled; on Debian or Ubuntu: apt-get install build-essential python3-dev; see $log"
        fi
        fail "pip could not install; see $log"
    fi
}

case ${1:-} in
make) shift && make_environment "$@" ;;
pip) shift && pip_install "$@" ;;
*) fail "usage: see the first lines of infra/install.sh" ;;
esac
