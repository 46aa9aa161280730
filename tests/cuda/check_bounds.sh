#!/usr/bin/env bash
# check_bounds.sh STEP PTXCPU_PROFILE OUT: counts what the kernels of a decode step ask of a device's memory, with an
# interpreter of PTX, and holds them to bounds. STEP is bench/cuda/step.cu's program; OUT is a folder. Needs python3.
set -euo pipefail
step=$1 profile=$2 out=$3
mkdir -p "$out"
failed=0

# bounds CONTEXT SIMILARITY BATCH SUMMARY RULE..: of two steps, the last of which fills a page; below a similarity of 0.9 every
# head is flagged.
bounds() {
  local context=$1 similarity=$2 batch=$3 summary=$4
  local rules=(--check "recall_items: load_rounds.host<=$((batch == 1 ? 8 : 13))")
  local counts=$out/$context.$similarity.$batch.$summary
  shift 4
  for rule in "$@"; do rules+=(--check "$rule"); done
  PTXCPU_PROFILE_RANGE=1 PTXCPU_PROFILE=$counts.prof "$step" "$context" 2 "$similarity" "$batch" "$summary"
  python3 "$profile" "${rules[@]}" "$counts.prof" > "$counts.txt" || {
    tail -n 20 "$counts.txt"
    failed=1
  }
}

# Sectors are 32 bytes; a number read by all lanes of a warp fills an eighth of one, as all that a launch looks at before its
# rows does: it weighs more in a short context. An upload reads page-locked memory in fours and eights.
# Recall has four blocks, since each takes a multiprocessor from the engine's kernels: a hundred slices of four sequences are
# 13 rounds. Attention loads what comes ahead once more where a head is flagged.
# Attention's last warp merges two heads' parts, one behind the other, as prompts are merged: 1700 of its instructions.
everywhere=(
  '.*: local_bytes==0'
  'attend_parts: sector_efficiency>=0.85, conflicts<=1.0, longest_warp<=6800, load_rounds.first<=5'
)
# What selects behind pooling, in the last block of a head's, has a chain of its own, and its histograms conflict. Where nothing
# is flagged what would correct ends; where all heads are, what would speculate.
unflagged=(
  'attend_parts: load_rounds.block<=7'
  'score_tiles.*recall_now: longest_warp<=200, load_rounds.first<=1, load_rounds.recent<=3'
  'pool_parts: conflicts<=2.1, longest_warp<=2700, load_rounds.first<=5, load_rounds.block<=18'
  'recall_items: sector_efficiency>=0.9, line_efficiency>=0.99'
)
flagged=(
  'attend_parts: load_rounds.block<=15'
  'score_tiles.*recall_now: sector_efficiency>=0.9, line_efficiency>=0.99, conflicts<=1.7, longest_warp<=10000'
  'score_tiles.*pools_apart: longest_warp<=200'
  'pool_parts: longest_warp<=800'
  'recall_items: longest_warp<=600'
)
scores='score_tiles.*pools_apart: sector_efficiency>=0.85'
bounds 4096 0.95 1 min_max "${everywhere[@]}" "${unflagged[@]}" "$scores, conflicts<=1.5, longest_warp<=2700, load_rounds.first<=12"
bounds 16384 0.95 1 min_max "${everywhere[@]}" "${unflagged[@]}" "$scores, conflicts<=1.5, longest_warp<=2700, load_rounds.first<=12"
bounds 4096 0.95 4 min_max "${everywhere[@]}" "${unflagged[@]}" "$scores, conflicts<=1.5, longest_warp<=2700, load_rounds.first<=12"
bounds 4096 0.5 1 min_max "${everywhere[@]}" "${flagged[@]}"
# Units summarised by a block each. A query is multiplied with the rows of a basis one after the other; look-ups conflict.
bounds 4096 0.95 1 key_subspace "${everywhere[@]}" "${unflagged[@]}" "$scores, conflicts<=1.1, longest_warp<=12000, load_rounds.first<=30" \
  'summarise_units: sector_efficiency>=0.75, longest_warp<=5000'
bounds 4096 0.95 1 key_codes "${everywhere[@]}" "${unflagged[@]}" "$scores, conflicts<=2.1, longest_warp<=7200, load_rounds.first<=12" \
  'summarise_units: sector_efficiency>=0.75, longest_warp<=17000' 'prepare_queries: longest_warp<=2500'
exit $failed
