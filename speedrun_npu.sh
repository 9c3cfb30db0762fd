#!/usr/bin/env bash
# Text to a chat model, from nothing: set up, tokenizer, pretraining, mid-training, SFT, RL, evaluation, report.
#
#   bash speedrun_npu.sh                        # the profile for what this machine has: npu, cuda or cpu
#   bash speedrun_npu.sh --profile smoke        # a minute on any CPU: checks that all of it runs
#   bash speedrun_npu.sh --minutes 60           # an evening and a laptop: a longer training, next to the usual one
#   bash speedrun_npu.sh --data my_texts/       # your own text: a file, a folder, or the name of a dataset
#
#   --profile auto|npu|cuda|cpu|smoke   sizes and data; auto: by what is found
#   --data NAME|PATH                    text to train on; default: demo on a CPU, climbmix on an accelerator
#   --val_data NAME|PATH                held-out text; default: the end of --data
#   --hub hf|modelscope                 where a dataset comes from (HF_ENDPOINT names a mirror of the first)
#   --tasks NAME[=PATH][:WEIGHT],...    what mid-training and SFT learn; default: by the data and the hub
#   --rehearsal auto|on|off             first run every stage for two steps; auto: where the run takes hours (npu, cuda)
#   --minutes N                         on a CPU: all of it takes about that long. Mid-training gets the time that others
#                                       leave, by the measured rate; from 120 minutes on the model has 6 layers
#   --restarts N                        a stage that crashed after a new checkpoint continues by itself; default: 3 times
#
# Everything is written below NANOCHAT_BASE_DIR (default ~/.cache/nanochat). Run it again to resume where it
# stopped. speedrun.sh is the same script.
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # `sh` is another shell here
set +o posix                                     # or it is bash, without what POSIX does not describe
set -euo pipefail
called_from=$PWD log='' # log: the rehearsal's, while it runs

fail() { printf 'error: %s\n' "$1" >&2; exit "${2:-1}"; }
title() {
  [[ -z $log ]] || return 0 # in the rehearsal
  local bold='' plain=''
  [[ ! -t 1 ]] || bold=$'\033[1m' plain=$'\033[0m'
  printf '\n%s== %s%s  (%d min %02d s)\n' "$bold" "$1" "$plain" $((SECONDS / 60)) $((SECONDS % 60))
}

# A shell obeys a signal only after the command that it waits for. So a command runs in the background, in a group of its
# own, and `pass` sends the signal on to that group: a stage saves and leaves, and the script ends after it. If the script
# is killed (kill -9), Linux sends the command SIGTERM: ground/cli.py asks for that by this variable.
export _NANOCHAT_PARENT=$$
attend() { # command
  local child status=0
  set -m
  "$@" &
  set +m
  child=$!
  wait "$child" 2>/dev/null || status=$?                            # without bash's line on a command that was killed,
  ((status < 129)) || kill -s KILL -- "-$child" 2>/dev/null || true # which may leave processes behind
  return "$status"
}
pass() { # signal
  local child
  for child in $(jobs -p); do
    kill -s "$1" -- "-$child" 2>/dev/null || true
    while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
  done
  printf 'stopped: the same command resumes here\n' >&2
  exit $((128 + $(kill -l "$1")))
}
for name in INT TERM HUP QUIT USR1 USR2; do trap "pass $name" "$name"; done

# ---- Flags ---------------------------------------------------------------------------------------------

