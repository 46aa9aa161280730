// The summary that docs/add-a-policy.md adds, in a pipeline: of pages whose keys are 0 but one, it finds that whose first or
// last key is the query. Exits with 1 if not.
#include "end_keys.hpp"

#include <cstdio>
#include <freekv/freekv.hpp>
#include <vector>

namespace {

constexpr int d = 8, page = 8, prompt = 10 * page;
using pipeline = freekv::retrieval_pipeline<freekv::kv_shape<freekv::half, d>, freekv::page_size<page>,
                                            freekv::end_keys, freekv::complete_first<0>>;

/// The page selected where the key of one token is the query and all others are 0.
int selected_with_key_at(int token) {
  freekv::host_backend backend;
  pipeline retrieval({.query_heads = 1,
                      .kv_heads = 1,
                      .budget = {.sink = page, .window = page, .selected_units = 1},
                      .max_tokens = prompt + 1},
                     backend);
  const freekv::sequence_id sequence = retrieval.open();
  const std::vector<float> query(d, 1.0f), zero(d);
  std::vector<float> keys(prompt * d), out(d);
  for (int i = 0; i < d; ++i) keys[token * d + i] = 1.0f;
  retrieval.begin_step({{sequence, prompt, freekv::step_phase::prefill}});
  retrieval.append<float>(0, {.keys = keys, .values = keys});
  retrieval.end_step();
  retrieval.begin_step({{sequence}});
  retrieval.append<float>(0, {.keys = zero, .values = zero, .queries = query});
  retrieval.attend(0, out);
  retrieval.end_step();
  return retrieval.report(0, sequence).attended[0];
}

}  // namespace

int main() {
  constexpr int first = 5 * page, inside = first + 3, last = first + page - 1;
  const int none = 1;  // of equal scores the smallest page's
  if (selected_with_key_at(first) == 5 && selected_with_key_at(last) == 5 &&
      selected_with_key_at(inside) == none)
    return 0;
  std::puts("end_keys does not select the page whose first or last key is the query");
  return 1;
}
