#!/usr/bin/env bash
# The checks: style, types, tests. Makes .venv if there is none. Arguments go to pytest.
#
#   bash tests/run.sh
#   bash tests/run.sh tests/core/test_gpt.py -k cache
#   bash tests/run.sh --newest    # with the newest versions that pyproject.toml allows, in .venv_newest: it reports what
#                                 # will fail once the locks are renewed, and gates nothing (exit code 0)
#   bash tests/run.sh --torch_npu 2.7.1   # the simulated NPU under another torch_npu and its torch, in the separate
#                                         # .venv_torch_npu_2.7.1 (some 6 GB where pip finds no CPU build)
set -euo pipefail

case ${1-} in --help | -h) sed -n '2,/^set -e/{/^set -e/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"; exit 0 ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export VENV=${VENV:-$PWD/.venv}
if [[ ${1-} == --torch_npu ]]; then
  version=${2-}
  [[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || { echo "--torch_npu: a version such as 2.7.1" >&2; exit 2; }
  shift 2
  export VENV=$PWD/.venv_torch_npu_$version
  [[ -x $VENV/bin/python ]] || "${PYTHON:-python3}" -m venv "$VENV"
  # What torch_npu imports and does not declare; its wheel is unpacked by simnpu/build.py.
  undeclared=(attrs decorator psutil pyyaml scipy)
  "$VENV/bin/pip" install -q "torch==$version" -e '.[families,serve]' "${undeclared[@]}" pytest pytest-timeout </dev/null
  tests=("$@")
  [[ $# != 0 ]] || tests=(tests/simnpu/test_npu_equals_cpu.py tests/simnpu/test_adapters.py)
  OMP_NUM_THREADS=1 exec "$VENV/bin/python" -m pytest "${tests[@]}" </dev/null
fi
newest=no
if [[ ${1-} == --newest ]]; then
  newest=yes
  shift
  export VENV=$PWD/.venv_newest
  rm -rf "$VENV" # an older one would keep its versions
fi
setup=(bash setup_ascend.sh --extras dev)
[[ $newest == no ]] || setup+=(--unlocked)
"${setup[@]}" </dev/null
bin=$VENV/bin
if [[ $newest == yes ]]; then
  echo '== versions that no lock has'
  comm -13 <(grep -h == locks/*.lock | cut -d ' ' -f 1 | sort -u) \
    <("$bin/pip" list --format=freeze | tr 'A-Z_' 'a-z-' | sort)
fi
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
export PYTHONDONTWRITEBYTECODE='' # or each worker, at each run, rewrites the asserts of all files, which takes it 6 s
# Three files at a time, each test on one core: on two cores, because a fifth of the time a test waits for another
# process. Files named on the command line run one after the other.
workers=''
[[ $* == *tests/* || $* == *' -n'* || $(nproc) -lt 2 ]] || workers='-n 3 --dist loadfile --no-loadscope-reorder'
result=0
failed=.pytest_cache/v/cache/lastfailed # pytest removes it when nothing fails: no failures then, and no error
failures() { "$bin/python" -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' "$1" 2>/dev/null | sort || true; }
# shellcheck disable=SC2086 # several words, or none
OMP_NUM_THREADS=1 "$bin/python" -m pytest --cache-clear $workers "$@" </dev/null || result=$?
first=$(failures "$failed")
# Without a failed test pytest itself has failed, such as while it collected: nothing is tried again then.
if [[ $result == 1 && -n $workers && -n $first ]]; then
  echo '== pytest, once more: what failed beside another file, now alone'
  result=0
  OMP_NUM_THREADS=1 "$bin/python" -m pytest --last-failed "$@" </dev/null || result=$?
  flaky=()
  while IFS= read -r test; do flaky+=("$test"); done < <(comm -23 <(echo "$first") <(failures "$failed"))
  if [[ ${#flaky[@]} != 0 ]]; then
    echo '== pytest, three times more beside a busy loop: what passed alone'
    while :; do :; done >/dev/null 2>&1 &
    busy=$!
    for _ in 1 2 3; do
      OMP_NUM_THREADS=1 "$bin/python" -m pytest ${flaky[@]+"${flaky[@]}"} </dev/null || result=$?
    done
    kill -KILL "$busy" # a shell whose parent ignores SIGTERM ignores it, too
    printf '!! flaky: failed beside another file, passed alone\n'
    printf '%s\n' ${flaky[@]+"${flaky[@]}"}
  fi
fi
[[ $result == 0 && -n $unfit ]] && result=1
if [[ $newest == yes ]]; then
  echo "== with the newest versions: exit code $result, which gates nothing"
  result=0
fi
exit "$result"
