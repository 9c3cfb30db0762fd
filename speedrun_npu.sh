#!/usr/bin/env bash
# Text to a language model, from nothing: set up, train a tokenizer, pretrain, evaluate, sample.
#
#   bash speedrun_npu.sh                        # the profile for what this machine has: npu, cuda or cpu
#   bash speedrun_npu.sh --profile smoke        # a minute on any CPU: checks that all of it runs
#   bash speedrun_npu.sh --data my_texts/       # your own text: a file, a folder, or the name of a dataset
#
#   --profile auto|npu|cuda|cpu|smoke   sizes and data; auto: by what is found
#   --data NAME|PATH                    text to train on; default: demo on a CPU, climbmix on an accelerator
#   --val_data NAME|PATH                held-out text; default: the end of --data
#   --hub hf|modelscope                 where a dataset comes from (HF_ENDPOINT names a mirror of the first)
#
# Everything is written below NANOCHAT_BASE_DIR (default ~/.cache/nanochat). Run it again and it goes on where it
# stopped.
set -euo pipefail
called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() { printf 'error: %s\n' "$1" >&2; exit "${2:-1}"; }
title() {
  local bold='' plain=''
  [[ ! -t 1 ]] || bold=$'\033[1m' plain=$'\033[0m'
  printf '\n%s== %s%s  (%d min %02d s)\n' "$bold" "$1" "$plain" $((SECONDS / 60)) $((SECONDS % 60))
}

# ---- Flags ---------------------------------------------------------------------------------------------

profile=auto data='' val_data='' hub=hf
while (($#)); do
  case ${1%%=*} in
    --help | -h) sed -n '2,/^set -e/{/^set -e/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"; exit 0 ;;
    --profile | --data | --val_data | --val-data | --hub) ;;
    *) fail "unknown flag $1: see bash speedrun_npu.sh --help" 2 ;;
  esac
  flag=${1%%=*}
  if [[ $1 == *=* ]]; then value=${1#*=}; shift; else (($# > 1)) || fail "$flag needs a value" 2; value=$2; shift 2; fi
  flag=${flag#--}
  declare "${flag//-/_}=$value"
done
[[ $profile =~ ^(auto|npu|cuda|cpu|smoke)$ ]] || fail "--profile $profile: one of auto, npu, cuda, cpu, smoke" 2
if [[ -n $data && -e $called_from/$data ]]; then data=$called_from/$data; fi
if [[ -n $val_data && -e $called_from/$val_data ]]; then val_data=$called_from/$val_data; fi

# ---- Set up --------------------------------------------------------------------------------------------

title 'set-up'
bash setup_ascend.sh
export VENV=${VENV:-$PWD/.venv}
python=$VENV/bin/python
read -r kind count memory < <("$python" -c 'if True:
    from nanochat import device
    found = device.init()
    print(found.kind, 1 if found.kind == "cpu" else found.module.device_count(), found.total_memory() or 0)')
[[ $profile == auto ]] && profile=$kind
if [[ $profile == smoke ]]; then kind=cpu; fi
[[ $profile == smoke || $profile == "$kind" ]] || fail "--profile $profile: this machine has $kind; python check_npu.py says why"

# ---- Sizes ---------------------------------------------------------------------------------------------

run_folder=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}
launch=("$python") stories=200
case $profile in
  smoke) # small enough for a minute, large enough for the loss to fall
    tokenizer=(--vocab_size 512 --max_chars 500000)
    base=(--depth 2 --head_dim 32 --max_seq_len 128 --device_batch_size 8 --total_batch_size 1024 --num_iterations 60
      --eval_tokens 8192 --compile off --save_every 30)
    eval=(--eval_tokens 8192 --samples 1 --max_tokens 32) stories=8
    ;;
  cpu) # a few minutes on two cores (docs/measurements.md)
    tokenizer=()
    base=(--depth 4 --head_dim 64 --max_seq_len 256 --device_batch_size 16 --total_batch_size 4096 --num_iterations 700
      --eval_every 100 --eval_tokens 65536 --save_every 100)
    eval=(--eval_tokens 65536 --samples 4)
    ;;
  *) # depth by what the devices can train in an evening, batch by their memory
    tokenizer=(--vocab_size 32768)
    depth=12 shards=32 # files that hold the horizon once: 12 tokens a parameter, some 50 million tokens a file
    ((count >= 4)) && depth=20 shards=110
    rows=8
    ((memory > 48 * 2 ** 30)) && rows=16
    ((memory > 72 * 2 ** 30 && depth == 12)) && rows=32
    base=(--shards "$shards" --depth "$depth" --device_batch_size "$rows" --save_every 1000)
    eval=(--device_batch_size "$rows" --samples 4)
    ((count > 1)) && launch=("$VENV/bin/torchrun" --standalone --nproc_per_node="$count")
    ;;
esac
default_data=demo
[[ $profile == npu || $profile == cuda ]] && default_data=climbmix
data=${data:-$default_data}
if [[ $data != "$default_data" || $profile == smoke ]]; then # its own tokenizer, so a folder of its own
  name=${data%/}
  run_folder=$run_folder/speedrun/$profile-$(basename "${name//[^A-Za-z0-9._\/-]/_}")-$(cksum <<<"$name" | cut -d ' ' -f 1)
fi
[[ $data != demo ]] || eval+=(--stories "$stories") # only the demo's stories can be graded
export NANOCHAT_BASE_DIR=$run_folder
source=(--data "$data" --hub "$hub")
[[ -z $val_data ]] || source+=(--val_data "$val_data")
printf 'profile %s, data %s, everything is written below %s\n' "$profile" "$data" "$run_folder"

# ---- Run -----------------------------------------------------------------------------------------------

title 'tokenizer'
"$python" -m scripts.tok_train "${source[@]}" "${tokenizer[@]}"

title 'pretraining'
"${launch[@]}" -m scripts.base_train "${source[@]}" "${base[@]}" --model_tag "$profile" --resume

title 'evaluation and samples'
"${launch[@]}" -m scripts.base_eval "${source[@]}" "${eval[@]}" --model_tag "$profile"

title 'done'
printf 'To go on writing with the model:\n  source %s/bin/activate\n' "$VENV"
[[ $run_folder == "$HOME/.cache/nanochat" ]] || printf '  export NANOCHAT_BASE_DIR=%q\n' "$run_folder"
printf '  python -m scripts.chat_cli\n'
