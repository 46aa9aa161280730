// A short decode within a budget that holds everything: retrieval must then be full attention.
#include <cmath>
#include <cstdio>
#include <freekv/freekv.hpp>
#include <vector>

static_assert(__cplusplus >= 202002L);

int main() {
  using pipeline_type = freekv::retrieval_pipeline<freekv::kv_shape<freekv::bfloat16, 64>,
                                                   freekv::page_size<16>, freekv::chunk_means<8>>;
  constexpr int prompt = 100, kv_heads = 2, query_heads = 4, d = pipeline_type::head_dim;
  freekv::host_backend backend({.threads = 2});
  pipeline_type pipeline({.model = {.layers = 2, .query_heads = query_heads, .kv_heads = kv_heads},
                          .budget = {.sink = 16, .window = 32, .selected_units = 8},
                          .capacity = {.max_tokens = 160}},
                         backend);
  const freekv::sequence_id sequence = pipeline.open();
  int drawn = 0;
  const auto numbers = [&](int n) {
    std::vector<float> x(static_cast<std::size_t>(n));
    for (float& value : x) value = std::sin(static_cast<float>(++drawn));
    return x;
  };
  int different = 0;
  for (int step = 0; step < 6; ++step) {
    const int rows = step == 0 ? prompt : 1;
    auto now = pipeline.begin_step(
        {{sequence, rows, step == 0 ? freekv::step_phase::prefill : freekv::step_phase::decode}});
    for (int layer = 0; layer < 2; ++layer) {
      const std::vector<float> keys = numbers(rows * kv_heads * d), values = numbers(rows * kv_heads * d);
      const std::vector<float> queries = numbers(rows * query_heads * d);
      std::vector<float> out(queries.size()), full(queries.size());
      now.append<float>(layer, {.keys = keys, .values = values, .queries = queries});
      now.attend(layer, out);
      now.attend_full(layer, full);
      for (std::size_t i = 0; i < out.size(); ++i)
        if (!(std::fabs(out[i] - full[i]) <= 1e-5f)) ++different;  // NaN too
    }
    now.end();
  }
  std::printf("FreeKV %d.%d.%d: %d tokens, %d outputs differ from full attention\n", FREEKV_VERSION_MAJOR,
              FREEKV_VERSION_MINOR, FREEKV_VERSION_PATCH, pipeline.tokens(sequence), different);
  return different == 0 ? 0 : 1;
}