profile=auto data='' val_data='' hub=hf tasks='' rehearsal=auto restarts=3 minutes=''
while (($#)); do
  case ${1%%=*} in
    --help | -h) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    --profile | --data | --val_data | --val-data | --hub | --tasks | --rehearsal | --restarts | --minutes) ;;
    *) fail "unknown flag $1: see bash speedrun_npu.sh --help" 2 ;;
  esac
  flag=${1%%=*}
  if [[ $1 == *=* ]]; then value=${1#*=}; shift; else (($# > 1)) || fail "$flag needs a value" 2; value=$2; shift 2; fi
  flag=${flag#--}
  declare "${flag//-/_}=$value"
done
[[ $profile =~ ^(auto|npu|cuda|cpu|smoke)$ ]] || fail "--profile $profile: one of auto, npu, cuda, cpu, smoke" 2
[[ $rehearsal =~ ^(auto|on|off)$ ]] || fail "--rehearsal $rehearsal: one of auto, on, off" 2
[[ $restarts =~ ^[0-9]{1,9}$ ]] || fail "--restarts $restarts: a number, 0 for none" 2
[[ $minutes =~ ^([1-9][0-9]{0,4})?$ ]] || fail "--minutes $minutes: a number of minutes" 2
if [[ -n $data && -e $called_from/$data ]]; then data=$called_from/$data; fi
if [[ -n $val_data && -e $called_from/$val_data ]]; then val_data=$called_from/$val_data; fi
if [[ -n $tasks && -e $called_from/$tasks ]]; then tasks=$called_from/$tasks; fi # a path inside NAME=PATH: from / on

# ---- Set up --------------------------------------------------------------------------------------------

cd "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" # it may be called from anywhere, and by a link
title 'set-up'
attend bash setup_ascend.sh
export VENV=${VENV:-$PWD/.venv}
python=$VENV/bin/python
read -r kind count memory < <("$python" -c 'if True:
    from nanochat import device
    found = device.init()
    print(found.kind, 1 if found.kind == "cpu" else found.module.device_count(), found.total_memory() or 0)')
[[ $profile == auto ]] && profile=$kind
if [[ $profile == smoke ]]; then kind=cpu; fi
[[ $profile == smoke || $profile == "$kind" ]] || fail "--profile $profile: this machine has $kind; python check_npu.py shows why"

# ---- Sizes ---------------------------------------------------------------------------------------------

run_folder=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}
run_folder=${run_folder/#\~\//$HOME/}
[[ $run_folder == /* ]] || run_folder=$called_from/$run_folder
demo_tasks=questions,addition,arithmetic,identity,unknown,memory
lists=first_questions=tests/first_questions.jsonl,second_questions=tests/second_questions.jsonl # messages by hand
for list in first_messages second_messages open_orders own_story sums; do
  lists+=,$list=tests/held_out/$list.jsonl
done
launch=("$python") shards='' sampled='' # sampled: tasks that are evaluated as users get replies; the others greedily
case $profile in
  smoke) # small enough for a minute, large enough for the loss to fall
    tokenizer=(--vocab_size 512 --max_chars 500000)
    base=(--depth 2 --head_dim 32 --max_seq_len 256 --device_batch_size 4 --total_batch_size 1024 --num_iterations 60
      --eval_tokens 8192 --compile off --save_every 30)
    base_eval=(--eval_tokens 8192 --samples 1 --max_tokens 32) stories=8
    mid=(--device_batch_size 4 --num_iterations 10 --eval_tokens 4096 --save_every 5)
    sft=(--device_batch_size 4 --num_iterations 10 --target_examples_per_step 8 --eval_examples 16 --save_every 5)
    rl=(--device_batch_size 4 --num_iterations 2 --examples_per_step 2 --num_samples 4 --max_tokens 32 --eval_examples 8
      --save_every 1)
    eval=(--max_examples 8 --max_tokens 32 --show 1) chat_tasks=stories,$demo_tasks,$lists
    ;;
  cpu) # 10 min 50 s with set-up on two quiet cores with AMX (2026-11-30)
    # A name that no document has is copied piece by piece, and 1,536 tokens are few enough to have met every piece.
    tokenizer=(--vocab_size 1536)
    base=(--depth 4 --head_dim 64 --max_seq_len 512 --device_batch_size 8 --total_batch_size 4096 --num_iterations 200
      --eval_every 100 --eval_tokens 32768 --save_every 100 --log_every 20)
    base_eval=(--eval_tokens 65536 --samples 2) stories=100
    # Chats teach stories as the corpus does, and more besides: most of the time is theirs. Half of pretraining's tokens
    # moved here double what a story has of its order's details, 28% to 58% (one NVIDIA H200, 2026-11-27).
    mid=(--device_batch_size 4 --total_batch_size 2048 --num_iterations 2000 --lr_scale 0.75 --eval_every 1000
      --eval_tokens 32768 --save_every 1000 --log_every 100)
    sft=(--device_batch_size 4 --target_examples_per_step 16 --num_iterations 30 --lr_scale 0.1 --eval_every 0
      --save_every 30)
    # Ten steps show the stage. 24 at four times the rate raise the held-out reward from 0.606 to 0.626, within chance,
    # and take as long as 700 steps of mid-training, which move every skill (Xeon with AMX, 2026-11-30).
    rl=(--device_batch_size 4 --kl 0.05 --num_iterations 10 --examples_per_step 8 --num_samples 8
      --lr_scale 0.12 --eval_every 0 --eval_examples 200 --save_every 10 --log_every 5)
    eval=(--device_batch_size 100) chat_tasks=$demo_tasks sampled=stories,new_stories,$lists
    ;;
  *) # the depth that this many devices train in an evening; the batch by their memory
    tokenizer=(--vocab_size 32768)
    depth=12 shards=32 # files that hold the horizon once: 12 tokens a parameter, some 50 million tokens a file
    ((count >= 2)) && depth=16 shards=60
    ((count >= 4)) && depth=18 shards=85
    ((count >= 8)) && depth=20 shards=110
    rows=4
    ((memory > 28 * 2 ** 30)) && rows=8
    ((memory > 56 * 2 ** 30)) && rows=16
    ((memory > 72 * 2 ** 30 && depth == 12)) && rows=32
    base=(--depth "$depth" --device_batch_size "$rows" --save_every 1000)
    base_eval=(--device_batch_size "$rows" --samples 4) stories=0
    mid=(--device_batch_size "$rows" --save_every 500)
    sft=(--device_batch_size "$((rows / 2))" --num_iterations 700 --save_every 200)
    rl=(--device_batch_size "$((rows / 2))" --num_iterations 400 --examples_per_step 16 --num_samples 16 --save_every 50)
    eval=(--device_batch_size "$rows" --max_examples 1000) chat_tasks=gsm8k,mmlu,arc_easy,arc_challenge,humaneval
    ((count > 1)) && launch=("$python" -m nanochat.run.launch --nproc_per_node="$count")
    ;;
esac
tag=$profile
if [[ -n $minutes ]]; then
  [[ $profile == cpu ]] || fail "--minutes is for --profile cpu: elsewhere base_train --depth sets size and time" 2
  tag=cpu-$minutes-minutes
  ((minutes < 120)) || base+=(--depth 6) # of equal flags the last one counts
fi
default_data=demo
[[ $profile == npu || $profile == cuda ]] && default_data=climbmix
data=${data:-$default_data}
if [[ $data != "$default_data" || $profile == smoke ]]; then # another tokenizer, so another folder
  name=${data%/}
  run_folder=$run_folder/speedrun/$profile-$(basename "${name//[^A-Za-z0-9._\/-]/_}")-$(cksum <<<"$name" | cut -d ' ' -f 1)
fi
if [[ -n $shards && $data != demo && $data != pydoc && ! -e $data ]]; then # a hub dataset
  base+=(--shards "$shards") base_eval+=(--shards "$shards")
fi
[[ $data != demo ]] || base_eval+=(--stories "$stories") # only the demo's stories can be graded
if [[ ! $data =~ ^(climbmix|fineweb-edu|fineweb-edu-chinese)$ && $profile != smoke && $profile != cpu ]]; then
  chat_tasks=$demo_tasks,$lists sampled=stories # offline, as mid-training and SFT choose theirs
fi
[[ $hub == hf ]] || chat_tasks=${chat_tasks%,humaneval} # no copy is known elsewhere
export NANOCHAT_BASE_DIR=$run_folder
source=(--data "$data" --hub "$hub")
[[ -z $val_data ]] || source+=(--val_data "$val_data")
printf 'profile %s, data %s, everything is written below %s\n' "$profile" "$data" "$run_folder"

# ---- Stages --------------------------------------------------------------------------------------------
# Every stage resumes where it stopped. A finished one trains no more, but is evaluated again.

again=(--model_tag "$tag" --resume)
checkpoints() { ls -d "$run_folder"/checkpoints/*/"$tag"/step_*[0-9] 2>/dev/null || true; }
run() { # a command of a stage; the rehearsal runs the same commands in its own way
  if [[ -n $log ]]; then run_in_small "$@"; return; fi
  local crashes=0 before status
  while :; do
    before=$(checkpoints) status=0
    attend "$@" || status=$?
    [[ $status =~ ^13[2-79]$ ]] || return "$status" # 132 to 139 are crashes, such as 137: killed, or out of memory
    ((crashes++ < restarts)) && [[ $(checkpoints) != "$before" ]] ||
      fail "crashed with exit code $status: run this again to resume" "$status"
    printf 'crashed with exit code %d: starts again, %d of %d\n' "$status" "$crashes" "$restarts" >&2
  done
}
pretrain() { run "${launch[@]}" -m scripts.base_train "${source[@]}" "${base[@]}" "${again[@]}"; }
# All stages get the same questions. In a pipe only the last one's results are shown, the others' are in a file. The
# report has the replies.
evaluate() { # stage, further flags
  if [[ -t 1 || -n $log || $1 == rl ]]; then evaluation "$@"; return; fi
  printf 'evaluation: %s\n' "$run_folder/evaluations.txt"
  evaluation "$@" >>"$run_folder/evaluations.txt"
}
evaluation() {
  local call=("${launch[@]}" -m scripts.chat_eval --source "$1" --model_tag "$tag" --hub "$hub" "${eval[@]}" "${@:2}")
  [[ -t 1 && $1 == rl ]] || call+=(--table_only)
  run "${call[@]}" --tasks "$chat_tasks" --temperature 0
  [[ -z $sampled ]] || run "${call[@]}" --tasks "$sampled"
}

# --minutes: the steps of mid-training, by the tokens a second of pretraining. A run that resumes keeps them.
after_mid=1500000 # an estimate: what follows takes as long as this many tokens of training
value_of() { local line=" ${*:2} "; line=${line##* "--$1" }; echo "${line%% *}"; }
lengthen_mid() {
  local chosen=$run_folder/runs/$tag.txt batch usual steps tokens seconds total
  [[ -n $minutes && -z $log ]] || return 0
  if [[ ! -e $chosen ]]; then
    batch=$(value_of total_batch_size "${mid[@]}") usual=$(value_of num_iterations "${mid[@]}")
    read -r tokens seconds < <(sed -n 's/.*"tokens": \([0-9]*\),.*"seconds": \([0-9]*\).*/\1 \2/p' \
      "$run_folder/runs/base/$tag/metrics.jsonl" | tail -n 1)
    steps=$((((minutes * 60 - SECONDS) * tokens / (seconds + 1) - after_mid) / batch))
    ((steps > usual)) || steps=$usual
    seconds=$(((steps * batch + after_mid) * (seconds + 1) / tokens))
    printf '%d %d\n' "$steps" $(((SECONDS + seconds + 30) / 60)) >"$chosen"
  fi
  read -r steps total <"$chosen"
  mid+=(--num_iterations "$steps")
  printf -- '--minutes %d: mid-training has %d steps, ' "$minutes" "$steps"
  printf 'and all stages take about %d minutes\n' "$total"
}

stages() {
  title 'tokenizer'
  run "$python" -m scripts.tok_train "${source[@]}" ${tokenizer[@]+"${tokenizer[@]}"}

  title 'pretraining'
  pretrain
  run "${launch[@]}" -m scripts.base_eval "${source[@]}" "${base_eval[@]}" --model_tag "$tag"

  title 'mid-training: the chat format and new skills'
  lengthen_mid
  run "${launch[@]}" -m scripts.mid_train "${mid[@]}" --hub "$hub" --tasks "$tasks" "${again[@]}"
  [[ $profile == cpu ]] || evaluate mid --max_examples 50 # there SFT, which is evaluated next, takes seconds

  title 'supervised fine-tuning'
  run "${launch[@]}" -m scripts.chat_sft "${sft[@]}" --hub "$hub" --tasks "$tasks" "${again[@]}"
  evaluate sft

  title 'reinforcement learning'
  run "${launch[@]}" -m scripts.chat_rl "${rl[@]}" --hub "$hub" "${again[@]}"
  evaluate rl

  title 'report'
  run "$python" -m scripts.report --model_tag "$tag"
}

# ---- Rehearsal -----------------------------------------------------------------------------------------
# Pretraining takes hours. What would end a later stage (an exported variable, a missing package, too little memory)
# should be found before it. So the commands of the run are rehearsed with the same model, batch and processes, for two
# steps: memory is fullest in the second, which also has the state of the optimizer.

rehearse() {
  local folder=$run_folder/rehearsal one_file='' few="--num_iterations 2 --track=''"
  local little="--eval_tokens $((count * 4096))"
  log=$run_folder/rehearsal.log
  trap '(($? < 129)) || rm -f "$log"; rm -rf "$run_folder/rehearsal"' EXIT # above 128: it was stopped by a signal
  rm -rf "$folder" # a rehearsal that was killed leaves it
  mkdir -p "$folder" "$run_folder/data"
  ln -s ../data "$folder/data" # the run needs the same downloads
  small=("NANOCHAT_BASE_DIR=$folder")

  # A script appends the flags in its variable to its command line (nanochat/ground/cli.py). The last of equal flags counts.
  add_flags() { local variable=NANOCHAT_$1; small+=("$variable=${!variable-} ${*:2}"); }
  [[ " ${base[*]} " != *' --shards '* ]] || one_file='--shards 1'
  add_flags TOK_TRAIN "$one_file" --max_chars 10000000
  add_flags BASE_TRAIN "$few" "$one_file" "$little" --keep_last 1
  add_flags BASE_EVAL "$one_file" "$little" --samples 1 --max_tokens 16
  add_flags MID_TRAIN "$few" "$little"
  add_flags CHAT_SFT "$few" --eval_examples 16
  add_flags CHAT_RL "$few" --eval_examples 16 # replies keep their length: they fill the memory of the cache
  add_flags CHAT_EVAL --max_examples 8 --max_tokens 16
  stages
  add_flags BASE_TRAIN "$few" "$one_file" "$little" --keep_last 1 --num_iterations 3
  pretrain # resumes
  run "$python" -m scripts.chat_cli --prompt Hello --max_tokens 16
  rm -r "$log" "$folder"
  trap - EXIT
  log=''
}

run_in_small() {
  local command="$*" began=$SECONDS status=0 cause
  local script=${command#* -m scripts.}
  script=${script%% *}
  [[ $script != chat_eval || $command == *' --source rl '* ]] || return 0 # one model is enough
  printf '  %-12s' "$script"
  printf '%s\n\n' "$command" >"$log"
  attend env "${small[@]}" "$@" >>"$log" 2>&1 </dev/null || status=$?
  printf '%4d s\n' $((SECONDS - began))
  ((status)) || return 0
  cause=$(grep '^error: ' "$log" | tail -n 1) || cause=$(grep -E '(Error|Exception): ' "$log" | tail -n 1) ||
    cause="exit code $status"
  fail "$script failed in the rehearsal, before anything was trained: ${cause#error: } (all of it: $log). Fix it and \
run this again, or add --rehearsal off"
}

# ---- Run -----------------------------------------------------------------------------------------------

title 'tasks of all stages'
attend "$python" -m scripts.fetch --data "$data" --hub "$hub" --tasks "$tasks" --eval_tasks "$chat_tasks"

if [[ $rehearsal == auto ]]; then # smoke and cpu take minutes themselves
  rehearsal=off
  [[ $profile == smoke || $profile == cpu ]] || rehearsal=on
fi
if [[ $rehearsal == on ]]; then
  # A run that resumes rehearses again only if its flags, its environment, its packages or the code have changed.
  # The beginnings of variables that change what a stage does: those of tests/on_device/report.py, and the hub's.
  variables='ACL|ASCEND|ATB|CLOSE_MATMUL|COMBINED_ENABLE|CPU_AFFINITY|CUBLAS|CUDA|CUDNN|GLOO|HCCL|HCCN|HF_|INF_NAN'
  variables+='|LD_LIBRARY_PATH|LD_PRELOAD|LOCAL_RANK|MASTER_|MKL_|MULTI_STREAM|NANOCHAT|NCCL|NPU|NVIDIA|OMP_|PYTHONPATH'
  variables+='|PYTORCH|RANK|TASK_QUEUE|TE_|TORCH|WORLD_SIZE'
  setting=$({
    declare -p launch source tokenizer base base_eval mid sft rl eval chat_tasks sampled tasks
    env | grep -E "^($variables)" | sort
    cat "$VENV/nanochat_setup.txt"
    find nanochat scripts -name '*.py' -exec cksum {} + | sort
  } | cksum)
  passed=$run_folder/rehearsal_passed.txt
  if [[ ! -e $passed || $(<"$passed") != "$setting" ]]; then
    title 'rehearsal: every stage for two steps'
    rehearse
    printf '%s\n' "$setting" >"$passed"
  fi
fi

stages

title 'done'
printf 'The report:  %s/runs/report/%s/report.html\n' "$run_folder" "$tag"
printf 'To chat with the model:\n'
[[ $called_from == "$PWD" ]] || printf '  cd %q\n' "$PWD"
printf '  source %q/bin/activate\n' "$VENV"
[[ $run_folder == "$HOME/.cache/nanochat" ]] || printf '  export NANOCHAT_BASE_DIR=%q\n' "$run_folder"
printf '  python -m scripts.chat_web    # the page, at http://127.0.0.1:8000\n'
printf '  python -m scripts.chat_cli    # in this terminal\n'
