#!/usr/bin/env bash
# Makes .venv with the torch this machine needs and the project in it: torch + torch_npu to match the CANN
# on an Ascend NPU, a CUDA build on an NVIDIA GPU, a CPU build elsewhere. Running it again is safe and quick.
#
#   bash setup_ascend.sh                    # look around, make .venv, install
#   bash setup_ascend.sh --dry_run          # report what was found and would run; change nothing
#
#   --device auto|npu|cuda|cpu   install for this device instead of the one found
#   --cann VERSION               use this row of the version table (check_npu.py) instead of the CANN found
#   --extras LIST                extras of pyproject.toml as well, e.g. dev or dev,track
#   --rooms LIST                 of chat, families, hub, report, samplers and serve only these, or `none`; default: all
#   --unlocked                   the newest versions that pyproject.toml allows, not the locked ones
#   --root DIR                   look for drivers and CANN below DIR (for tests)
#
# Environment: PYTHON (the interpreter for .venv), VENV (the folder, default .venv), PIP_INDEX_URL (a mirror of the
# package index; pip reads it), TORCH_INDEX_URL (a mirror of https://download.pytorch.org/whl/cpu, or the index of
# the CUDA build that fits an older driver), ARCH (instead of `uname -m`).
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # `sh` is another shell here
set +o posix                                     # or it is bash, without what POSIX does not describe
set -euo pipefail

project=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
called_from=$PWD
cd "$project"

report() { printf '%-9s %s\n' "$1" "$2"; }
fail() { printf 'error: %s\n' "$1" >&2; exit "${2:-1}"; }

# ---- Flags ---------------------------------------------------------------------------------------------

# The extras of the rooms that the speedrun, the server, reports, downloads and imported models need.
all_rooms=chat,families,hub,report,samplers,serve
device=auto cann='' extras='' rooms=$all_rooms root=/ dry_run=no use_locks=yes
while (($#)); do
  flag=${1%%=*}
  case $flag in
    --help | -h) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    --dry_run | --dry-run) dry_run=yes; shift; continue ;;
    --unlocked) use_locks=no; shift; continue ;;
    --device | --cann | --extras | --rooms | --root) ;;
    *) fail "unknown flag $1: see bash setup_ascend.sh --help" 2 ;;
  esac
  if [[ $1 == *=* ]]; then value=${1#*=}; shift; else (($# > 1)) || fail "$flag needs a value" 2; value=$2; shift 2; fi
  case $flag in
    --device) device=$value ;;
    --cann) cann=$value ;;
    --extras) extras=$value ;;
    --rooms) rooms=${value/#none/} ;;
    --root) root=$value ;;
  esac
