#!/usr/bin/env bash
# The checks: style, types, tests. Makes .venv if there is none. Arguments go to pytest.
#
#   bash tests/run.sh
#   bash tests/run.sh tests/core/test_gpt.py -k cache
set -euo pipefail

case ${1-} in --help | -h) sed -n '2,/^set -e/{/^set -e/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"; exit 0 ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export VENV=${VENV:-$PWD/.venv}
bash setup_ascend.sh --extras dev </dev/null
bin=$VENV/bin
unfit='' # checks that failed; pytest runs all the same, and its summary comes last

echo '== ruff'
"$bin/ruff" check . || unfit+=' ruff-check'
"$bin/ruff" format --check . || unfit+=' ruff-format'

echo '== pyright'
export PYRIGHT_PYTHON_IGNORE_WARNINGS=1
if "$bin/pyright" --version >/dev/null 2>&1 </dev/null; then
  "$bin/pyright" --pythonpath "$bin/python" </dev/null || unfit+=' pyright'
else
  echo '!! TYPES WERE NOT CHECKED: pyright cannot start (it may need the network once); `pyright --version` says why'
fi

[[ -z $unfit ]] || echo "!! failed above:$unfit (this run will exit with 1)"
# The page is driven in a real browser; without one its tests skip and report it.
if ! command -v chromium >/dev/null && [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  echo '== chromium (for the tests of the page)'
  { apt-get update && apt-get install -y --no-install-recommends chromium; } >/dev/null 2>&1 </dev/null ||
    echo '!! THE PAGE IS NOT TESTED IN A BROWSER: chromium could not be installed'
fi

echo '== pytest'
# Two files at a time, each test on one core. Files named on the command line run one after the other.
workers=''
[[ $* == *tests/* || $* == *' -n'* || $(nproc) -lt 2 ]] || workers='-n 2 --dist loadfile --no-loadscope-reorder'
result=0
# shellcheck disable=SC2086 # several words, or none
OMP_NUM_THREADS=1 "$bin/python" -m pytest $workers "$@" </dev/null || result=$?
if [[ $result == 1 && -n $workers ]]; then
  echo '== pytest, once more and alone: what failed beside another file, which may have been its only trouble'
  result=0
  OMP_NUM_THREADS=1 "$bin/python" -m pytest --last-failed "$@" </dev/null || result=$?
fi
[[ $result == 0 && -n $unfit ]] && result=1
exit "$result"
