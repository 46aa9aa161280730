// A policy of a kind that no stage asks for.
#include <freekv/freekv.hpp>

struct eviction_kind {};

struct newest_first {
#ifdef FREEKV_FIXED
  using policy_kind = freekv::selection_kind;
#else
  using policy_kind = eviction_kind;
#endif
  static constexpr std::string_view name = "newest_first";
  constexpr int count(int candidates, int k) const { return candidates < k ? candidates : k; }
};

using pipeline = freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, newest_first>;
pipeline::settings settings;