done
case $device in auto | npu | cuda | cpu) ;; *) fail "--device $device: one of auto, npu, cuda, cpu" 2 ;; esac
for room in ${rooms//,/ }; do
  [[ ,$all_rooms, == *,$room,* ]] || fail "--rooms $room: some of $all_rooms, or none" 2
done
[[ $root == /* ]] || root=$called_from/$root

venv=${VENV:-.venv}
[[ $venv == /* || $called_from == "$project" ]] || venv=${VENV:+$called_from/}${VENV:-$project/.venv}
stamp=$venv/nanochat_setup.txt  # what the last successful run installed

# ---- A Python --------------------------------------------------------------------------------------------

# A command counts only if it runs (some version managers install stubs that do not) and can make a venv.
version_of() {
  "$1" -c 'import sys, ensurepip, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null </dev/null || true
}

# pick_python VERSION...: PYTHON or else the one that .venv has, if it is one of these versions;
# else the first of them that is here.
pick_python() {
  local wanted candidate
  for candidate in "${PYTHON:-$venv/bin/python}"; do
    [[ " $* " != *" $(version_of "$candidate") "* ]] || { echo "$candidate"; return; }
  done
  [[ -z ${PYTHON:-} ]] || return 0
  for wanted in "$@"; do
    for candidate in "python$wanted" python3 python; do
      [[ $(version_of "$candidate") != "$wanted" ]] || { echo "$candidate"; return; }
    done
  done
}

if [[ -n ${PYTHON:-} && -z $(version_of "$PYTHON") ]]; then
  fail "PYTHON=$PYTHON does not run, or cannot make a venv (Debian, Ubuntu: apt install python3-venv)"
fi
python=$(pick_python 3.11 3.12 3.13 3.14 3.10)
[[ -n $python ]] || fail "no Python 3.10 to 3.14 that can make a venv${PYTHON:+ (PYTHON=$PYTHON)}: install one (Debian, Ubuntu: \
apt install python3 python3-venv; macOS: brew install python; conda: conda create -n nanochat python=3.11) or name one \
with PYTHON=/path/to/python3"

# ---- The plan: check_npu.py looks at the machine and reads the version table ------------------------------

kind='' pythons='' problem=''
attempts=() constraints=()
answer=$("$python" check_npu.py --plan --root "$root" --device "$device" --arch "${ARCH:-$(uname -m)}" ${cann:+--cann "$cann"}) ||
  fail "check_npu.py --plan failed with $python: see above"
while read -r key value; do
  case $key in
    found | missing) report "$key" "$value" ;;
    problem) problem=$value ;;
    kind) kind=$value ;;
    pythons) pythons=$value ;;
    install) attempts+=("$value") ;;
    constraint) constraints+=("$value") ;;
    extra) extras=$value${extras:+,$extras} ;;
    *) fail "check_npu.py --plan printed: $key $value" ;;
  esac
done <<<"$answer"
[[ -z $problem ]] || fail "$problem"

# shellcheck disable=SC2086  # the versions are words
python=$(pick_python $pythons)
[[ -n $python ]] || fail "${constraints[*]-} has wheels for Python ${pythons// /, }${PYTHON:+, not for PYTHON=$PYTHON}: \
install one of them, or name it with PYTHON=/path/to/python"
version=$(version_of "$python")
report found "Python $version ($(command -v "$python"))"

# Extras that an earlier run installed into this .venv stay: a request for fewer changes nothing.
earlier=''
if grep -qsx "kind $kind" "$stamp" && grep -qsx "python $version" "$stamp"; then
  earlier=$(sed -n 's/^extras //p' "$stamp")
fi
extras=$(tr ',' '\n' <<<"$extras,$rooms,$earlier" | sed '/^$/d' | sort -u | paste -s -d ',' -)
target=.${extras:+[$extras]}

# What the core and most extras need is installed in the tested versions, and only if the files have the sha256 that they
# had then: an index that hands out something else is refused. A wheel runs no code while it is installed; the few
# packages that exist only as source are named in their lock. The core comes first, because it has the setuptools that
# builds them. clients.lock has older versions of some packages of the others, so it comes last.
locks=()
if [[ $use_locks == yes ]]; then
  locks=(locks/core.lock)
  for extra in chat families hub report samplers serve ray service dev clients; do
    [[ ,$extras, != *,$extra,* ]] || locks+=("locks/$extra.lock")
  done
fi
locked=(--require-hashes --no-deps --no-build-isolation --only-binary :all: -r)

plan="project $project
kind $kind
python $version
torch ${constraints[*]-}
extras $extras
pyproject $(cksum <pyproject.toml)
locks $([[ $use_locks == no ]] || cat ${locks[@]+"${locks[@]}"} | cksum)"

# What .venv holds now: nothing, this plan, another plan of ours, or something a person made.
state=none
if [[ -x $venv/bin/python ]]; then
  state=theirs
  if [[ -f $stamp ]]; then
    state=stale
    [[ $(<"$stamp") != "$plan" ]] || state=ready
    grep -qx "kind $kind" "$stamp" && grep -qx "python $version" "$stamp" || state=other
  elif [[ $(version_of "$venv/bin/python") != "$version" ]]; then
    fail "$venv is not ours and has not Python $version: remove it, or name another folder with VENV=folder"
  fi
  if [[ $state == ready ]]; then # someone may have changed torch since
    "$venv/bin/python" - ${constraints[@]+"${constraints[@]}"} 2>/dev/null <<'PYTHON' || state=stale
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
for constraint in map(Requirement, sys.argv[1:]):
    assert constraint.specifier.contains(importlib.metadata.version(constraint.name), prereleases=True)
PYTHON
  fi
fi

# A .venv that will be removed cannot make the next one: the interpreter that it came from does.
if [[ $state == other && $python -ef $venv/bin/python && $python == "$venv"/* ]]; then
  python=$("$python" -c 'import sys; print(sys._base_executable)')
fi

show() { [[ $dry_run == no ]] || report plan "$1"; } # what was run is in the log
if [[ $state == ready ]]; then
  report ready "$venv is up to date; nothing to install"
else
  [[ $state != other ]] || report plan "rm -r $venv  # made for $(sed -n 's/^kind //p' "$stamp") with Python $(sed -n 's/^python //p' "$stamp")"
  [[ $state == none || $state == other ]] && show "$python -m venv $venv"
  for lock in ${locks[@]+"${locks[@]}"}; do
    show "$venv/bin/pip install ${locked[*]} $lock"
  done
  word=plan
  for attempt in ${attempts[@]+"${attempts[@]}"}; do
    [[ $dry_run == no ]] || report "$word" "$venv/bin/pip install $attempt"
    word='or else'
  done
  show "$venv/bin/pip install -c $venv/constraints.txt -e $target  # ${constraints[*]-}"
fi
[[ $dry_run == no ]] || exit 0

next="next: source $venv/bin/activate && python check_npu.py"
if [[ $state == ready ]]; then
  echo "$next"
  exit 0
fi

# ---- Carry it out ------------------------------------------------------------------------------------------

log=$venv/setup.log
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

# pip ARGUMENT...: quiet; the whole story goes to the log.
pip() { "$venv/bin/python" -m pip install --progress-bar off "$@" >>"$log" 2>&1 </dev/null; }

failed() { # failed WHAT [FURTHER ADVICE]
  { grep -E '^ *ERROR|[Ee]rror:' "$log" || tail -n 5 "$log"; } | tail -n 5 | sed 's/^/  pip: /' >&2
  fail "$1 could not be installed: read $log; if it is the network, name a mirror and run this again: PIP_INDEX_URL, \
and for builds with a + in their version TORCH_INDEX_URL${2-}"
}

[[ $state != other ]] || rm -r "$venv"
if [[ $state == none || $state == other ]]; then
  "$python" -m venv "$venv" || fail "$python -m venv $venv failed: see above"
fi
rm -f "$stamp"
printf '%s\n' ${constraints[@]+"${constraints[@]}"} >"$venv/constraints.txt"
: >"$log"

for lock in ${locks[@]+"${locks[@]}"}; do
  report install "$lock"
  echo "== pip install ${locked[*]} $lock" >>"$log"
  pip "${locked[@]}" "$lock" || failed "$lock" ', or --unlocked for other versions'
done

installed=no
for attempt in ${attempts[@]+"${attempts[@]}"}; do
  report install "$attempt  (minutes; tail -f $log shows more)"
  echo "== pip install $attempt" >>"$log"
  [[ $attempt == *+cpu* || $kind == cuda || ${#attempts[@]} == 1 ]] ||
    report note "no CPU build within reach; this may bring gigabytes of CUDA libraries: Ctrl-C and TORCH_INDEX_URL=<mirror> avoid that"
  # shellcheck disable=SC2086  # the arguments are words
  if pip $attempt; then
    installed=yes
    break
  fi
  # A build that the index does not hold is a reason for the next attempt; anything else is a failure.
  tail -n 3 "$log" | grep -q 'No matching distribution found for torch==' || break
done
[[ $installed == yes ]] || failed torch

report install "$target"
echo "== pip install -e $target" >>"$log"
pip -c "$venv/constraints.txt" -e "$target" || failed "the project"

printf '%s\n' "$plan" >"$stamp"
report ready "$venv, in $SECONDS s"
echo "$next"
