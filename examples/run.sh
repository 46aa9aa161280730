#!/usr/bin/env bash
# The main job: full attention, a sliding window and FreeKV's retrieval side by side, inside llama.cpp, for a real model
# on a real text. Installs what it needs, builds, runs, and shows a table and pictures. Options go to the program
# freekv-compare (`bash examples/run.sh --help` lists them); --model FILE.gguf, --text FILE and --out FOLDER are the ones
# most wanted. --model gemma3 fetches Gemma-3-270M, of which 3 layers of 18 retrieve, and a longer text: 8K and 32K
# tokens. Results: FOLDER/{table.txt,results.jsonl,*.png}, FOLDER being build/results.
# Built is what the model needs: one head_dim with keys and values of half precision, as llama.cpp's cache has them.
# Another model's head_dim joins when it is first asked for. FREEKV_LLAMA_CPP_OPTIONS is handed to llama.cpp's CMake, as
# in FREEKV_LLAMA_CPP_OPTIONS=-DGGML_NATIVE=OFF, which does without most of this processor's instructions.
source "$(dirname "${BASH_SOURCE[0]}")/../cmake/bootstrap.sh"
source "$root/examples/eval/build.sh"

out=$root/build/results
own_model= plain=yes
for ((i = 1; i <= $#; ++i)); do
  next=$((i + 1))
  case ${!i} in
    --out) out=${!next:-} ;;
    --out=*) out=${!i#--out=} ;;
    --model) own_model=${!next:-} plain= ;;
    --model=*) own_model=${!i#--model=} plain= ;;
    --help | -h) help=yes ;;
    --*) plain= ;;
  esac
done
if [[ ${help:-} ]]; then
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  if [[ -x $programs/freekv-compare ]]; then "$programs/freekv-compare" --help; else echo "The program's own options can be listed once it has been built."; fi
  exit
fi

# What comes and when it ends. Seconds are of two cores that build llama.cpp in 95; how long that takes here, or its
# first part, scales them.
declare -A usual=([llama.cpp]=95 [programs]=75 [job]=240 [pictures]=15)
yardstick='' left=0
announce() {  # PART...: those that are still to come, in order
  local part at=0 text=
  [[ $yardstick ]] || return 0
  for part in "$@"; do
    if [[ $part == job && ! $plain ]]; then
      text+="${text:+, then }the job, whose length depends on its options"
      break
    fi
    if [[ $part == llama.cpp ]]; then at=$left; else at=$((at + usual[$part] * yardstick / usual[llama.cpp])); fi
    text+="${text:+, }$part until $(date -d "+$at seconds" +%H:%M:%S)"
  done
  [[ $at == 0 ]] || text="about $(((at + 59) / 60)) minutes, $text"
  say "It is $(date +%H:%M:%S). To come: $text"
}
on_yardstick() {  # SECONDS LEFT: llama.cpp's build will have taken as many, of which some are left
  yardstick=$1 left=$2
  announce llama.cpp programs job pictures
}
took=()
began=$SECONDS
lap() {  # PART: that has just ended
  took+=("$((SECONDS - began)) s $1")
  began=$SECONDS
}

say "It is $(date +%H:%M:%S). To come: set-up, llama.cpp's build, FreeKV's programs, the job, pictures: about 8 minutes" \
  "on two cores the first time; how many here will be said soon"
bootstrap_packages g++ cmake ninja-build libcli11-dev nlohmann-json3-dev libeigen3-dev
bootstrap_cuda
bootstrap_llama_cpp_source
texts=$root/examples/eval/texts
model=$own_model needle_text=$texts/genesis.txt given=("$@") lengths=()
case $own_model in
  "") bootstrap_model && model=$MODEL ;;
  gemma3)
    bootstrap_gemma && model=$MODEL
    bootstrap_haystack && needle_text=$HAYSTACK
    given=() before=
    for argument; do
      case $before$argument in
        --modelgemma3) given+=("$model") ;;
        --model=gemma3) given+=("--model=$model") ;;
        *) given+=("$argument") ;;
      esac
      [[ $argument == --model ]] && before=$argument || before=
    done
    [[ " $* " == *" --prompt"* ]] || lengths+=(--prompt 8192)
    [[ " $* " == *" --needle-tokens"* ]] || lengths+=(--needle-tokens 8192 --needle-tokens 32768)
    ;;
esac
lap "set-up"
bootstrap_llama_cpp
lap "llama.cpp's build"
yardstick=$(cat "$LLAMA_CPP_BUILD/seconds" 2>/dev/null || true)
announce programs job pictures

build_compare "$model"
lap "FreeKV's programs"
announce job pictures

commit=$(git -C "$root" describe --always --dirty 2>/dev/null || echo unknown)
heads=()
[[ $own_model ]] || heads=(--head-list "razor_attention"{,_compensated}"=$root/examples/eval/smollm2-135m-heads.txt"
                           "compress_kv=$root/examples/eval/smollm2-135m-voters.txt")
"$programs/freekv-compare" --model "$model" --text "$texts/hacker-folklore.txt" --needle-text "$needle_text" \
  --calibration "$texts/technical.txt" "${heads[@]}" --cache "$root/build/cache" --out "$out" --commit "$commit" \
  "${lengths[@]}" "${given[@]}"
lap "the job"

bootstrap_python
python_packages matplotlib
"$VIRTUAL_ENV/bin/python" "$root/examples/eval/plot.py" "$out/results.jsonl" "$out"
lap "pictures"
measure=
[[ ! $yardstick ]] || measure="; llama.cpp's own build, by which machines compare, took $yardstick s"
say "Done in $SECONDS s: $(printf '%s, ' "${took[@]}" | sed 's/, $//')$measure"
