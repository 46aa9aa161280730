# Builds what the main job and the evaluation run, for a model's shape: sourced by examples/run.sh and evaluate.sh, behind
# cmake/bootstrap.sh and with LLAMA_CPP and LLAMA_CPP_BUILD set.
build=$root/build/host
programs=$build/examples/eval

# configure CMAKE_OPTION...
configure() {
  cmake -S "$root" --preset host -DFREEKV_TESTS=OFF -DFREEKV_LLAMA_CPP="$LLAMA_CPP" -DFREEKV_LLAMA_CPP_BUILD="$LLAMA_CPP_BUILD" "$@" \
    >"$root/build/configure.log" || { cat "$root/build/configure.log" >&2; die "The examples could not be configured."; }
}
cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt" 2>/dev/null || true; }
with() { [[ ";$1;" == *";$2;"* ]] && echo "$1" || echo "${1:+$1;}$2"; }  # LIST ENTRY: the list that has it

# build_compare MODEL: freekv-compare, in $programs; its other shapes stay.
build_compare() {
  local known elements shape head_dim element
  known=$(cached FREEKV_HEAD_DIMS) elements=$(cached FREEKV_ELEMENTS)
  [[ $elements ]] || known=  # a folder from before there was a choice has all, and all would be compiled again
  configure "-DFREEKV_HEAD_DIMS=${known:-64}" "-DFREEKV_ELEMENTS=${elements:-half}"
  cmake --build "$build" --target freekv-model-shape -j "$jobs" >&2
  shape=$("$programs/freekv-model-shape" "$1")
  read -r head_dim element <<<"$shape"
  if [[ ";${known:-64};" != *";$head_dim;"* || ";${elements:-half};" != *";$element;"* ]]; then
    [[ ! $known ]] || say "This model needs pipelines of head_dim $head_dim of type $element, which the programs have not yet:" \
      "they are compiled now, in about a minute"
    configure "-DFREEKV_HEAD_DIMS=$(with "$known" "$head_dim")" "-DFREEKV_ELEMENTS=$(with "$elements" "$element")"
  fi
  say "Building FreeKV's programs for head_dim $(cached FREEKV_HEAD_DIMS) of type $(cached FREEKV_ELEMENTS)"
  cmake --build "$build" --target freekv-compare -j "$jobs" >&2
}
