#!/bin/bash
# Trains both shipped models anew with today's generator, and measures them. From the root of a
# clone, on a GPU, with OUT naming a folder for the results:
#
#     OUT=results bash tests/benchmarks/training/train_shipped.sh
#
# Every stage is a command of the project. If the time is up (LIMIT seconds), the same command goes
# on with what is missing, as long as runs/ is there. On one H200, beside other work, 26,000 steps of
# teaching took 450 s, practising 364 s and all stages 938 s. At the end OUT has both checkpoints,
# with their cards and logs, the metrics of the practice and the measured bars (shipped.json): they
# replace transformer/checkpoints, docs/results/grpo/practice-seed0 and
# docs/results/transformer/shipped-models.json.
#
# A dry run on the CPU: DEVICE=cpu GRPO="--attention sdpa --steps 2 --prompts 2 --max-tokens 8"
# TAUGHT="--steps 2 --batch-tokens 1024" PROBLEMS=1, in a clone that may lose its checkpoints.
set -eu
PY=${PY:-python3} DEVICE=${DEVICE:-cuda} PROBLEMS=${PROBLEMS:-512} LIMIT=${LIMIT:-570}
TAUGHT=${TAUGHT:---steps 26000 --lr 3e-3} GRPO=${GRPO:---attention fa4 --dtype bfloat16}
export OMP_NUM_THREADS=2 TOKENIZERS_PARALLELISM=false
models=transformer/checkpoints
mkdir -p "$OUT" runs

stage() {  # stage NAME FILE COMMAND: runs a command unless FILE, which it leaves, is there
  local name=$1 file=$2 left=$((LIMIT - SECONDS))
  shift 2
  [ -e "$file" ] && return
  [ "$left" -gt 10 ] || { echo "== the time is up before: $name; give the command again"; exit 3; }
  echo "== ${SECONDS}s $name: $*"
  timeout -k 5 "$left" "$@" || { echo "== $name ended with $?; give the command again"; exit 3; }
}

# Without cuDNN, which makes a plan for each shape of a batch.
train="import sys, torch; from transformer import train; torch.backends.cuda.enable_cudnn_sdp(False)
sys.exit(train.main(sys.argv[1:]))"
# shellcheck disable=SC2086  # the variables hold several words
stage "teach sloppy" runs/sloppy/README.md $PY -c "$train" --teacher sloppy --seed 0 $TAUGHT \
  --eval-every 0 --eval-problems "$PROBLEMS" --device "$DEVICE" --out runs/sloppy
cp runs/sloppy/* $models/sloppy/  # GRPO begins as the model of that name
stage practice runs/practice/final/config.json $PY -m transformer.grpo --recipe practice $GRPO \
  --eval-every 0 --device "$DEVICE" --out runs/practice
stage "write the card" runs/reinforced/README.md $PY -m transformer.ship runs/practice \
  runs/reinforced --problems "$PROBLEMS" --device "$DEVICE"
cp runs/reinforced/* $models/reinforced/
stage "measure" runs/shipped.json.whole $PY -m tests.benchmarks.transformer.model_bars \
  --out "$OUT/shipped.json" --problems "$PROBLEMS" --device "$DEVICE"
touch runs/shipped.json.whole
for name in sloppy reinforced practice; do
  mkdir -p "$OUT/$name"
  find runs/$name -maxdepth 1 -type f ! -name state.pt -exec cp {} "$OUT/$name/" \;
done
echo "== ${SECONDS}s done"
